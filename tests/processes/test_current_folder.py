"""A command and its child processes run no Python file of the folder in which they are started."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import trio

from tests.lanes import sampled
from tests.models.model_families import write_family
from tests.server.server_process import API_PROCESS, ENGINE_PROCESS, launched
from trio_pool_serve.models.loading.converter import MODULE

COMMAND = str(Path(sys.executable).with_name("trio-pool-serve"))
"""The script that pip installs. ``python -m trio_pool_serve`` imports from the current folder by Python's own rule."""

NOT_INSTALLED = {"sitecustomize", "usercustomize", "cloudpickle", "tensorflow", "flash_attn", "bitsandbytes"}
"""Modules that Python or a package imports if they are there."""

INSTALLED = {name for name in packages_distributions() if name.isidentifier()}

NAMES = {*sys.stdlib_module_names, *INSTALLED, *NOT_INSTALLED, "trio_pool_serve"}

NOTES_ITS_NAME = """
import posix
file = posix.open({ran!r}, posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND)
posix.write(file, (__name__ + "\\n").encode())
raise ImportError("run from the current folder")
"""

CONVERSATION = {"messages": [{"role": "user", "content": "hello"}], "chat_template": "{{ messages[0].content }}"}


@pytest.fixture(scope="module")
def hostile_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose folder has a module of each name, which notes that it is run, and fails."""
    folder = write_family(tmp_path_factory.mktemp("current") / "bert", "bert")
    for name in NAMES:
        (folder / f"{name}.py").write_text(NOTES_ITS_NAME.format(ran=f"{folder}/ran"))
    (folder / "in.jsonl").write_text('{"text": "hello"}\n')
    return folder


@pytest.fixture
def model(hostile_model: Path) -> Iterator[Path]:
    """That model; none of its modules may be run."""
    ran = hostile_model / "ran"
    ran.unlink(missing_ok=True)
    yield hostile_model
    assert not ran.exists(), ran.read_text().split()


@sampled("flags", [("process", "2"), ("local", "1")], keep=[("process", "2")], ids="-".join)
async def test_a_server_runs_no_module_of_the_current_folder(flags: tuple[str, str], model: Path, tmp_path: Path):
    """API processes, engine processes, the process that converts the model, and the process that renders templates."""
    engine, workers = flags
    command = ("env", "-C", str(model), COMMAND, "serve", ".", "--trust-request-chat-template")
    settings = ("--engine", engine, "--api-workers", workers, "--replicas", "1", "--cache-dir", str(tmp_path / "cache"))
    async with launched(tmp_path, *settings, command=command) as server:
        assert (await server.post(CONVERSATION)).status_code == 200, server.log
        spawned = [process for process in server.family() if "spawn_main" in " ".join(process.cmdline())]
        assert spawned, "a process renders templates"
        assert "OpenVINO" in server.log, "the model was converted"
        await server.wait_joined(int(workers))
        assert len(server.processes(API_PROCESS)) == (2 if engine == "process" else 0)
        assert len(server.processes(ENGINE_PROCESS)) == (1 if engine == "process" else 0)
        await server.drain()


COMMANDS = (
    "embed in.jsonl {made}/out.jsonl --model .",
    "convert . --cache-dir {made}",
    "check . --cache-dir {made}",
    "completion bash",
    "cache list --cache-dir {made}",
)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_no_module_of_the_current_folder(command: str, model: Path, tmp_path: Path):
    words = command.format(made=tmp_path).split()
    ended = subprocess.run([COMMAND, *words], cwd=model, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


PLUGIN = """
import sys
from pathlib import Path
with Path(__file__).with_name("imported").open("a") as file:
    file.write(f"{sys.argv[0]}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["current folder", "PYTHONPATH"])
async def test_child_processes_find_the_plugins_that_their_parent_finds(way: str, tmp_path: Path):
    """``python -m`` finds plugins of the current folder."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "own_plugin.py").write_text(PLUGIN)
    model = write_family(tmp_path / "bert", "bert")
    command, env = {
        "current folder": (("env", "-C", str(folder), sys.executable, "-m", "trio_pool_serve"), {}),
        "PYTHONPATH": ((COMMAND,), {"PYTHONPATH": str(folder)}),
    }[way]
    settings = ("--engine", "process", "--api-workers", "2", "--plugins", "own_plugin")
    command = (*command, "serve", str(model), "--cache-dir", str(tmp_path / "cache"))
    async with launched(tmp_path, *settings, "--replicas", "1", command=command, env=env) as server:
        await server.wait_joined(2)
        imported = (folder / "imported").read_text().split("\n")
        assert sum(API_PROCESS.replace(".", "/") in each for each in imported) == 2
        assert sum(ENGINE_PROCESS.replace(".", "/") in each for each in imported) == 1
        assert sum(MODULE.replace(".", "/") in each for each in imported) == 1
        await server.drain()


async def test_the_command_does_not_find_plugins_in_the_current_folder(tmp_path: Path):
    (tmp_path / "own_plugin.py").write_text(PLUGIN)
    command = [COMMAND, "serve", "model", "--plugins", "own_plugin"]
    ended = await trio.run_process(command, cwd=tmp_path, capture_stderr=True, check=False)
    assert ended.returncode == 2
    assert b"--plugins: own_plugin cannot be imported" in ended.stderr
    assert not (tmp_path / "imported").exists()
