"""Which models OpenVINO computes, why not the others, and what is kept on disk."""

import logging
import multiprocessing
import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from trio_pool_serve.runner.openvino.model_cache import CacheEntry, Record, model_digest, saved

from tests.lanes import sampled
from tests.models.model_families import load, loaded_runner, write_family
from tests.models.vision_families import clip
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.runner.openvino import model_cache, selection, trial
from trio_pool_serve.threads.offload import Offload

pytest.importorskip("openvino")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_family(tmp_path / "bert", "bert")


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each conversion."""
    from trio_pool_serve.runner.openvino import conversion

    done: list[int] = []
    convert = conversion.convert
    monkeypatch.setattr(conversion, "convert", lambda backbone: done.append(1) or convert(backbone))
    return done


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The results of the trials of speed, in place of real ones; those that are left were not tried."""
    given: list[float] = []
    monkeypatch.setattr(selection, "time_ratio", lambda *_, **__: given.pop(0))
    return given


def described(model: Path, cache: Path | str, **options: Any) -> str:
    settings = {"backend": "openvino", "cache_dir": str(cache), "dtype": "float32"} | options
    return load(model, **settings).describe().rpartition("tokens, ")[2]


# -- the choice -----------------------------------------------------------------------------------------


def test_auto_takes_openvino_only_if_it_is_clearly_faster(model: Path, tmp_path: Path, ratios: list[float]):
    ratios += [0.5, 0.9, 0.91, 1.3]
    assert [described(model, "", backend="auto") for _ in range(4)] == [
        "by OpenVINO (in 0.50 times torch's time)",
        "by OpenVINO (in 0.90 times torch's time)",
        "by torch (OpenVINO takes 0.91 times as long)",
        "by torch (OpenVINO takes 1.30 times as long)",
    ]


def test_the_trial_is_fair(monkeypatch: pytest.MonkeyPatch):
    """A computation takes as long as itself, and half as long as one that does the same twice."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(seconds) * 1e-6)

    def once(_: object) -> torch.Tensor:
        for _ in range(1000):
            next(seconds)
        return torch.zeros(1)

    def twice(forward: object) -> torch.Tensor:
        once(forward)
        return once(forward)

    rows = {"vocab_size": 50, "max_tokens": 48, "pad_token_id": 0}
    assert trial.time_ratio(once, once, **rows) == pytest.approx(1)
    assert trial.time_ratio(once, twice, **rows) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backend": "torch"}, "as configured"),
        ({"dtype": "float16"}, "OpenVINO is not used for float16"),
    ],
)
def test_the_description_says_why_torch_computes(options: dict[str, Any], reason: str, model: Path):
    assert described(model, "", **{"backend": "auto"} | options) == f"by torch ({reason})"


def test_a_model_that_reads_images_is_computed_by_torch(tmp_path: Path):
    assert described(clip(tmp_path / "clip"), "", backend="auto").endswith(
        "by torch (OpenVINO is not used for models that read images)"
    )


def test_without_openvino_torch_computes(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection, "find_spec", lambda name: None)
    assert described(model, "", backend="auto") == "by torch (OpenVINO is not installed)"
    with pytest.raises(ModelLoadError, match=r"--backend openvino: OpenVINO is not installed\."):
        described(model, "")
    with pytest.raises(ModelLoadError, match=r"--dtype int8: OpenVINO is not installed\."):
        described(model, "", dtype="int8")


def test_bfloat16_is_for_cpus_that_compute_it(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection, "has_native_bfloat16", lambda device: False)
    said = described(model, "", backend="auto", dtype="bfloat16")
    assert said == "by torch (OpenVINO is used for bfloat16 only where the CPU computes it natively)"
    monkeypatch.setattr(selection, "has_native_bfloat16", lambda device: True)
    assert described(model, "", dtype="bfloat16") == "by OpenVINO"


def test_a_model_that_cannot_be_converted_is_computed_by_torch(model: Path, monkeypatch: pytest.MonkeyPatch):
    from trio_pool_serve.runner.openvino import conversion

    def fail(_: object) -> None:
        raise RuntimeError("no such operation\nand much more")

    monkeypatch.setattr(conversion, "convert", fail)
    assert (
        described(model, "", backend="auto")
        == "by torch (OpenVINO fails: RuntimeError('no such operation\\nand much more'))"
    )
    with pytest.raises(ModelLoadError, match="--backend openvino: OpenVINO fails: RuntimeError"):
        described(model, "")


def test_a_model_whose_output_differs_is_computed_by_torch(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selection, "MIN_COSINE", {torch.float32: 1.1})
    assert described(model, "", backend="auto") == "by torch (OpenVINO's output differs: cosine 1.00000)"


# -- the cache ------------------------------------------------------------------------------------------


def the_entry(cache: Path) -> Path:
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    return entry


def test_the_second_start_neither_converts_nor_tries(
    model: Path, tmp_path: Path, conversions: list[int], ratios: list[float]
):
    cache = tmp_path / "a" / "cache"
    ratios += [0.5, 0.7]
    first, second = (described(model, cache, backend="auto") for _ in range(2))
    assert (first, len(conversions), ratios) == (second, 1, [0.7])
    entry = the_entry(cache)
    assert {path.name for path in entry.iterdir()} == {"model.xml", "model.bin", "record.json"}
    assert stat.S_IMODE(cache.stat().st_mode) == stat.S_IMODE(entry.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o600}


def test_that_openvino_was_slower_is_remembered(
    model: Path, tmp_path: Path, conversions: list[int], ratios: list[float]
):
    ratios.append(1.5)
    said = {described(model, tmp_path / "cache", backend="auto") for _ in range(2)}
    assert said == {"by torch (OpenVINO takes 1.50 times as long)"}
    assert len(conversions) == 1
    assert described(model, tmp_path / "cache") == "by OpenVINO (in 1.50 times torch's time)"  # as the user demands
    assert len(conversions) == 1


def test_the_folder_of_the_cache_may_be_relative(
    model: Path, tmp_path: Path, conversions: list[int], monkeypatch: pytest.MonkeyPatch
):
    """As of Python 3.12 the names of temporary folders are absolute, and without ``..``, whatever their parent's is."""
    monkeypatch.chdir(tmp_path)
    assert [described(model, "bert/../cache") for _ in range(2)] == ["by OpenVINO"] * 2
    assert len(conversions) == 1
    assert the_entry(tmp_path / "cache").name.startswith("bert-")


