"""The worked example of a page about moving from another server: what it says is run as it stands there.

The section has fenced blocks. The last ``yaml`` block is a compose file with one service that runs
``trio-pool-serve serve MODEL``, with a published port and a health check. Each ``sh`` block has probes, one per line.
The ``python`` block is a client, and the ``text`` block after it what the client prints. A test replaces the hub's id
of the model by a folder, and the ports by a free one; nothing else.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio
import yaml
from attrs import frozen

from tests.server.server_process import ServerProcess, free_port, started

SECTIONS = ["A worked example", "Routes", "Flags", "Request fields", "Deliberate differences"]
COMMANDS = {"trio-pool-serve": [sys.executable, "-m", "trio_pool_serve"], "python": [sys.executable]}
"""What a container finds on its path."""


def sections(page: Path) -> dict[str, str]:
    """Return the text of each section of a page by its title."""
    parts = re.split(r"^## (.+)\n", page.read_text(), flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@frozen(kw_only=True)
class WorkedExample:
    """What a page's example consists of."""

    compose: Mapping[str, Any]
    probes: Sequence[str]
    client: str
    printed: str

    @classmethod
    def of(cls, page: Path) -> "WorkedExample":
        blocks = re.findall(r"^```(\w+)\n(.*?)^```", sections(page)["A worked example"], flags=re.M | re.S)
        by_language: dict[str, list[str]] = {}
        for language, block in blocks:
            by_language.setdefault(language, []).append(block)
        return cls(
            compose=yaml.safe_load(by_language["yaml"][-1]),
            probes=[line for block in by_language["sh"] for line in block.splitlines() if line.strip()],
            client=by_language["python"][-1],
            printed=by_language["text"][-1],
        )

    @property
    def service(self) -> Mapping[str, Any]:
        (service,) = self.compose["services"].values()
        return service

    @property
    def command(self) -> list[str]:
        """The command; ``$$`` is a dollar in a compose file."""
        command = self.service["command"]
        return [word.replace("$$", "$") for word in (shlex.split(command) if isinstance(command, str) else command)]

    @property
    def ports(self) -> tuple[str, str]:
        """The published port and the one that the server listens on."""
        (ports,) = self.service["ports"]
        published, _, own = ports.rpartition(":")
        return published.rpartition(":")[2], own

    @property
    def health_check(self) -> list[str]:
        match self.service["healthcheck"]["test"]:
            case ["CMD", program, *arguments]:
                return [*COMMANDS.get(program, [program]), *arguments]
            case ["CMD-SHELL", line] | str(line):
                return ["bash", "-c", line]
            case other:
                raise AssertionError(f"no health check: {other}")

    def moved(self, text: str, port: int) -> str:
        """Return a text with the address of the test's server in place of the example's."""
        published, own = self.ports
        return re.sub(rf"(localhost|127\.0\.0\.1):({published}|{own})\b", f"127.0.0.1:{port}", text)

    @contextmanager
    def running(self, folders: Mapping[str, Path], log_path: Path) -> Iterator[ServerProcess]:
        """Run the service's command, with a folder of ``folders`` in place of a hub's id."""
        program, *words = self.command
        port, (_, own) = free_port(), self.ports
        known = {**folders, own: port, "0.0.0.0": "127.0.0.1"}
        arguments = [f"{word}={folders[word]}" if word in folders else str(known.get(word, word)) for word in words]
        env = {name: str(value) for name, value in self.service.get("environment", {}).items()}
        env.setdefault("TRIO_POOL_SERVE_ENGINE", "local")  # each engine process imports torch and loads the model
        with started([*COMMANDS[program], *arguments], port, log_path, env) as server:
            yield server

    def wait_healthy(self, server: ServerProcess) -> None:
        """Run the health check once the server is ready; it must pass."""
        trio.run(server.wait_until, "/readyz")
        command = [self.moved(word, server.port) for word in self.health_check]
        done = subprocess.run(command, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()

    def probe(self, server: ServerProcess) -> None:
        """Run each probe once; it must pass."""
        for line in self.probes:
            done = subprocess.run(["bash", "-c", self.moved(line, server.port)], capture_output=True, timeout=60)
            assert done.returncode == 0, (line, done.stderr.decode())

    def run_client(self, server: ServerProcess) -> str:
        """Run the client, and return what it prints."""
        program = self.moved(self.client, server.port)
        env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1"}
        done = subprocess.run(
            [sys.executable, "-"], input=program, capture_output=True, text=True, env=env, timeout=120
        )
        assert done.returncode == 0, done.stderr + server.log
        return done.stdout
