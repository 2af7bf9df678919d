"""Every request is accounted for, whatever clients, batches and processes do."""

import subprocess
import sys

import pytest

from benchmarks.chaos import CUT, HALF, HUNG, LEFT, REFUSED, Ledger, Story
from benchmarks.unkind_requests import KINDS, plan
from tests.server.server_process import ROOT


@pytest.mark.slow
def test_a_server_keeps_its_promises_through_hundreds_of_unkind_requests(tmp_path):
    flags = ["--requests", "150", "--warm", "50", "--kills", "1", "--idle-s", "0", "--output-dir", str(tmp_path)]
    command = [sys.executable, "-m", "benchmarks.chaos", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "| all | 150 |" in (tmp_path / "chaos.md").read_text()


@pytest.mark.unit
def test_the_same_seed_gives_the_same_requests_of_every_kind():
    planned = [plan(7, number) for number in range(1000)]
    assert planned == [plan(7, number) for number in range(1000)]
    assert planned != [plan(8, number) for number in range(1000)]
    assert {each.kind for each in planned} == set(KINDS)


SUM = "answered + failed with a status + client gone = sent"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "end", "broken"),
    [
        ("text", CUT, [SUM]),
        ("text", HUNG, [SUM, "nothing hangs"]),
        ("text", REFUSED, [SUM]),
        ("batch", "500", ["requests without fault get no 500"]),
    ],
)
def test_a_request_that_ends_in_no_way_or_with_a_500_without_fault_breaks_a_promise(kind, end, broken):
    story = Story(Ledger(), warm_mib=1.0, end_mib=1.0, still_answers=True)
    story.ledger.enter("raises", "500")
    for fine in ("200", "429", "503", LEFT, HALF):
        story.ledger.enter("text", fine)
    assert story.broken() == []
    story.ledger.enter(kind, end)
    assert story.broken() == broken
