"""Each field of each request over a socket: obeyed, or refused by name, or ignored for a reason that is written."""

import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import httpx
import msgspec
import pytest

from tests.api.dialects.field_cases import LONG, MODEL, ROUTES, UNACCEPTED, Case
from tests.api.dialects.test_every_dialect import STRINGS
from tests.api.scripted_models import PROMPTS, Everything
from tests.conftest import render_templates_on_the_loop
from tests.model_folders import write_json, write_scripted_folder
from tests.rendering.chat.chat_folders import CHATML
from tests.scripted_runner import ScriptedRunner
from tests.tables import each
from tests.tensors import WIDTH
from trio_pool_serve.api.dialects import DIALECTS
from trio_pool_serve.api.http.endpoint import DialectEndpoint
from trio_pool_serve.api.http.endpoint_choice import decode_body, endpoints_by_path
from trio_pool_serve.config import Config, InputConfig, NetworkConfig
from trio_pool_serve.service import Service

PAGE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "generate_fields.py"))
why_ignored, dialects_of_foreign = PAGE["why_ignored"], PAGE["dialects_of_foreign"]

RECORDS = Path(__file__).parents[2] / "compatibility"
"""What other servers' fields are, read from their own code."""

NO_TYPE = [[[[]]]]
"""A value that no field has the type of."""

BY_PATH = endpoints_by_path(DIALECTS)
ENDPOINTS = {
    (candidate.dialect.name, path): candidate
    for path, candidates in BY_PATH.items()
    for candidate in candidates
    if path == candidate.endpoint.paths[0]
}


class InPairs(Everything):
    """Scores pairs, whose logits may be asked for, and embeds the chunks of a document."""

    scoring = "pairs"
    pools_chunks = True


class ByVectors(Everything):
    """Compares vectors, as ``/similarity`` does."""


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner(embeds_width=WIDTH, default_batch_tokens=1024)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = write_scripted_folder(tmp_path / "model", max_length=512)
    declared = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**declared, "chat_template": CHATML})
    return Config(
        models=(f"{MODEL}={folder}",), input=InputConfig(enable_prompt_embeds=True, trust_request_chat_template=True)
    )


@pytest.fixture
async def service(service: Service) -> Service:
    render_templates_on_the_loop(service)
    return service


@attrs.frozen
class Server:
    """The server that each field is sent to."""

    service: Service
    scripted: ScriptedRunner
    http: httpx.AsyncClient

    async def ask(self, key: tuple[str, str], body: Mapping[str, Any]) -> httpx.Response:
        served = self.service.models.find()
        model = served.loaded
        spec = ByVectors() if key[1] in ("/similarity", "/v2/models/{name}/infer") else InPairs()
        folder = attrs.evolve(model.folder, spec=spec, prompts=PROMPTS)
        served.loaded, served.folder = attrs.evolve(model, folder=folder), folder
        self.scripted.labels = 1 if "query" in body or key[1] == "/score" else 2
        self.scripted.batches.clear()
        return await self.http.post(key[1].replace("{name}", MODEL), json=body, headers={"X-Request-Id": "the test's"})

    async def seen(self, key: tuple[str, str], body: Mapping[str, Any]) -> tuple[int, Any, Any]:
        """Return the status, the response, and what the model was asked for."""
        answer = await self.ask(key, body)
        rows = [
            (request.params, request.prompt.token_ids.tolist(), request.priority)
            for batch in self.scripted.batches
            for request in batch.requests
        ]
        is_json = answer.headers["content-type"] == "application/json"
        shown = answer.json() if is_json else answer.content
        if isinstance(shown, dict):
            for name in ("created", "total_duration", "load_duration"):
                shown.pop(name, None)
        return answer.status_code, shown, sorted(rows, key=repr)

    async def assert_refused(self, key: tuple[str, str], body: Mapping[str, Any], name: str) -> str:
        """Return the message of a refusal in the dialect's shape, which names the field."""
        answer = await self.ask(key, body)
        assert answer.status_code == (422 if key[0] == "tei" else 400), (name, answer.text)
        shown, error = answer.json(), answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert isinstance(error, str) == (key[0] in ("tei", *STRINGS))
        if error is not message:
            assert error["param"] == name, (name, error)
        assert {"cohere": "message", "tei": "error_type"}.get(key[0], "error") in shown
        assert name in message, (name, message)
        return message


@pytest.fixture
def server(service: Service, scripted: ScriptedRunner, client: httpx.AsyncClient) -> Server:
    return Server(service, scripted, client)


def names_of(candidate: DialectEndpoint) -> set[str]:
    return set(attrs.fields_dict(candidate.endpoint.wire))


def refusals_of(candidate: DialectEndpoint) -> dict[str, Any]:
    fields = attrs.fields_dict(candidate.endpoint.wire)
    return {name: field.metadata["accepted"] for name, field in fields.items() if "because" in field.metadata}


def obeyed_of(candidate: DialectEndpoint) -> list[str]:
    refused = refusals_of(candidate)
    fields = attrs.fields_dict(candidate.endpoint.wire)
    # What cache_salt does is seen with a cache: tests/api/http/test_cached_results.py.
    names = fields.keys() - {"cache_salt"}
    return [name for name in fields if name in names - refused.keys() and why_ignored(candidate, name) is None]


def test_each_endpoint_has_a_case_for_each_field():
    assert set(ROUTES) == set(ENDPOINTS)
    for key, candidate in ENDPOINTS.items():
        assert not set(obeyed_of(candidate)) - set(ROUTES[key][1]), key
        assert not set(refusals_of(candidate)) - set(UNACCEPTED), key