@pytest.mark.parametrize("cache_dir", ["", None])
def test_the_cache_can_be_switched_off_and_is_in_the_user_s_by_default(
    cache_dir: str | None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    described(model, "", cache_dir=cache_dir)
    assert (tmp_path / "xdg" / "trio_pool_serve").is_dir() == (cache_dir is None)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change_a_byte(path: Path) -> None:
    """The lowest byte of the first weight, which changes no output by much; OpenVINO does not mind that of the XML."""
    content = bytearray(path.read_bytes())
    content[0] ^= 0xFF
    path.write_bytes(content)


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


@sampled(
    ("name", "damage"),
    [
        *((name, damage) for damage in (truncate, change_a_byte, Path.unlink) for name in ("model.xml", "model.bin")),
        ("model.bin", make_unreadable),
        ("record.json", truncate),
    ],
    keep=[("model.bin", change_a_byte), ("record.json", truncate)],
)
def test_a_damaged_entry_is_replaced(name: str, damage: Any, model: Path, tmp_path: Path, conversions: list[int]):
    cache = tmp_path / "cache"
    described(model, cache)
    damage(the_entry(cache) / name)
    assert described(model, cache) == "by OpenVINO"
    assert len(conversions) == 2
    assert described(model, cache) == "by OpenVINO"
    assert len(conversions) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"\xff", b"null", b"[" * 10**5, b'{"digest": "the current one"}',
        b'{"digest": "the current one", "record": {"short_cosine": "1"}}',
        b'{"digest": "the current one", "record": {"short_cosine": 1, "time_ratios": [1]}}',
        b'{"digest": "another", "record": {"short_cosine": 1}}',
    ],
)  # fmt: skip
def test_a_record_that_is_none_counts_as_missing(content: bytes, tmp_path: Path):
    entry = CacheEntry(tmp_path, "the current one")
    (tmp_path / "record.json").write_bytes(content)
    assert entry.read() is None
    entry.update(Record(0.5))
    assert entry.read() == Record(0.5)


@pytest.mark.slow
def test_a_damaged_entry_keeps_what_was_chosen(model: Path, tmp_path: Path, ratios: list[float]):
    ratios += [0.5, 1.5]
    said = set()
    for _ in range(3):
        said.add(described(model, tmp_path / "cache", backend="auto"))
        change_a_byte(the_entry(tmp_path / "cache") / "model.bin")
    assert (said, ratios) == ({"by OpenVINO (in 0.50 times torch's time)"}, [1.5])


@pytest.mark.slow
def test_a_choice_that_could_not_be_timed_is_kept(model: Path, tmp_path: Path, ratios: list[float]):
    """Other models were computing; a trial at the next start might choose torch, whose numbers are others."""
    ratios.append(1.5)
    busy = Offload()
    busy.is_serving = True
    config = ModelConfig(device="cpu", backend="auto", cache_dir=str(tmp_path / "cache"), dtype="float32")
    untimed = "by OpenVINO (not timed beside other requests)"
    assert loaded_runner(read_model_folder(model), config, busy).describe().endswith(f"tokens, {untimed}")
    assert described(model, tmp_path / "cache", backend="auto") == untimed
    assert described(model, tmp_path / "cache") == "by OpenVINO"  # which the user demands, so none is missed
    assert ratios == [1.5]


@pytest.mark.slow
def test_an_entry_of_other_weights_is_replaced(model: Path, tmp_path: Path, conversions: list[int]):
    cache = tmp_path / "cache"
    described(model, cache)
    weights = model / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    described(model, cache)
    assert len(conversions) == 2
    the_entry(cache)  # there is one


