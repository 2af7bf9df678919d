"""Requests made from ``/openapi.json``, valid and not: no route fails, and responses are as the document says."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.lanes import sampled
from tests.models.classifier_families import write_classifier
from tests.models.model_families import pooling, write_family
from tests.server.server_process import ServerProcess, serving

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

FLAGS = ("--engine", "local", "--served-model-name", "m,*", "--enable-prompt-embeds")

FEW, MANY = 6, 15

RUNS = [
    ("embedding", GenerationMode.POSITIVE, FEW),
    *((kind, GenerationMode.POSITIVE, MANY) for kind in ("embedding", "classification")),
    *((kind, GenerationMode.NEGATIVE, FEW) for kind in ("embedding", "classification")),  # half a second to make one
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    """Servers by the kind of their model, started when they are asked for."""
    with ExitStack() as stack:

        class Servers(dict[str, ServerProcess]):
            def __missing__(self, kind: str) -> ServerProcess:
                folder = tmp_path_factory.mktemp(kind)
                if kind == "embedding":
                    model = write_family(folder / "model", "bert", modules=[pooling("mean")])
                else:
                    model = write_classifier(folder / "model", "bert")
                self[kind] = stack.enter_context(serving(folder, str(model), *FLAGS))
                return self[kind]

        yield Servers()


A_FEW_PATHS = ("/v1/embeddings", "/v2/embed", "/rerank", "/tokenize", "/load")
"""To read the schemas of a path takes up to two seconds."""


@sampled(("kind", "mode", "examples"), RUNS, keep=RUNS[:1])
def test_no_route_fails_and_responses_are_as_described(
    servers: dict[str, ServerProcess], kind: str, mode: GenerationMode, examples: int
):
    server = servers[kind]
    session = requests.Session()
    document = session.get(f"{server.url}/openapi.json").json()
    if examples == FEW and mode == GenerationMode.POSITIVE:
        document["paths"] = {path: document["paths"][path] for path in A_FEW_PATHS}
    schema = schemathesis.openapi.from_dict(document)
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode == GenerationMode.NEGATIVE and (not operation.body or operation.path == "/invocations"):
            continue  # nothing can be wrong; wrong for all of two dozen schemas takes seconds to make

        @settings(
            max_examples=examples,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize=examples == FEW,  # which few are drawn decides whether all statuses occur
        )
        @given(operation.as_strategy(generation_mode=mode))
        def check(case: Case) -> None:
            response = case.call(base_url=server.url, session=session, timeout=60)
            statuses.add(response.status_code)
            case.validate_response(response, checks=CHECKS)

        check()
    assert "Traceback" not in server.log
    expected = {200, 400, 422} if mode == GenerationMode.POSITIVE else {400, 422}
    assert expected <= statuses
    assert session.get(f"{server.url}/readyz").status_code == 200
