import json

import pytest

pytestmark = pytest.mark.unit


PASSING_AND_FAILING = """
def test_passing(record_client, record_agreement):
    for route in ("/b", "/a", "/b"):
        record_client("tei", route, "passes")
    for difference in (1e-7, 3.21e-6, 2e-6):
        record_agreement("bert", "embed", "an oracle", difference)

def test_failing(record_client):
    record_client("tei", "/embed", "fails")
    assert False
"""


def test_passing_tests_are_recorded_once_with_the_largest_difference_and_only_when_asked(pytester, monkeypatch):
    written = pytester.path / "agreement.json"
    monkeypatch.setattr("tests.agreement_record.PATH", written)
    pytester.makeconftest('pytest_plugins = ["tests.agreement_record"]')
    pytester.makepyfile(PASSING_AND_FAILING)
    pytester.makeini("[pytest]\naddopts = -p no:asyncio")

    pytester.inline_run().assertoutcome(passed=1, failed=1)
    assert not written.exists()

    pytester.inline_run("--write-agreement").assertoutcome(passed=1, failed=1)
    document = json.loads(written.read_text())
    assert document["clients"] == [{"dialect": "tei", "route": route, "client": "passes"} for route in ("/a", "/b")]
    assert [row["largest_difference"] for row in document["agreement"]] == [3.2e-6]