def test_an_entry_that_gives_other_output_is_replaced(
    model: Path, tmp_path: Path, conversions: list[int], caplog: pytest.LogCaptureFixture
):
    cache = tmp_path / "cache"
    described(model, cache)
    entry = CacheEntry(the_entry(cache), model_digest(model))
    record = entry.read()
    assert record is not None
    entry.update(evolve(record, short_cosine=1.1))
    with caplog.at_level(logging.WARNING):
        assert described(model, cache) == "by OpenVINO"
    assert "is converted anew: its output differs" in caplog.text
    assert len(conversions) == 2


def test_what_the_digest_depends_on(model: Path, monkeypatch: pytest.MonkeyPatch):
    seen = {model_digest(model)}
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    seen.add(model_digest(model))
    (model / "more.txt").touch()
    seen.add(model_digest(model))
    monkeypatch.setattr(model_cache, "FORMAT", 0)
    seen.add(model_digest(model))
    monkeypatch.setattr(model_cache, "version", lambda library: "0")
    seen.add(model_digest(model))
    (model / ".git").mkdir()
    (model / ".git" / "index").touch()
    seen.add(model_digest(model))
    assert len(seen) == 5


def test_a_folder_that_cannot_be_written_is_done_without(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, logger="trio_pool_serve"):
        assert described(model, tmp_path / "file" / "cache") == "by OpenVINO"
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("trio_pool_serve")]
    cache = tmp_path / "file" / "cache"
    assert line == f"the converted model is not cached in {cache}: [Errno 20] Not a directory: '{cache}'"


def test_a_folder_that_cannot_be_made_is_logged_with_the_reason(small_disk: Path, caplog: pytest.LogCaptureFixture):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with saved(Path.touch, CacheEntry(small_disk / "cache" / "model", "digest")) as folder:
        assert [path.name for path in Path(folder).iterdir()] == ["model.xml"]
    assert f"not cached in {small_disk / 'cache'}: [Errno 30] Read-only file system" in caplog.text


@pytest.mark.slow
def test_on_a_full_disk_the_model_is_saved_elsewhere(
    model: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (small_disk / "data").write_bytes(bytes(2**21 - 2**16))
    before = {*tmp_path.iterdir()}
    assert described(model, small_disk / "cache") == "by OpenVINO"
    assert f"the converted model is not cached in {small_disk / 'cache'}: [Errno 28] No space left" in caplog.text
    assert {*tmp_path.iterdir()} == before
    assert {path.suffix for path in (small_disk / "cache").iterdir()} == {".lock"}


def test_a_part_of_a_model_makes_room_before_the_model_is_saved_elsewhere(tmp_path: Path):
    seen: list[list[str]] = []

    def save(path: Path) -> None:
        path.touch()
        seen.append([folder.name[:7] for folder in tmp_path.iterdir()])
        if len(seen) == 1:
            raise RuntimeError("the disk is full")

    entry = CacheEntry(tmp_path / "model", "digest")
    with saved(save, entry) as folder:
        entry.publish(Path(folder), Record(1))
        assert (seen, [*tmp_path.iterdir()]) == ([[".model."], []], [])


def test_a_model_that_can_be_saved_nowhere_is_computed_by_torch(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert described(model, "", backend="auto").startswith("by torch (OpenVINO fails: FileNotFoundError(")


def test_unfinished_entries_are_removed_after_a_day(tmp_path: Path):
    old, new, of_others = tmp_path / ".model-1.abc", tmp_path / ".model-1.abd", tmp_path / ".ssh"
    for folder in (old, new, of_others):
        folder.mkdir()
    for folder in (old, of_others):
        os.utime(folder, (0, 0))
    CacheEntry(tmp_path / "model-1", "digest").remove_abandoned()
    assert [folder.exists() for folder in (old, new, of_others)] == [False, True, True]


def describe_in_a_process(model: Path, cache: Path, said: Any) -> None:
    said.put(described(model, cache))


@pytest.mark.slow
def test_two_processes_at_once_convert_once(model: Path, tmp_path: Path):
    spawn = multiprocessing.get_context("spawn")
    said = spawn.Queue()
    processes = [spawn.Process(target=describe_in_a_process, args=(model, tmp_path / "c", said)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [said.get(timeout=60) for _ in processes] == ["by OpenVINO"] * 2
    for process in processes:
        process.join()
    the_entry(tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir() if path.name.startswith(".")] == []


def test_what_is_logged_while_a_model_is_converted_is_not_lost(model: Path, caplog: pytest.LogCaptureFixture):
    from trio_pool_serve.runner.openvino.conversion import convert

    backbone = load(model).backbone
    backbone.model.register_forward_hook(lambda *_: logging.getLogger("another").info("meanwhile"))
    caplog.set_level(logging.INFO)
    convert(backbone)
    assert "meanwhile" in caplog.messages
