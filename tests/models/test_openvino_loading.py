"""Which models OpenVINO computes, why not the others, and what is kept on disk."""

import json
import logging
import os
import re
import tempfile
import time
from pathlib import Path
from threading import Barrier, get_ident
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.conftest import running
from tests.models import classifier_families, retrieval_families
from tests.models.model_families import MAX_LENGTH, TEXTS, ServedModel, load, loaded_runner, write_family
from tests.models.retrieval_families import DOCUMENT_LENGTH, QUERY_LENGTH
from tests.models.vision_families import clip
from trio_pool_serve.config import BatchConfig, Config, InputConfig, ModelConfig, ProcessesConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import open_model_folder, read_model_folder
from trio_pool_serve.models.loading import openvino_loading
from trio_pool_serve.models.loading.conversion_process import load_to_convert
from trio_pool_serve.models.loading.openvino_loading import CpuModel
from trio_pool_serve.models.loading.runner_loader import LocalRunners, load_by_torch
from trio_pool_serve.models.loading.sample_prompts import extreme_prompts
from trio_pool_serve.runner import cpu_features
from trio_pool_serve.runner.openvino import converted_model, preparation, trial
from trio_pool_serve.runner.openvino.converted_model import is_near
from trio_pool_serve.runner.openvino.trial import Trial
from trio_pool_serve.service import Service
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import (
    Batch,
    Embed,
    PoolingRequest,
    Prepare,
    RenderedPrompt,
    RunnerParams,
    TokenEmbed,
)

pytest.importorskip("openvino")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_family(tmp_path / "bert", "bert")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each conversion."""
    done: list[int] = []
    convert = preparation.convert
    monkeypatch.setattr(preparation, "convert", lambda traced: done.append(1) or convert(traced))
    return done


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """The results of the trials of speed, in place of real ones; what is left was not tried."""
    given: list[Trial] = []
    monkeypatch.setattr(preparation, "try_speed", lambda *_, **__: given.pop(0))
    return given


def described(model: Path, cache: Path | str, **options: Any) -> str:
    settings = {"backend": "openvino", "cache_dir": str(cache), "dtype": "float32"} | options
    return str(load(model, **settings).facts).rpartition("tokens, ")[2]


def load_runner(folder: Any, settings: ModelConfig, offload: Offload) -> Prepare:
    return CpuModel(folder, settings, offload, load_by_torch, load_to_convert).open()


def steady(ratio: float) -> Trial:
    return Trial(ratio, is_steady=True)


# -- the choice -----------------------------------------------------------------------------------------


def test_auto_takes_openvino_only_if_it_is_clearly_faster(model: Path, trials: list[Trial]):
    trials += map(steady, (0.5, 0.9, 0.91, 1.3))
    assert [described(model, "", backend="auto") for _ in range(4)] == [
        "by OpenVINO (2.0 times as fast as torch)",
        "by OpenVINO (1.1 times as fast as torch)",
        "by torch (OpenVINO takes 0.91 times as long)",
        "by torch (OpenVINO takes 1.30 times as long)",
    ]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A clock, which ``next`` moves by a microsecond."""
    clock = iter(range(10**6))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock) * 1e-6)
    return clock


def try_with(challenger: Any, incumbent: Any) -> Trial:
    return trial.try_speed(challenger, incumbent, params=Embed(), vocab_size=50, max_tokens=48)


def test_the_trial_is_fair(seconds: Any):
    """A computation takes as long as itself, and half as long as one that does the same twice."""

    def once(_: object) -> None:
        for _ in range(1000):
            next(seconds)

    def twice(batch: object) -> None:
        once(batch)
        once(batch)

    same, half = try_with(once, once), try_with(once, twice)
    assert (same.ratio, half.ratio) == (pytest.approx(1), pytest.approx(0.5, rel=0.01))
    assert same.is_steady
    assert half.is_steady


def test_a_trial_beside_another_program_is_not_steady(seconds: Any):
    passes = iter(range(10**6))

    def disturbed(_: object) -> None:
        for _ in range(1000 if next(passes) in (3, 5) else 3000):
            next(seconds)

    assert not try_with(disturbed, disturbed).is_steady


