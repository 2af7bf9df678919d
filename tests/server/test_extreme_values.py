"""Requests with extreme values, to real servers of one process and of several: nothing but the request fails."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import trio
from attrs import define, field
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.api.extreme_bodies import ENDPOINTS, bodies, fields_of
from tests.conftest import client_of
from tests.lanes import sampled
from tests.model_folders import write_json, write_scripted_folder
from tests.server.server_process import (
    API_PROCESS,
    ENGINE_PROCESS,
    SCRIPTED,
    ServerProcess,
    busy_of,
    free_port,
    started,
)

PLAIN = {"input": ["hello world", "w1 w2 w3"]}

PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    "local": ("--engine", "local"),
    "process": ("--engine", "process", "--replicas", "1"),
    "several API workers": ("--engine", "process", "--replicas", "1", "--api-workers", "2"),
}

AT_ONCE = 4
"""Requests with extreme values, while plain ones are answered."""

ROUNDS, MANY_ROUNDS = 2, 6
"""In each, every field of every endpoint is extreme once at least; many are for `scripts/test rest`."""


def write_classifier(folder: Path) -> Path:
    write_scripted_folder(folder)
    names = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
    sizes = {"model_type": "bert", "vocab_size": 210, "max_position_embeddings": 512, "pad_token_id": 0}
    write_json(folder / "config.json", {**sizes, "architectures": ["BertForSequenceClassification"], **names})
    (folder / "config_sentence_transformers.json").unlink()
    return folder


@define(eq=False)
class Driven:
    """A server, and what it is and answers when all is well."""

    server: ServerProcess
    expected: Any = None
    parts: set[psutil.Process] = field(factory=set)
    models: dict[str, str] = field(factory=dict)
    """By path and dialect, a model that can do what the example asks for, if there is one."""
    statuses: Counter[int] = field(factory=Counter)
    """Of the requests with extreme values."""

    def running(self) -> set[psutil.Process]:
        """The processes that serve; those of templates come and go."""
        return {*self.server.processes(ENGINE_PROCESS), *self.server.processes(API_PROCESS)}

    async def plain(self, client: httpx.AsyncClient) -> Any:
        answer = await client.post("/v1/embeddings", json=PLAIN)
        assert answer.status_code == 200, answer.text
        return [item["embedding"] for item in answer.json()["data"]]

    async def learn(self, processes: int) -> None:
        """Wait for all processes, and see what the examples are answered with."""
        await self.server.wait_until("/readyz")
        await self.server.wait_joined(processes)
        async with client_of(self.server.url) as client:
            load = (await client.get("/load")).json()
            self.expected = await self.plain(client)
            for path, candidate in ENDPOINTS:
                for model in load["models"]:
                    answer = await client.post(path, json={**candidate.endpoint.example, "model": model})
                    if answer.status_code == 200:
                        self.models.setdefault(path + candidate.dialect.name, model)
        self.parts = self.running()

    async def take(self, evil: list[tuple[str, bytes]]) -> None:
        """Send requests with extreme values, and plain ones meanwhile."""
        done = trio.Event()
        waiting = list(evil)

        async def send(client: httpx.AsyncClient) -> None:
            while waiting:
                path, body = waiting.pop()
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                self.statuses[answer.status_code] += 1
                # 424 is how TEI says 500, but for what a model cannot do.
                assert answer.status_code < 500, (path, body[:500], answer.text)
                failed = answer.status_code == 424 and "Unsupported task" not in answer.text
                assert not failed, (path, body[:500], answer.text)

        async def go_on(client: httpx.AsyncClient) -> None:
            while not done.is_set():
                assert await self.plain(client) == self.expected

        async with client_of(self.server.url) as client, trio.open_nursery() as nursery:
            nursery.start_soon(go_on, client)
            async with trio.open_nursery() as senders:
                for _ in range(AT_ONCE):
                    senders.start_soon(send, client)
            done.set()

    async def check_idle(self) -> None:
        """The same processes answer the same, and nothing is queued, borrowed or admitted."""
        async with client_of(self.server.url) as client:
            assert await self.plain(client) == self.expected
            with trio.fail_after(20):
                while busy_of((await client.get("/load")).json()):  # noqa: ASYNC110  (another process)
                    await trio.sleep(0.02)
        assert self.running() == self.parts
        assert "Traceback" not in self.server.log


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Driven]]:
    """Servers by placement, started when they are asked for."""
    embedder = write_scripted_folder(tmp_path_factory.mktemp("models") / "e")
    classifier = write_classifier(tmp_path_factory.mktemp("models") / "c")
    with ExitStack() as stack:

        @cache
        def placed(name: str) -> Driven:
            port, folder = free_port(), tmp_path_factory.mktemp("server")
            command = [*SCRIPTED, f"e={embedder}", f"c={classifier}", *PLACEMENTS[name], "--port", str(port)]
            driven = Driven(stack.enter_context(started(command, port, folder / "server.log", {})))
            trio.run(driven.learn, 2 if name == "several API workers" else 1)
            return driven

        yield placed


@st.composite
def rounds(draw: st.DrawFn, models: Mapping[str, str]) -> list[tuple[str, bytes]]:
    """Return a body for every field of every endpoint, for a model that can do what is asked if there is one."""
    return [
        (path, draw(bodies(candidate, name, {"model": models.get(path + candidate.dialect.name, "e")})))
        for path, candidate in ENDPOINTS
        for name in fields_of(candidate.endpoint.wire)
    ]


@sampled(
    ("placement", "rounds_taken"),
    [("process", ROUNDS), *((placement, MANY_ROUNDS) for placement in PLACEMENTS if placement != "process")],
    keep=[("process", ROUNDS)],
)
def test_extreme_values_fail_their_own_request_alone(
    servers: Callable[[str], Driven], placement: str, rounds_taken: int
):
    driven = servers(placement)

    # A server that has died is not to be asked again for a shorter example.
    @settings(max_examples=rounds_taken, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(rounds(driven.models))
    def check(evil: list[tuple[str, bytes]]) -> None:
        trio.run(driven.take, evil)

    check()
    trio.run(driven.check_idle)
    assert {200, 400, 404, 422} <= {*driven.statuses}, "some are extreme and yet fine"
