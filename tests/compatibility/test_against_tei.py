"""Every route, field and status of text-embeddings-inference, shown on a live server.

What this server does differently is written to docs/compared-with-tei.json by ``--write-compared``, from which
docs/generate_compared_with_tei.py makes a page. Without that option the tests compare with what is written there.
"""

import json
import runpy
from collections.abc import Iterator

import httpx
import pytest

from tests.compatibility import (  # noqa: F401  (they register the cases)
    tei_cases_answers,
    tei_cases_scores,
    tei_cases_server,
    tei_cases_tokens,
    tei_cases_vectors,
)
from tests.compatibility.tei_cases import CASES
from tests.compatibility.tei_record import PAGE_DATA, items
from tests.compatibility.tei_servers import LONG, PROMPT, near, serving_in_a_thread
from tests.conftest import NO_AUTHORITIES
from tests.end_to_end.texts import API_KEY

ITEMS = [*items()]
DOCS = PAGE_DATA.parent


def registered(name: str) -> str:
    return name.replace(" ", "-")


@pytest.fixture(scope="module")
def known(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, dict[str, str]]]]:
    """What this server is known to do, by route and name; with ``--write-compared`` what the tests see."""
    if not request.config.getoption("--write-compared"):
        yield json.loads(PAGE_DATA.read_text())
        return
    seen: dict[str, dict[str, dict[str, str]]] = {}
    yield seen
    assert sum(map(len, seen.values())) == len(ITEMS), "not all cases have passed"
    PAGE_DATA.write_text(json.dumps(seen, indent=1) + "\n")


def test_every_item_of_the_record_has_a_case_and_every_case_an_item():
    assert {(route, registered(name)) for route, name in ITEMS} == CASES.keys()


@pytest.mark.parametrize(("route", "name"), ITEMS, ids=[f"{route} {name}" for route, name in ITEMS])
def test_the_server_does_what_is_documented(request, servers, known, route, name):
    seen = CASES[route, registered(name)](servers, route).document()
    if request.config.getoption("--write-compared"):
        known.setdefault(route, {})[name] = seen
    assert known[route][name] == seen


def test_without_the_flags_for_it_the_server_differs_as_the_page_about_moving_says(servers):
    """Each of the deliberate differences that has a flag."""
    headers = {"Authorization": f"Bearer {API_KEY}", "Origin": "https://example.org"}
    vector = servers.oracle("embedding").vector
    with (
        serving_in_a_thread("embedding", servers.folders["embedding"], flags=()) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60, verify=NO_AUTHORITIES) as http,
    ):
        assert http.post("/v1/embeddings", json={"input": "bread", "model": "another"}).status_code == 404
        assert http.post("/v1/embeddings", json={"input": LONG}).status_code == 400
        answer = http.post("/v1/embeddings", json={"input": "bread"})
        near(answer.json()["data"][0]["embedding"], vector(f"{PROMPT}bread", normalize=False))
        assert "access-control-allow-origin" not in answer.headers
        near(http.post("/embed", json={"inputs": "bread"}).json(), [vector(f"{PROMPT}bread")])
        assert servers.stranger.get(f"{url}/metrics").status_code == 401


def test_the_page_is_that_of_the_record_and_of_what_was_seen():
    generator = runpy.run_path(str(DOCS / "generate_compared_with_tei.py"))
    assert (DOCS / "compared-with-tei.md").read_text() == generator["page"]()