@pytest.mark.parametrize(
    ("write", "options", "said"),
    [
        (write_family, {"backend": "torch"}, "as configured"),
        (lambda path, _: clip(path), {"backend": "auto"}, "OpenVINO is not used for models that read images"),
        (
            write_family,
            {"backend": "auto", "dtype": "bfloat16"},
            "OpenVINO is used for bfloat16 only where the CPU computes it natively",
        ),
    ],
)
def test_the_description_says_why_torch_computes(
    write: Any, options: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openvino_loading, "has_native_bfloat16", lambda: False)
    assert described(write(tmp_path / "model", "bert"), "", **options).endswith(f"by torch ({said})")


def test_without_openvino_torch_computes(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openvino_loading, "find_spec", lambda name: None)
    assert described(model, "", backend="auto") == "by torch (OpenVINO is not installed)"
    with pytest.raises(ModelLoadError, match=r"--backend openvino: OpenVINO is not installed\."):
        described(model, "")
    with pytest.raises(ModelLoadError, match=r"--dtype int8: OpenVINO is not installed\."):
        described(model, "", dtype="int8")


@pytest.mark.parametrize(("native", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_float16_is_computed_in_what_is_fast_and_a_warning_says_so(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, native: bool, expected: str
):
    for module in (cpu_features, openvino_loading):
        monkeypatch.setattr(module, "has_native_bfloat16", lambda: native)
    assert f"{expected} on cpu" in str(load(model, backend="openvino", cache_dir="", dtype="float16").facts)
    assert f"--dtype float16: CPUs compute it slowly, and bert is computed in {expected} instead." in caplog.text


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The CPU is taken for one that computes bfloat16, and no cosine in bfloat16 suffices by itself."""
    for module in (cpu_features, openvino_loading):
        monkeypatch.setattr(module, "has_native_bfloat16", lambda: True)
    monkeypatch.setattr(preparation, "MIN_COSINE", {"float32": 0.99999, "bfloat16": 1.1})
    return monkeypatch


def test_where_bfloat16_differs_openvino_s_float32_competes_with_torch(
    model: Path, tmp_path: Path, trials: list[Trial], conversions: list[int], in_bfloat16: pytest.MonkeyPatch
):
    in_bfloat16.setattr(preparation, "WORSE", 0)
    trials += map(steady, (0.5, 1.3))
    differs = r"in bfloat16 OpenVINO's output differs: cosine (0\.99\d+|1\.00000)\)"  # by the CPU
    for cache, backend, times in (
        (tmp_path / "faster", "OpenVINO", r"2\.0 times as fast as torch; computed in float32, as "),
        (tmp_path / "slower", "torch", r"OpenVINO takes 1\.30 times as long in float32; "),
    ):
        for _ in range(2):
            said = str(load(model, backend="auto", cache_dir=str(cache), dtype="auto").facts)
            assert re.search(rf"bfloat16 on cpu.* by {backend} \({times}{differs}$", said)
    assert (len(conversions), trials) == (2, [])
    said = described(model, tmp_path / "faster", backend="auto", dtype="bfloat16")
    assert re.match(r"by torch \(OpenVINO's output differs: cosine (0\.99|1\.00000)", said), "not float32, as asked for"


def test_in_bfloat16_openvino_need_not_be_nearer_to_float32_than_torch(model: Path, in_bfloat16: pytest.MonkeyPatch):
    in_bfloat16.setattr(preparation, "WORSE", 100)
    assert described(model, "", dtype="bfloat16") == "by OpenVINO"
    in_bfloat16.setattr(preparation, "LEAST_COSINE", 1)
    with pytest.raises(ModelLoadError, match="--backend openvino: OpenVINO's output differs"):
        described(model, "", dtype="bfloat16")


def test_a_model_that_cannot_be_converted_is_computed_by_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tries: list[int] = []

    def fail(_: object) -> None:
        tries.append(1)
        raise ValueError("no such operation\nand much more")

    monkeypatch.setattr(preparation, "convert", fail)
    said = "OpenVINO fails: ValueError('no such operation\\nand much more')"
    for cache in (tmp_path / "cache", tmp_path / "cache", ""):
        assert described(model, cache, backend="auto") == f"by torch ({said})"
    assert len(tries) == 2, "the second start has read it"
    assert [path.name for path in the_entry(tmp_path / "cache").iterdir()] == ["record.json"]
    with pytest.raises(ModelLoadError, match="--backend openvino: OpenVINO fails: ValueError"):
        described(model, tmp_path / "cache")


def test_a_model_whose_output_differs_is_computed_by_torch_and_not_converted_again(
    model: Path, tmp_path: Path, conversions: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preparation, "MIN_COSINE", {"float32": 1.1})
    said = {described(model, tmp_path / "cache", backend="auto") for _ in range(2)}
    assert said == {"by torch (OpenVINO's output differs: cosine 1.00000)"}
    assert len(conversions) == 1
    change_record(tmp_path / "cache", versions={"openvino": "2020.1"})
    described(model, tmp_path / "cache", backend="auto")
    assert len(conversions) == 2, "another version may compute it"


async def test_expanded_queries_that_openvino_computes_otherwise_are_computed_by_torch(tmp_path: Path):
    """Tokens farther from the query than its window attend to nothing in sliding layers."""
    folder = retrieval_families.LATE_INTERACTION["pylate_expanding_modernbert"](tmp_path / "model")
    expected = await ServedModel(folder).compute(TEXTS, TokenEmbed(), input_type="query")
    served = ServedModel(folder, settings={"backend": "auto", "cache_dir": str(tmp_path / "cache")})
    assert "by torch (OpenVINO's output differs: cosine 0." in str(served.runner.facts)
    ours = await served.compute(TEXTS, TokenEmbed(), input_type="query")
    assert max(float(np.abs(a - b).max()) for a, b in zip(ours, expected, strict=True)) < 1e-5
    for dtype in ("float32", "int8"):
        with pytest.raises(ModelLoadError, match="OpenVINO's output differs"):
            described(folder, "", dtype=dtype)


def test_a_late_interaction_model_is_compared_on_queries_and_documents_short_and_long(tmp_path: Path):
    folder = open_model_folder(str(retrieval_families.pylate_bert(tmp_path / "model")), ModelConfig())
    expanded, query, short, document = extreme_prompts(folder, 1024)
    lengths = [len(prompt.token_ids) for prompt in (expanded, query, short, document)]
    assert lengths == [QUERY_LENGTH, QUERY_LENGTH, lengths[2], DOCUMENT_LENGTH]
    assert expanded.attended == lengths[2] < QUERY_LENGTH
    assert (query.attended, document.attended) == (None, None)


def test_a_reranker_is_compared_on_pairs_short_and_long(tmp_path: Path):
    path = classifier_families.write_classifier(tmp_path / "model", "bert", num_labels=1)
    short, long = extreme_prompts(open_model_folder(str(path), ModelConfig()), 1024)
    assert short.type_ids is not None
    assert long.type_ids is not None
    assert len(short.token_ids) < len(long.token_ids) == MAX_LENGTH


# -- batches at a time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "measured", "expected"),
    [
        (32, {4: 100, 8: 130, 16: 141}, "8 batches at a time with 4 threads each: 1.30 times the rows/s of 4 × 8"),
        (
            32,
            {4: 100, 8: 109, 16: 90},
            "4 batches at a time with 8 threads each: more batches reach at most 1.09 times ",
        ),
        (6, {4: 100, 6: 150}, "6 batches at a time with 1 thread each: 1.50 times the rows/s of 4 × 1"),
        (128, {4: 100, 8: 150, 16: 200}, "16 batches at a time with 8 threads each: 2.00 times the rows/s of 4 × 32"),
    ],
)
def test_the_fewest_batches_at_a_time_are_chosen_by_which_no_others_are_clearly_faster(
    cores: int, measured: dict[int, float], expected: str
):
    tried: list[int] = []
    chosen = trial.try_batches(lambda batches: tried.append(batches) or measured[batches], cores, 4)
    assert chosen is not None
    assert chosen.what.startswith(expected)
    assert chosen.batches == int(expected.split()[0])
    assert tried == [*measured] * 2


def test_batches_of_a_trial_are_computed_at_a_time_and_have_the_rows_of_all_together(model: Path):
    runner, together = load(model, backend="openvino", cache_dir="", dtype="float32"), Barrier(4)
    computing, rows = [], []

    def launch(batch: Batch) -> object:
        if get_ident() not in computing:
            computing.append(get_ident())
            together.wait(60)
        rows.append(len(batch.requests))
        return runner.launch(batch)

    request = PoolingRequest(runner.model.check.prompt, (Embed(),))
    assert trial.rows_per_s(launch, request, 4, cores=8) > 0
    assert len(computing) == 4
    assert {*rows} == {4}


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Rows/s on eight cores by the batches at a time, in place of measured ones; what is left was not tried."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    given: dict[int, list[float]] = {}
    monkeypatch.setattr(openvino_loading, "rows_per_s", lambda launch, request, batches, cores: given[batches].pop(0))
    return given


def chosen_batches(model: Path, cache: Path | str, *, is_serving: bool = False, **options: Any) -> tuple[int, str]:
    """Return how many batches at a time the runner and the process compute, and the end of the log's line."""
    offload = Offload(**{"launch": 2, "may_launch_more": True} | options)
    offload.is_serving = is_serving
    config = ModelConfig(device="cpu", backend="openvino", dtype="float32", cache_dir=str(cache))
    runner = loaded_runner(read_model_folder(model), config, offload)
    assert runner.facts.concurrent_launches == runner.programs.params.sharers == offload.launch
    return offload.launch, str(runner.facts).rpartition("by OpenVINO")[2]


def test_a_second_start_computes_as_many_batches_at_a_time_without_another_trial(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(trial, "MEASURED_S", 0.01)
    monkeypatch.setattr(trial, "QUIET", 100)  # this machine is shared, and has fewer cores
    measured, measure = [], openvino_loading.rows_per_s
    monkeypatch.setattr(openvino_loading, "rows_per_s", lambda *given: measured.append(given[2]) or measure(*given))
    first = chosen_batches(model, tmp_path / "cache")
    assert re.fullmatch(r", [248] batches at a time with [421] threads? each: .*\d times the rows/s of 2 × 4", first[1])
    assert chosen_batches(model, tmp_path / "cache") == first
    assert measured == [2, 4, 8] * 2


def test_the_batches_at_a_time_are_measured_on_each_kind_of_machine(
    model: Path, tmp_path: Path, rates: dict[int, list[float]], monkeypatch: pytest.MonkeyPatch
):
    for cpu, cores, batches in (("a CPU", 8, 4), ("another CPU", 8, 8), ("a CPU", 16, 16), ("a CPU", 8, 4)):
        monkeypatch.setattr(openvino_loading, "cpu_name", lambda cpu=cpu: cpu)
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        rates.update({number: [2.0 if number == batches else 1.0] * 2 for number in (2, 4, 8, 16)[: cores // 4 + 1]})
        found, said = chosen_batches(model, tmp_path / "cache")
        assert found == batches
        assert said.endswith(f"2.00 times the rows/s of 2 × {cores // 2}")
    assert rates[4] == [2.0] * 2, "the last had been measured"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({2: [1.0] * 2, 4: [1.0] * 2, 8: [5.0, 2.0]}, "other programs disturbed the trial of more batches"),
        ({}, "the trial of more batches failed: KeyError(2)"),
    ],
)
def test_a_disturbed_or_failed_trial_of_batches_at_a_time_keeps_the_default_and_is_not_kept(
    measured: Any, said: str, model: Path, tmp_path: Path, rates: dict[int, list[float]], caplog: Any
):
    rates.update(measured)
    assert chosen_batches(model, tmp_path / "cache") == (2, "")
    assert f"2 batches at a time: {said}" in caplog.messages
    assert "converted again" not in caplog.text
    rates.update({2: [1.0] * 2, 4: [1.0] * 2, 8: [5.0] * 2})
    assert chosen_batches(model, tmp_path / "cache")[0] == 8


def test_without_need_or_leave_there_is_no_trial_of_batches_at_a_time(
    model: Path, tmp_path: Path, rates: dict[int, list[float]], caplog: pytest.LogCaptureFixture
):
    for options in ({"may_launch_more": False}, {"launch": 1}, {"launch": 8}, {"is_serving": True}, {"cache": ""}):
        options = {"cache": tmp_path / "cache", "launch": 2} | options
        assert chosen_batches(model, **options) == (options["launch"], ""), options
    assert "batches at a time" not in caplog.text, "it was tried"


@pytest.mark.parametrize(("replicas", "batches"), [(None, 8), (3, 3)], ids=["default", "given"])
async def test_a_server_launches_as_many_batches_at_a_time_as_its_first_model_s_trial_or_replicas_say(
    model: Path,
    tmp_path: Path,
    rates: dict[int, list[float]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    replicas: int | None,
    batches: int,
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    rates.update({4: [1.0] * 2, 8: [2.0] * 2})
    second = write_family(tmp_path / "roberta", "roberta")
    config = Config(
        models=(str(model), str(second)),
        loading=ModelConfig(device="cpu", backend="openvino", dtype="float32", cache_dir=str(tmp_path / "cache")),
        processes=ProcessesConfig(replicas=replicas),
        batch=BatchConfig(data_dir=""),
    )

    async with running(Service(config, load_runner)) as service:
        for name in service.models.by_name:
            engine: Any = service.model(name).engine
            assert sum(device.launches for device in engine.queue.dispatcher.devices) == batches
            assert len(engine.devices.device.runner.unused[0].computed_at) == batches, "each has a share of the cores"
            row = PoolingRequest(RenderedPrompt(np.array([7, 8, 9], np.int32)), (Embed(),))
            first, *others = await engine.submit_all([row] * 100)
            assert all(np.array_equal(each.values[0], first.values[0]) for each in others)
        assert service.offload.statistics()["launch"].capacity == batches
    assert rates[8] == ([] if replicas is None else [2.0] * 2)


# -- the cache ------------------------------------------------------------------------------------------


def the_entry(cache: Path) -> Path:
    """Return the model's, beside that of its tokenizer."""
    (entry,) = [path for path in cache.iterdir() if path.is_dir() and "-tokenizer-" not in path.name]
    return entry


def change_record(cache: Path, **changes: Any) -> None:
    path = the_entry(cache) / "record.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"record": stored["record"] | changes}))


def change_check(cache: Path, values: list[float]) -> None:
    """Change the output that was recorded for a short row."""
    check = json.loads((the_entry(cache) / "record.json").read_text())["record"]["check"]
    change_record(cache, check=check | {"values": values})


def test_the_second_start_neither_converts_nor_tries(
    model: Path, tmp_path: Path, conversions: list[int], trials: list[Trial], monkeypatch: pytest.MonkeyPatch
):
    """The name of the cache's folder may be relative, with ``..`` in it."""
    monkeypatch.chdir(tmp_path)
    trials += map(steady, (0.5, 0.7))
    first = described(model, "bert/../cache", backend="auto")
    monkeypatch.setattr("trio_pool_serve.models.loading.conversion_process.load_to_convert", None)
    assert described(model, "bert/../cache", backend="auto") == first
    assert (len(conversions), trials) == (1, [steady(0.7)])
    entry = the_entry(tmp_path / "cache")
    assert entry.name.startswith("bert-")
    assert {path.name for path in entry.iterdir()} == {"model.xml", "model.bin", "record.json"}


def test_that_openvino_was_slower_is_remembered_unless_another_program_computed_beside_it(
    model: Path, tmp_path: Path, conversions: list[int], trials: list[Trial]
):
    trials += [steady(1.5), Trial(1.6, is_steady=False), steady(1.7)]
    for cache, expected in (("a", "by torch (OpenVINO takes 1.50 times as long)"), ("b", "by OpenVINO")):
        assert [described(model, tmp_path / cache, backend="auto") for _ in range(2)] == [expected] * 2
    assert described(model, tmp_path / "a") == "by OpenVINO (0.7 times as fast as torch)"  # as the user demands
    assert (len(conversions), trials) == (2, [steady(1.7)])


@pytest.mark.slow
def test_a_week_later_it_is_tried_again_whether_openvino_is_slower(model: Path, tmp_path: Path, trials: list[Trial]):
    trials += map(steady, (1.5, 0.5, 1.5))
    cache = tmp_path / "cache"
    assert described(model, cache, backend="auto").startswith("by torch")
    for _ in range(2):
        change_record(cache, made_at=time.time() - converted_model.RETRY_S - 1)
        assert described(model, cache, backend="auto") == "by OpenVINO (2.0 times as fast as torch)"
    assert trials == [steady(1.5)], "what is faster is not tried again"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda cache: (the_entry(cache) / "model.bin").unlink(), "is damaged, and not used"),
        (lambda cache: change_record(cache, versions={"openvino": "2020.1"}), ""),
        *(
            (lambda cache, values=values: change_check(cache, values), "cannot be used, and is converted again: ")
            for values in ([1.0], [0.0] * 32, [-1.0] * 32)
        ),
    ],
)
def test_an_entry_that_is_damaged_or_of_other_versions_or_gives_other_output_is_replaced(
    damage: Any, said: str, model: Path, tmp_path: Path, conversions: list[int], caplog: pytest.LogCaptureFixture
):
    cache = tmp_path / "cache"
    described(model, cache)
    damage(cache)
    for _ in range(2):
        assert described(model, cache) == "by OpenVINO"
        assert len(conversions) == 2
    assert said in caplog.text


@pytest.mark.slow
def test_a_choice_that_could_not_be_timed_is_kept(model: Path, tmp_path: Path, trials: list[Trial]):
    """Other models were computing; a trial at the next start might choose torch, whose numbers are others."""
    trials.append(steady(1.5))
    busy = Offload()
    busy.is_serving = True
    config = ModelConfig(device="cpu", backend="auto", cache_dir=str(tmp_path / "cache"), dtype="float32")
    assert str(loaded_runner(read_model_folder(model), config, busy).facts).endswith("tokens, by OpenVINO")
    assert described(model, tmp_path / "cache", backend="auto") == "by OpenVINO"
    assert described(model, tmp_path / "cache") == "by OpenVINO"
    assert trials == [steady(1.5)]


@pytest.mark.slow
def test_each_setting_that_changes_what_is_computed_has_an_entry_of_its_own(
    model: Path, tmp_path: Path, conversions: list[int]
):
    cache = tmp_path / "cache"
    batch = Batch((PoolingRequest(RenderedPrompt(np.array([7, 8, 9], np.int32)), (Embed(),)),))
    seen = set()
    for options in ({}, {"pooling": "cls"}, {"normalize": False}):
        for _ in range(2):
            ((value,),) = load(model, backend="openvino", cache_dir=str(cache), **options).launch(batch).rows
            seen.add(value.tobytes())
    assert (len(seen), len(conversions)) == (3, 3)


def test_a_refusal_holds_for_machines_like_the_one_that_refused(
    model: Path, tmp_path: Path, conversions: list[int], monkeypatch: pytest.MonkeyPatch
):
    """A cache may be on a disk that machines with other CPUs share."""
    cache, machine = tmp_path / "cache", ["this CPU"]
    monkeypatch.setattr(openvino_loading, "cpu_name", lambda: machine[0])
    with monkeypatch.context() as changed:
        changed.setattr(preparation, "MIN_COSINE", {"float32": 1.1})
        assert described(model, cache, backend="auto").startswith("by torch (OpenVINO's output differs")
    machine[0] = "another CPU"
    assert described(model, cache, backend="openvino") == "by OpenVINO"
    machine[0] = "this CPU"
    assert described(model, cache, backend="auto").startswith("by torch (OpenVINO's output differs")
    assert len(conversions) == 2


def test_a_recorded_score_of_a_reranker_is_compared_by_its_size(tmp_path: Path):
    """The direction of a single number is its sign alone, and the sigmoids of large ones are all 1."""
    folder = classifier_families.write_classifier(tmp_path / "model", "bert", num_labels=1)
    runner = load(folder, backend="openvino", cache_dir="", dtype="float32")
    check = runner.model.check
    assert is_near(runner.value_of(check.prompt), check.value, 0.005)
    (score,) = check.values
    assert not is_near(runner.value_of(check.prompt), replace(check, values=[score * 1.02]).value, 0.005)


def test_weights_near_zero_may_be_missing_in_a_recorded_sparse_vector(tmp_path: Path):
    """Whether they are above zero depends on the CPU."""
    folder = retrieval_families.SPARSE["splade_max"](tmp_path / "model")
    runner = load(folder, backend="openvino", cache_dir="", dtype="float32")
    check = runner.model.check
    least = int(np.argmin(check.values))
    fewer = [[number for place, number in enumerate(each) if place != least] for each in (check.values, check.indices)]
    computed = runner.value_of(check.prompt)
    assert is_near(computed, replace(check, values=fewer[0], indices=fewer[1]).value, 0.1)
    moved = [*check.indices[1:], check.indices[-1] + 1]
    assert not is_near(computed, replace(check, indices=moved).value, 0.1)


def test_token_embeddings_are_accepted_at_the_first_start_and_at_the_second(model: Path, tmp_path: Path):
    loading = ModelConfig(device="cpu", backend="openvino", dtype="float32", cache_dir=str(tmp_path / "cache"))
    config = Config(models=(str(model),), loading=loading, input=InputConfig(enable_prompt_embeds=True))

    embeds = RenderedPrompt(np.zeros(5, np.int32), embeds=np.ones((5, 32), np.float32))
    vectors = []
    for _ in range(2):
        prepare = LocalRunners(config, Offload(launch=2)).load(config.sources[0], load_runner)
        runner: Any = prepare(RunnerParams())
        assert (runner.facts.embeds_width, runner.facts.concurrent_launches) == (32, 2)
        ((vector,),) = runner.launch(Batch((PoolingRequest(embeds, (Embed(),)),))).rows
        vectors.append(vector)
    assert np.array_equal(*vectors)


def test_a_model_that_can_be_saved_nowhere_is_computed_by_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    reason = r"it cannot be converted now: \[Errno 2\] No such file or directory: '.*/missing/"
    assert re.match(rf"by torch \({reason}", described(model, "", backend="auto"))
    with pytest.raises(ModelLoadError, match=f"--backend openvino: {reason}"):
        described(model, "")


@pytest.mark.slow
def test_on_full_disks_torch_computes_and_that_is_not_kept(
    model: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    (small_disk / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk / "tmp"))
    (small_disk / "data").write_bytes(bytes(2**21 - 2**16))
    said = described(model, small_disk / "cache", backend="auto")
    assert re.match(r"by torch \(it cannot be converted now: .*: No space left on device: ", said)
    (small_disk / "data").unlink()
    assert described(model, small_disk / "cache", backend="auto").startswith("by OpenVINO")


def test_what_is_logged_while_a_model_is_converted_is_not_lost(model: Path, caplog: pytest.LogCaptureFixture):
    from trio_pool_serve.models.loading.torch_loading import load_warm_runner
    from trio_pool_serve.runner.openvino.graph import Traced, convert

    loaded = load_warm_runner(read_model_folder(model), ModelConfig(device="cpu", dtype="float32"), Offload()).loaded
    traced = Traced(loaded)
    loaded.backbone.model.register_forward_hook(lambda *_: logging.getLogger("another").info("meanwhile"))
    caplog.set_level(logging.INFO)
    convert(traced)
    assert "meanwhile" in caplog.messages
