"""Every request is accounted for, whatever clients, batches and processes do."""

import subprocess
import sys

import pytest

from benchmarks.chaos import CUT, HALF, HUNG, LEFT, REFUSED, Ledger, Story
from benchmarks.unkind_requests import KINDS, plan
from tests.server.server_process import ROOT


@pytest.mark.slow
def test_a_server_keeps_its_promises_through_hundreds_of_unkind_requests(tmp_path):
    command = [
        "--requests",
        "250",
        "--warm",
        "50",
        "--kills",
        "1",
        "--idle-s",
        "0",
        "--output-dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "| all | 250 |" in (tmp_path / "chaos.md").read_text()


@pytest.mark.unit
def test_the_same_seed_gives_the_same_requests_of_every_kind():
    planned = [plan(7, number) for number in range(1000)]
    assert planned == [plan(7, number) for number in range(1000)]
    assert planned != [plan(8, number) for number in range(1000)]
    assert {each.kind for each in planned} == set(KINDS)


@pytest.mark.unit
@pytest.mark.parametrize("end", [CUT, HUNG, REFUSED])
def test_a_request_that_ends_in_no_way_breaks_a_promise(end):
    story = Story(Ledger(), warm_mib=1.0, end_mib=1.0, still_answers=True)
    for fine in ("200", "429", "503", LEFT, HALF):
        story.ledger.enter("text", fine)
    assert story.broken() == []
    story.ledger.enter("text", end)
    assert "answered + failed with a status + client gone = sent" in story.broken()


@pytest.mark.unit
def test_a_500_for_a_request_without_fault_breaks_a_promise():
    story = Story(Ledger(), warm_mib=1.0, end_mib=1.0, still_answers=True)
    story.ledger.enter("raises", "500")
    assert story.broken() == []
    story.ledger.enter("batch", "500")
    assert story.broken() == ["requests without fault get no 500"]
