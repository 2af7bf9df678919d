"""A later start of a text model on CPU: no process of the server imports torch, or the code of transformers' models."""

import os
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import trio

from tests.conftest import client_of
from tests.end_to_end.test_every_kind import convert_all
from tests.lanes import sampled
from tests.models.static_families import STATIC, static_reference
from tests.models.test_openvino_agreement import FOLDERS
from tests.server.server_process import ServerProcess, launched, until

pytest.importorskip("openvino")

SERVE = (sys.executable, "-m", "trio_pool_serve", "serve")

AT_SIGNAL = """
import os, signal, sys

def write_names(*_):
    path = os.path.join({folder!r}, str(os.getpid()))
    with open(path + ".new", "w") as file:
        file.write("\\n".join(name for name, module in list(sys.modules.items()) if module is not None))
    os.rename(path + ".new", path)

signal.signal(signal.SIGUSR2, write_names)
"""
"""``sitecustomize.py``, which each process of Python imports first."""

HEAVY = ("torch", "transformers.models", "transformers.modeling_utils", "scipy", "pandas", "ray")

REQUESTS = {
    "embed": ("/v1/embeddings", {"input": ["one", "two"]}),
    "messages": ("/v1/embeddings", {"messages": [{"role": "user", "content": "one"}]}),
    "score": ("/score", {"text_1": "one", "text_2": ["two", "three"]}),
    "classify": ("/v1/classify", {"input": ["one", "two"]}),
    "sparse": ("/embed_sparse", {"inputs": ["one"]}),
    "token_classify": ("/pooling", {"input": ["one"], "task": "token_classify"}),
}


async def modules_of(server: ServerProcess, folder: Path) -> dict[str, list[str]]:
    """Return the names of the modules of each process of a server, by its command line."""
    own = psutil.Process(server.process.pid)
    found = {}
    for process in [own, *own.children(recursive=True)]:
        command = " ".join(process.cmdline()[1:])
        if "resource_tracker" in command:
            continue
        path = folder / str(process.pid)
        await until(lambda pid=process.pid: catches(pid, signal.SIGUSR2))  # it may have just been started
        os.kill(process.pid, signal.SIGUSR2)
        await until(path.exists)
        found[f"{process.pid} {command}"] = path.read_text().splitlines()
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s+(\w+)", status)[0], 16) >> number - 1 & 1)


def heavy(names: Iterable[str]) -> set[str]:
    return {name for name in names for each in HEAVY if name == each or name.startswith(f"{each}.")}


@pytest.mark.slow
async def test_static_embeddings_are_served_by_the_command_alone_without_torch(tmp_path: Path):
    """At the first start, too: nothing is converted, and tokenizer.json is read without transformers."""
    folder, path_of_names = STATIC["potion"](tmp_path / "potion"), tmp_path / "names"
    path_of_names.mkdir()
    (path_of_names / "sitecustomize.py").write_text(AT_SIGNAL.format(folder=str(path_of_names)))
    environment = {"PYTHONPATH": f"{path_of_names}:{os.environ.get('PYTHONPATH', '')}"}
    async with launched(tmp_path, folder, command=SERVE, env=environment) as server:
        answer = await server.post({"input": ["A nursery owns its tasks.", "Yes"]})
        modules = await modules_of(server, path_of_names)
    vectors = np.array([item["embedding"] for item in answer.json()["data"]])
    expected = static_reference(folder).encode(["A nursery owns its tasks.", "Yes"])
    assert np.abs(vectors - expected).max() < 1e-5
    names = next(iter(modules.values()))
    assert heavy(names) == set()
    assert not {"transformers", "openvino"} & {*names}


@sampled(
    ("name", "request_name", "flags"),
    [
        ("embedder-qwen3", "messages", ()),
        ("embedder-bert", "embed", ("--engine", "process", "--replicas", "1")),
        ("embedder-bert", "embed", ("--api-workers", "2", "--replicas", "1")),
        ("classifier-deberta-v2", "classify", ()),
        ("classifier-modernbert", "classify", ()),
        ("token-classifier-bert", "token_classify", ()),
        ("late-interaction-colbert_v2", "score", ()),
        ("sparse-splade_max", "sparse", ()),
        ("bge-m3", "sparse", ()),
    ],
    keep=[("embedder-qwen3", "messages", ())],
)
async def test_a_second_start_imports_no_torch(name: str, request_name: str, flags: tuple[str, ...], tmp_path: Path):
    folder, path_of_names = FOLDERS[name](tmp_path / name), tmp_path / "names"
    path_of_names.mkdir()
    if request_name == "messages":
        (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (path_of_names / "sitecustomize.py").write_text(AT_SIGNAL.format(folder=str(path_of_names)))
    arguments = [str(folder), "--device", "cpu", "--dtype", "float32", "--backend", "openvino", *flags]
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    await trio.to_thread.run_sync(convert_all, [folder], tmp_path / "cache" / "trio_pool_serve", arguments)
    environment = {**cache, "PYTHONPATH": f"{path_of_names}:{os.environ.get('PYTHONPATH', '')}"}
    async with (
        launched(tmp_path, *arguments, command=SERVE, env=environment) as server,
        client_of(server.url) as client,
    ):
        path, body = REQUESTS[request_name]
        answer: httpx.Response = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        modules = await modules_of(server, path_of_names)
    assert len(modules) > bool(flags), "no process but the first was asked"
    assert {command: heavy(names) for command, names in modules.items() if heavy(names)} == {}
