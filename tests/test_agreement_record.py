import json

import pytest

from tests.agreement_record import AGREEMENT, CLIENT, Record

pytestmark = pytest.mark.unit


def test_rows_are_sorted_and_deduplicated_and_the_largest_difference_is_kept():
    record = Record()
    for route in ("/b", "/a", "/b"):
        record.add(CLIENT, ("tei", route, "a client"))
    for difference in (1e-7, 3.21e-6, 2e-6):
        record.add(AGREEMENT, ("bert", "embed", "an oracle", difference))
    record.add("another plugin's property", (1,))

    document = json.loads(json.dumps(record.document()))
    assert [row["route"] for row in document["clients"]] == ["/a", "/b"]
    assert document["agreement"] == [
        {"family": "bert", "task": "embed", "oracle": "an oracle", "largest_difference": 3.2e-6}
    ]


PASSING_AND_FAILING = """
def test_passing(record_client, record_agreement):
    record_client("tei", "/embed", "passes")
    record_agreement("bert", "embed", "an oracle", 1e-6)

def test_failing(record_client):
    record_client("tei", "/embed", "fails")
    assert False
"""


def test_only_passing_tests_are_recorded_and_only_when_asked(pytester, monkeypatch):
    written = pytester.path / "agreement.json"
    monkeypatch.setattr("tests.agreement_record.PATH", written)
    pytester.makeconftest('pytest_plugins = ["tests.agreement_record"]')
    pytester.makepyfile(PASSING_AND_FAILING)

    pytester.inline_run().assertoutcome(passed=1, failed=1)
    assert not written.exists()

    pytester.inline_run("--write-agreement").assertoutcome(passed=1, failed=1)
    assert [row["client"] for row in json.loads(written.read_text())["clients"]] == ["passes"]
