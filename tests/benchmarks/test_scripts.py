"""Every benchmark can be asked what it does, and what they all gave is one page."""

import contextlib
import json
import os

import cyclopts
import pytest

from benchmarks import __main__ as all_benchmarks
from benchmarks.__main__ import SCRIPTS, Outcome, Script, Settings, page
from benchmarks.aim import Aim
from benchmarks.aims import PADDING, values_of_results
from benchmarks.bulk import BULK
from benchmarks.peers import BARS, NotAPeerError, Peer
from benchmarks.peers import Settings as PeersSettings
from benchmarks.report import print_table, write_json
from benchmarks.rounds import Rounds, median_difference
from benchmarks.variants import OURS, known


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_script_says_what_it_takes_and_a_quick_run_asks_for_that(script: Script, capsys, tmp_path):
    assert "--output-dir" in help_of(script.module.main, capsys)
    assert len(script.question) > 20
    app = cyclopts.App()
    app.default(script.module.main)
    _, bound, _ = app.parse_args(script.command(tmp_path, quick=True)[3:], exit_on_error=False, print_error=False)
    (settings,) = bound.args or bound.kwargs.values()
    assert settings.output_dir == tmp_path
    assert getattr(settings, "rounds", 1) == 1


def help_of(main, capsys) -> str:
    app = cyclopts.App()
    app.default(main)
    with contextlib.suppress(SystemExit):
        app(["--help"])
    return capsys.readouterr().out


def test_no_benchmark_is_forgotten():
    folder = all_benchmarks.ROOT / "benchmarks"
    with_main = {path for path in folder.glob("**/*.py") if "cyclopts.run(main)" in path.read_text()}
    names = {path.parent.name if path.stem == "__main__" else path.stem for path in with_main}
    assert names - {"benchmarks"} == {script.name for script in SCRIPTS}


def test_the_command_for_all_takes_full_or_quick_or_some(capsys):
    assert "--full" in help_of(all_benchmarks.main, capsys)
    with pytest.raises(ValueError, match="not both"):
        Settings(full=True, quick=True)
    with pytest.raises(ValueError, match="no benchmark nothing"):
        Settings(only=("nothing",))


def test_the_page_has_tables_plots_and_what_is_missing(tmp_path):
    script = Script("peers")
    print_table("a title", ["server", "req/s"], [["ours", "1"]])
    write_json(tmp_path, script.name, {"machine": {"cores": 2, "packages": {"trio": "1"}}, "settings": {"rounds": 1}})
    (tmp_path / "peers.png").touch()
    written = page(Outcome([script], ["peers: missing"], ["load"]), tmp_path, quick=True)
    parts = ("mean nothing", "| cores | 2 |", "| ours | 1 |", "![peers](peers.png)", "- peers: missing")
    for part in (*parts, "- load: it failed"):
        assert part in written
    assert "| ours | 1 |" in page(Outcome(), tmp_path, quick=False), "a later run of other scripts keeps it"
    assert "**a title**" not in page(Outcome(), tmp_path / "empty", quick=False)


def test_a_ratio_is_the_median_of_those_within_each_round():
    measured = Rounds[str]()
    for ours, other in ((10, 5), (10, 10), (100, 25)):
        measured.add("ours", Aim(row="", at_least=ours))
        measured.add("other", Aim(row="", at_least=other))
    assert measured.median("ours", "at_least") == 10
    assert measured.ratio("ours", "at_least", "other") == 2
    assert median_difference(measured.results["ours"], measured.results["other"], "at_least") == 5


def test_a_row_tells_whether_the_bar_or_the_aim_is_reached():
    rate = Aim(row="rate", at_least=0.8, aim=0.9)
    assert [rate.cells(value)[-1] for value in (0.7, 0.85, 0.9)] == ["NO", "bar", "yes"]
    assert [rate.is_reached(value) for value in (0.7, 0.8)] == [False, True]
    added = Aim(row="added", at_most=2.5, aim=1.5)
    assert [added.cells(value)[-1] for value in (2.6, 2.5, 1.5)] == ["NO", "bar", "yes"]
    assert [added.is_reached(value) for value in (2.6, 2.5)] == [False, True]
    assert added.cells(2) == ["added", "≤ 2.5", "≤ 1.5", "2", "bar"]
    assert Aim(row="shown").cells(1) == ["shown", "–", "–", "1", "–"]
    assert Aim(row="shown").is_reached(1) is None
    assert Aim(row="no more", at_most=1).cells(1)[-1] == "yes"


def test_aims_in_scheduling_and_bulk_are_of_the_same_commit(tmp_path, capsys):
    scenario = {"scenario": "mixed lengths", "p99_ratio": 2.5, "waste": {"with": [0.07, 0.3, 0.08]}}
    document = {"machine": {"commit": "new"}, "scenarios": [scenario]}
    assert values_of_results(tmp_path, "new") == {}
    (tmp_path / "scheduling.json").write_text(json.dumps(document))
    (tmp_path / "bulk.json").write_text(json.dumps({"machine": {"commit": "new"}, "ratio": 0.94}))
    assert values_of_results(tmp_path, "old") == {}
    said = capsys.readouterr().out
    assert said.count("NOT MEASURED: scheduling") == said.count("NOT MEASURED: bulk") == 2
    values = values_of_results(tmp_path, "new")
    assert (values[PADDING], values[BULK]) == (0.08, 0.94)
    assert sorted(values.values()) == [0.08, 0.94, 2.5]


def test_a_peer_is_a_name_a_url_and_perhaps_a_model():
    loads = PeersSettings().loads
    peer = Peer.parse("vllm=http://10.0.0.1:8001/api/,minilm")
    job = peer.job([], loads[0], 1.0)
    assert (peer.name, peer.model, job.host, job.port) == ("vllm", "minilm", "10.0.0.1", 8001)
    assert job.path == "/api/v1/embeddings"
    assert Peer.parse("a=http://localhost").model == "all-MiniLM-L6-v2"
    assert Peer.parse(f"a=http://localhost,,{os.getpid()}").pid == os.getpid()
    # Each load is sent once.
    assert len(loads) == len(set(loads)) == 4 + 3 + 2
    assert {*BARS} <= {(load.clients, load.batch) for load in loads if load.tokens == 32}
    assert len(PeersSettings(every_combination=True).loads) == 4 * 4 * 3


@pytest.mark.parametrize(
    "wrong",
    [
        *("http://localhost", "a=", "=http://localhost", "a=https://localhost", "a=localhost:80"),
        *("a=http://localhost,m,none", "a=http://localhost,m,99999999", "a=http://localhost,m,1,2"),
    ],
)
def test_what_is_no_peer_is_refused(wrong: str):
    with pytest.raises(NotAPeerError):
        Peer.parse(wrong)


def test_servers_with_unknown_flags_are_left_out_loudly(capsys):
    strange = OURS.with_flags("strange", "--no-such-flag", "1")
    assert known([OURS, strange]) == [OURS]
    assert "NOT MEASURED: strange: Unknown option" in capsys.readouterr().out
