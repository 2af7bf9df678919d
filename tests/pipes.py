"""Named pipes between a test and processes: opening one waits for who opens its other end."""

from pathlib import Path

import trio

LIMIT_S = 300


async def read(pipe: Path) -> str:
    with trio.fail_after(LIMIT_S):
        return await trio.to_thread.run_sync(pipe.read_text, abandon_on_cancel=True)


async def write(pipe: Path, text: str) -> None:
    with trio.fail_after(LIMIT_S):
        await trio.to_thread.run_sync(pipe.write_text, text, abandon_on_cancel=True)
