"""Requests that hang or crash other servers: each is answered, the next one too, and nothing is held afterwards."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.api.serving import key_file_of
from tests.end_to_end.hanging_requests import FIVE, NAN_WORD, ONE, PAGE, REQUESTS, Asker, HangingRequest, page, refused
from tests.model_folders import write_json
from tests.models.model_families import pooling, write_family
from tests.models.vision_families import clip
from tests.server.programs import script
from tests.server.server_process import SCRIPTED, serving

NEXT_WITHIN_S = 1.0
IDLE_WITHIN_S = 10.0

KINDS: Mapping[str, tuple[str, ...]] = {
    "local": ("--engine", "local"),
    "process": ("--engine", "process"),
    "workers": ("--api-workers", "2"),
}

PLAIN = "no-limits"

KEYS = f"""
[plain]
key = "{PLAIN}"
admin = true
[one]
key = "{ONE}"
max_concurrent_requests = 1
[five]
key = "{FIVE}"
max_concurrent_requests = 5
"""

FLAGS = ("--max-batch-tokens", "128", "--trust-request-chat-template")


def write_overflowing(folder: Path) -> Path:
    """A model whose weights are finite, and whose output for ``NAN_WORD`` is not."""
    write_family(folder, "bert", modules=[pooling("mean")])
    (token,) = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(NAN_WORD, add_special_tokens=False).ids
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][token] = 3e38
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_raising(folder: Path) -> Path:
    """A model whose chat template raises."""
    write_family(folder, "bert", modules=[pooling("mean")])
    path = folder / "tokenizer_config.json"
    write_json(path, {**json.loads(path.read_text()), "chat_template": "{{ raise_exception('never like that') }}"})
    return folder


@pytest.fixture(scope="module")
def models(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        "minilm": minilm,
        "qwen3": write_family(root / "qwen3", "qwen3", modules=[pooling("lasttoken")]),
        "clip": clip(root / "clip"),
        "raising": write_raising(root / "raising"),
        "overflowing": write_overflowing(root / "overflowing"),
    }
    return [f"{name}={folder}" for name, folder in folders.items()]


@pytest.fixture(
    scope="module", params=["local", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("process", "workers"))]
)
def client(
    request: pytest.FixtureRequest, models: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A client of a real server of each kind."""
    folder = tmp_path_factory.mktemp(request.param)
    keys = key_file_of(folder, KEYS)
    arguments = (*models, *KINDS[request.param], *FLAGS, "--api-keys-file", str(keys))
    with serving(folder, *arguments) as server, client_of(server.url) as client:
        yield client


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {PLAIN}"}, timeout=60)


def held(load: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a server's load is not that of an idle one."""
    counts = {f"{name}.{key}": model[key] for name, model in load["models"].items()
              for key in ("queued_rows", "queued_tokens", "admitted_tokens", "in_flight_batches")}  # fmt: skip
    places = {**load["limiters"], **load["workers"], "media_fetches": load["media_fetches"]}
    counts |= {f"{name}.{key}": limiter[key] for name, limiter in places.items() for key in ("borrowed", "waiting")}
    counts |= {name: load[name] for name in ("server_load", "request_memory_bytes")}
    return {name: count for name, count in counts.items() if count}


def assert_serves_the_next(client: httpx.Client) -> None:
    """The next request is answered within a second, and then nothing is held."""
    began = time.perf_counter()
    assert Asker(client).embed("the next one").status_code == 200
    assert time.perf_counter() - began < NEXT_WITHIN_S
    assert client.get("/livez").status_code == 200
    until = time.monotonic() + IDLE_WITHIN_S
    while left := held(client.get("/load").json()):
        assert time.monotonic() < until, left


@pytest.mark.parametrize(
    "request_",
    [pytest.param(each, id=each.id, marks=[pytest.mark.slow] if each.is_slow else []) for each in REQUESTS],
)
def test_it_is_answered_and_so_is_the_next(client: httpx.Client, request_: HangingRequest):
    request_.check(Asker(client))
    assert_serves_the_next(client)


@pytest.mark.parametrize(
    "kind", ["local", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("process", "workers"))]
)
def test_a_forward_pass_that_raises_fails_its_request_alone(tmp_path, scripted_folder, kind):
    with (
        serving(tmp_path, f"minilm={scripted_folder}", *KINDS[kind], command=SCRIPTED) as server,
        client_of(server.url) as client,
    ):
        for _ in range(3):
            answer = Asker(client).embed([script.RAISES])
            refused(answer, 500, "request's id")
            assert "SECRET" not in answer.text
            assert Asker(client).embed([5]).status_code == 200
            assert_serves_the_next(client)


def test_the_page_shows_these_requests():
    assert PAGE.read_text() == page(), "it is written by: python -m tests.end_to_end.hanging_requests"
    assert len({request.issue for request in REQUESTS}) == len(REQUESTS)
