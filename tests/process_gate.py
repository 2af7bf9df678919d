"""Work in another process that says when it has begun, and ends when it is told to."""

import os
from pathlib import Path

from attrs import frozen

from tests.pipes import read, write


@frozen
class Gate:
    """Two named pipes: opening one waits for who opens its other end."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> "Gate":
        folder.mkdir(exist_ok=True)
        for name in ("entered", "let_go"):
            os.mkfifo(folder / name)
        return cls(folder)

    def __call__(self) -> int:
        """What is called in the other process; returns which that is."""
        (self.folder / "entered").write_text(str(os.getpid()))
        (self.folder / "let_go").read_bytes()
        return os.getpid()

    async def wait_entered(self) -> int:
        """Wait until the work has begun; return whose it is."""
        return int(await read(self.folder / "entered"))

    async def let_go(self) -> None:
        await write(self.folder / "let_go", "go")
