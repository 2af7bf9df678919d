"""Whatever becomes of a part, its rows are on the page, and the other parts are run."""

import json

import attrs
import pytest
import trio

from benchmarks.aim import Aim
from benchmarks.gpu.__main__ import MODELS, PARTS, run_parts
from benchmarks.gpu.page import TRIAL, number, write_page
from benchmarks.gpu.part import Part, PartReport, Row, Subject
from benchmarks.gpu.settings import Settings, without_given

FAST, SMALL, SHOWN = Aim(row="fast", at_least=2.0), Aim(row="small", at_most=1.0), Aim(row="shown")
MACHINE = {"processor": "a processor", "cores": 2, "measured": "today", "commit": "abc"}


async def measures_all(subject, findings):
    subject.note_step("measuring")
    findings.measured(FAST, 3.0, "three")
    findings.measured(SMALL, 3.0)
    findings.measured(SHOWN, 1234.5)
    findings.texts.append("What it says.")
    findings.details["seen"] = [1, 2]


async def fails_after_one(subject, findings):
    findings.measured(FAST, 2.0)
    raise ExceptionGroup("", [RuntimeError("no device\nat all")])


async def never_ends(subject, findings):
    findings.measured(SMALL, 0.5)
    await trio.sleep_forever()


PASSING = Part(name="passing", budget_s=60, run=measures_all, aims=(FAST, SMALL, SHOWN))
FAILING = Part(name="failing", budget_s=60, run=fails_after_one, aims=(FAST, SMALL))
ENDLESS = Part(name="endless", budget_s=30, run=never_ends, aims=(FAST, SMALL))


@pytest.fixture
def subject(tmp_path):
    settings = Settings(device="cpu", shape="tiny", output_dir=tmp_path)
    return Subject(settings=settings, bert=tmp_path / "bert", splade=tmp_path / "splade")


async def test_a_part_that_fails_keeps_what_it_has_found_and_others_are_run(subject, autojump_clock):
    steps = []
    reports = await run_parts([FAILING, ENDLESS, PASSING], subject, lambda *step: steps.append(step))
    assert [report.part.name for report in reports] == ["failing", "endless", "passing"]
    assert [[row.verdict for row in report.rows] for report in reports] == [
        ["reached", "not measured"],
        ["not measured", "reached"],
        ["reached", "not reached", "measured"],
    ]
    assert [report.rows[index].note for report, index in zip(reports, (1, 0, 0), strict=True)] == [
        "RuntimeError: no device",
        "it did not end within 150 s",
        "three",
    ]
    assert reports[0].failure == "RuntimeError: no device\nat all"
    assert reports[2].failure == ""
    assert ("passing", "measuring") in steps


async def test_the_page_has_every_row_of_every_part(subject, autojump_clock):
    reports = await run_parts([PASSING, FAILING], subject)
    write_page([*reports, PartReport(part=ENDLESS, failure="left out")], subject, MACHINE)
    page = (subject.settings.folder / "gpu.md").read_text()
    for line in (
        TRIAL,
        "| fast | passing | ≥ 2 | 3 | reached | three |",
        "| small | passing | ≤ 1 | 3 | not reached |  |",
        "| shown | passing | – | 1,234 | measured |  |",
        "| small | failing | ≤ 1 | – | not measured | RuntimeError: no device |",
        "| fast | endless | ≥ 2 | – | not measured | left out |",
        "What it says.",
        "**It failed:**\n\n```\nRuntimeError: no device\nat all\n```",
    ):
        assert line in page
    document = json.loads((subject.settings.folder / "gpu.json").read_text())
    assert [part["part"] for part in document["parts"]] == ["passing", "failing", "endless"]
    assert document["parts"][0]["seen"] == [1, 2]
    assert document["parts"][1]["rows"][1]["verdict"] == "not measured"
    on_gpu = attrs.evolve(subject, settings=Settings(output_dir=subject.settings.output_dir))
    write_page(reports, on_gpu, MACHINE)
    assert TRIAL not in (subject.settings.folder / "gpu.md").read_text()


def test_all_parts_together_take_less_than_eight_minutes_and_no_two_rows_are_alike():
    assert sum(part.budget_s for part in (MODELS, *PARTS)) < 480
    rows = [aim.row for part in PARTS for aim in part.aims]
    assert len(rows) == len(set(rows))


def test_a_value_at_its_limit_is_not_rounded_over_it():
    assert [number(value) for value in (1.0296, 0.99949, 1_600_000.4)] == ["1.0296", "0.99949", "1,600,000"]
    assert Row(aim=FAST, value=1.999).verdict == "not reached"


def test_a_trial_needs_a_folder_of_its_own():
    with pytest.raises(ValueError, match="--output-dir"):
        Settings(device="cpu")


def test_flags_that_are_given_replace_those_of_the_benchmark(tmp_path):
    assert without_given({"--a": "1", "--b": "2"}, ["--b=3", "--c"]) == ["--a", "1", "--b=3", "--c"]
    flags = Settings(flags="--api-workers 3 --backend torch").server_flags()
    assert flags.count("--api-workers") == 1
    assert flags[flags.index("--api-workers") + 1] == "3"
    assert flags[flags.index("--device") + 1] == "cuda"
    assert flags[-2:] == ["--backend", "torch"]
