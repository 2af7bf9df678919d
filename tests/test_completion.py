"""The scripts that the command prints, by which shells complete it, in real shells that get keys from a terminal."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from tests.debian_programs import debian_program
from tests.server.server_process import ROOT

TYPED = {
    b"trio-pool-serve che\t": "check",
    b"trio-pool-serve bench --json\t": "bench --json",
    b"trio-pool-serve check folder --backe\topenv\t": "check folder --backend openvino",
    b"trio-pool-serve completion zs\t": "completion zsh",
    b"trio-pool-serve hosts dra\t": "hosts drain",
}

STUB = 'trio-pool-serve() { echo "ran""<$*>"; }\n'
"""Shows how the shell has completed a line; typed, it is not what it prints."""

SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], "source {script}\n"),
    "zsh": (["-f", "-i"], "fpath=({folder} $fpath); autoload -Uz compinit && compinit -u -D\n"),
}


@contextmanager
def interactive(command: list[str], home: Path) -> Iterator[int]:
    """Run a shell on a terminal of its own; give the terminal's other end."""
    ours, theirs = pty.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "PS1": "> "}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=home, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield ours
        finally:
            process.kill()
            os.close(ours)


def read_until(terminal: int, marker: bytes) -> bytes:
    """Return what the shell has shown up to a marker. Blocks."""
    shown = b""
    while marker not in shown:
        shown += os.read(terminal, 65536)
    return shown


def printed_script(shell: str) -> bytes:
    command = [sys.executable, "-m", "trio_pool_serve", "completion", shell]
    return subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True).stdout


@pytest.mark.parametrize("shell", SHELLS)
async def test_a_shell_completes_commands_flags_and_values(tmp_path: Path, shell: str):
    flags, load = SHELLS[shell]
    script = tmp_path / "_cyclopts_trio-pool-serve"  # as the function in it is called
    script.write_bytes(printed_script(shell))
    with interactive([debian_program(shell), *flags], tmp_path) as terminal:

        async def show(keys: bytes, marker: bytes) -> str:
            os.write(terminal, keys)
            with trio.fail_after(60):
                return (await trio.to_thread.run_sync(read_until, terminal, marker, abandon_on_cancel=True)).decode()

        setting_up = STUB + load.format(script=script, folder=tmp_path) + 'echo "is""-ready"\n'
        await show(setting_up.encode(), b"is-ready")
        for keys, completed in TYPED.items():
            shown = await show(keys + b"\n", b">\r\n")
            (line,) = (line for line in shown.splitlines() if line.startswith("ran<"))
            assert " ".join(line.removeprefix("ran<").removesuffix(">").split()) == completed


def test_fish_lists_what_completes_a_line(tmp_path: Path):
    asked = [f"complete -C 'trio-pool-serve {completed[:-1]}'\n".encode() for completed in TYPED.values()]
    script = printed_script("fish") + b"".join(asked)
    command, env = [debian_program("fish"), "--no-config"], {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    listed = subprocess.run(command, input=script, stdout=subprocess.PIPE, env=env, check=True).stdout.decode()
    words = [line.partition("\t")[0] for line in listed.splitlines()]
    assert words == [completed.split()[-1] for completed in TYPED.values()]