def test_each_field_of_vllm_infinity_and_tei_is_among_those_of_its_path():
    theirs = [
        ("/v1" if name == "infinity" and path == "/embeddings" else "", path, names.split())
        for name in ("vllm", "infinity")
        for path, names in re.findall(r"^(\S+): (.+)$", (RECORDS / f"{name}_fields.txt").read_text(), flags=re.M)
    ]
    routes = json.loads((RECORDS / "tei_routes.json").read_text())["routes"]
    theirs += [
        ("", route.removeprefix("POST "), [name.partition(".")[0] for name in routes[route].get("fields", {})])
        for route in routes
    ]
    served = {path: set().union(*map(names_of, candidates)) for path, candidates in BY_PATH.items()}
    found = [
        (path, name, served[prefix + path])
        for prefix, path, names in theirs
        if prefix + path in served
        for name in names
    ]
    assert len(found) > 150
    assert [(path, name) for path, name, known in found if name not in known] == []


@each("key", ROUTES, ids=map(" ".join, ROUTES))
async def test_a_field_that_is_obeyed_changes_the_answer_and_has_a_type(server, key):
    body, cases = ROUTES[key]
    for name in obeyed_of(ENDPOINTS[key]):
        case = cases[name] if isinstance(cases[name], Case) else Case(cases[name])
        base = {**body, **case.beside}
        without, found = await server.seen(key, base), await server.seen(key, {**base, name: case.value})
        assert found != without, (name, found)
        assert (found[0] == 200) is not case.refused, (name, found)
        await server.assert_refused(key, {**base, name: NO_TYPE}, name)


@each("key", ROUTES, ids=map(" ".join, ROUTES))
async def test_a_field_that_is_refused_is_named_with_what_was_sent_and_what_is_accepted(server, key):
    body, _ = ROUTES[key]
    without = await server.seen(key, body)
    for name, accepted in refusals_of(ENDPOINTS[key]).items():
        message = await server.assert_refused(key, {**body, name: UNACCEPTED[name]}, name)
        wanted = (f"{name} must be ", "null, not ") if accepted else (f"Leave out `{name}`: ",)
        assert all(part in message for part in wanted), message
        for value in (*accepted, None):
            assert await server.seen(key, {**body, name: value}) == without, (name, value)


@each("key", ROUTES, ids=map(" ".join, ROUTES))
async def test_a_field_that_is_ignored_changes_nothing(server, key):
    body, cases = ROUTES[key]
    without = await server.seen(key, body)
    for name in attrs.fields_dict(ENDPOINTS[key].endpoint.wire):
        if why_ignored(ENDPOINTS[key], name) is not None:
            value = cases.get(name, "anything")
            assert await server.seen(key, {**body, name: value}) == without, name


@each("key", [("openai", "/v1/embeddings"), ("vllm", "/rerank"), ("tei", "/rerank"), ("vllm", "/classify")])
async def test_every_padding_of_transformers_changes_nothing_and_nor_does_a_user(server, key):
    """Whichever dialect of the path has the fields."""
    body, _ = ROUTES[key]
    without = await server.seen(key, body)
    for value in (True, False, "longest", "max_length", "do_not_pad"):
        assert await server.seen(key, {**body, "padding": value, "user": "me"}) == without, value


@each(
    ("key", "beside", "sent"),
    [
        (("vllm", "/pooling"), {"task": "sparse_embed"}, {"use_activation": True}),
        (("vllm", "/tokenize"), {"input_type": "query"}, {"add_special_tokens": True}),
        (("voyage", "/v1/embeddings"), {}, {"late_chunking_params": {}}),
    ],
)
async def test_the_value_that_holds_anyway_changes_nothing(server, key, beside, sent):
    body = {**ROUTES[key][0], **beside}
    without = await server.seen(key, body)
    assert without[0] == 200
    assert await server.seen(key, {**body, **sent}) == without


@each("key", ROUTES, ids=map(" ".join, ROUTES))
async def test_null_stands_for_a_field_that_is_not_given(server, key):
    body, _ = ROUTES[key]
    fields = attrs.fields_dict(ENDPOINTS[key].endpoint.wire)
    nulls = dict.fromkeys(name for name, field in fields.items() if field.default is None)
    assert await server.seen(key, {**nulls, **body}) == await server.seen(key, body)


def test_a_field_of_another_dialect_of_the_path_that_is_not_refused_selects_that_dialect():
    selecting = 0
    for path, candidates in BY_PATH.items():
        for index, candidate in enumerate(candidates):
            body, _ = ROUTES[candidate.dialect.name, candidate.endpoint.paths[0]]
            for name, selected in dialects_of_foreign(candidates, index).items():
                for size in ({}, {"x": LONG * 200}) if selected else ():
                    sent = msgspec.json.encode({**body, **size, name: None})
                    assert decode_body(sent, candidates, NetworkConfig()).claimed_by.dialect.name == selected, (
                        path,
                        name,
                    )
                    selecting += 1
    assert selecting > 40


async def test_a_field_of_another_dialect_of_the_path_is_refused_unless_it_is_null(server):
    for path, candidates in BY_PATH.items():
        for index, candidate in enumerate(candidates):
            key = (candidate.dialect.name, candidate.endpoint.paths[0])
            for name in (name for name, selected in dialects_of_foreign(candidates, index).items() if not selected):
                for size in ({}, {"x": LONG * 200}):  # a large body is searched before it is parsed
                    body = {**ROUTES[key][0], **size}
                    await server.assert_refused((key[0], path), {**body, name: 1}, name)
                assert (await server.ask((key[0], path), {**ROUTES[key][0], name: None})).status_code == 200, name


async def test_a_field_that_no_dialect_has_is_ignored(server):
    for key, (body, _) in ROUTES.items():
        assert await server.seen(key, {**body, "unheard_of": 1}) == await server.seen(key, body)
