"""What ``trio-pool-serve check`` says is what a server does."""

import json
import mmap
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from attrs import asdict, evolve
from rich.console import Console

from tests.end_to_end.folder_over_http import serving_folder
from tests.fake_nvidia_smi import EIGHT, printing, write_nvidia_smi
from tests.models.adapter_folders import factors, write_adapter
from tests.models.classifier_families import POOLED, write_classifier
from tests.models.model_families import edit_json, pooling, write_family, write_weighted_layers
from tests.models.retrieval_families import pylate_bert, splade_max
from tests.models.vision_families import clip
from tests.server.server_process import ROOT
from tests.simgpu.serving import on_simulated_device
from trio_pool_serve.checking.check_model import check_model, peak_bytes, reset_peak, serve_command
from trio_pool_serve.checking.model_report import ModelReport, print_report
from trio_pool_serve.command_line.server_commands import ReportOptions, read_settings
from trio_pool_serve.config import Config, ModelConfig
from trio_pool_serve.processes.allocator import resident_bytes

CHECK = (sys.executable, "-m", "trio_pool_serve", "check")


def config_for(model: Path, **loading: Any) -> Config:
    loading = {"dtype": "float32", "device": "cpu", "backend": "torch", **loading}
    return Config(models=(str(model),), loading=ModelConfig(**loading))


async def check(model: Path, **loading: Any) -> ModelReport:
    """Return the report without speed and memory."""
    return await check_model(config_for(model, **loading), str, measure=False)


KINDS = {
    "embedding": (partial(write_family, name="bert"), "embed"),
    "sequence_classifier": (partial(write_classifier, name="bert", num_labels=3), "classify"),
    "cross_encoder": (partial(write_classifier, name="bert", num_labels=1), "score"),
    "cross_encoder of modules": (POOLED["modernbert_with_pooled_scores"], "score"),
    "late_interaction": (pylate_bert, "score"),
    "sparse": (splade_max, "sparse_embed"),
    "dual_encoder": (clip, "embed"),
}


PARTICULARS = {
    "cross_encoder": {"activation": "Sigmoid"},
    "cross_encoder of modules": {"activation": "Identity"},
    "late_interaction": {"queries": "padded to 14 tokens", "documents": "up to 40 tokens"},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_the_report_is_what_a_server_says_of_the_model(tmp_path: Path, kind: str):
    write, task = KINDS[kind]
    model = write(tmp_path / "model")
    report = await check(model)
    async with serving_folder(model) as asked:
        (card,) = (await asked.client.get("/v1/models")).json()["data"]
        info = (await asked.client.get("/info")).json()
        facts = asked.service.models.find().engine.facts
        assert report.max_batch_tokens == info["max_batch_tokens"] == facts.max_batch_tokens
        assert report.dimensions == facts.dimensions
    name = kind.partition(" ")[0]
    assert (report.kind, report.task) == (name, task)
    assert report.particulars == PARTICULARS.get(kind, {})
    assert report.normalize == (name in ("embedding", "late_interaction"))
    for name in ("id", "task", "tasks", "max_model_len", "backend", "dtype", "fingerprint"):
        assert getattr(report, name) == card[name], name
    assert report.max_model_len == info["max_input_length"]
    if (embedding := info["model_type"].get("embedding")) is not None:
        assert report.pooling == embedding["pooling"]
    else:
        ((name, labels),) = info["model_type"].items()
        assert name == ("reranker" if report.scoring == "pairs" else "classifier")
        assert [labels["id2label"][str(index)] for index in range(len(report.labels))] == report.labels
    assert ("image" in report.accepts) == (kind == "dual_encoder")
    assert (report.backend, report.computation[:8]) == ("torch", "by torch")
    assert info["model_dtype"] == report.dtype
    assert report.speed == []
    assert report.memory.peak_of_largest_batch is None
    assert 0 < report.memory.weights < report.memory.resident_after_load


@pytest.mark.slow
async def test_every_length_is_measured(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert")
    steps: list[str] = []
    report = await check_model(config_for(model), steps.append)
    assert [speed.tokens for speed in report.speed] == [16, 48]
    for speed in report.speed:
        assert speed.tokens_per_s == pytest.approx(speed.rows_per_s * speed.tokens)
        assert speed.rows_per_s > 0 < speed.ms_alone
    assert report.memory.peak_of_largest_batch >= report.memory.weights
    assert steps[0] == "loading"
    assert steps[-1] == "measuring rows of 48 tokens"


async def test_the_report_says_where_pooling_was_read(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert", modules=[pooling("cls")])
    edit_json(model / "config_sentence_transformers.json", lambda file: file.update(default_prompt_name="query"))
    declared = await check(model)
    assert (declared.prompts, declared.default_prompt_name) == ({"query": "query: "}, "query")
    configured = await check(model, pooling="mean", normalize=True)
    (model / "modules.json").unlink()
    assumed = await check(model)
    by_assumption = "assumed, as no file declares it"
    assert [(each.pooling, each.pooling_from) for each in (declared, configured, assumed)] == [
        ("cls", "1_Pooling/config.json"), ("mean", "--pooling"), ("mean", by_assumption),
    ]  # fmt: skip
    assert [(each.normalize, each.normalize_from) for each in (declared, configured, assumed)] == [
        (False, "modules.json"), (True, "--normalize"), (False, by_assumption),
    ]  # fmt: skip
    assert declared.warnings == []
    assert "sentence-transformers assumes mean pooling" in assumed.warnings[0]


async def test_the_first_line_is_the_verdict_and_the_second_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    report = await check(write_family(tmp_path / "model", "bert"), served_model_name="org/tiny")
    command = serve_command(["org/tiny=a folder", "--no-measure", "--dtype", "float32", "--json"])
    print_report(evolve(report, command=command), Console(width=500))
    verdict, second, memory, *_ = capsys.readouterr().out.splitlines()
    assert verdict.startswith(f"{report.id} works: embedding, float32 on cpu, by torch")
    assert second == "Serve it: trio-pool-serve serve 'org/tiny=a folder' --dtype float32"
    assert memory.startswith("memory")
    assert "MiB once loaded" in memory


async def test_the_printed_report_says_how_long_queries_are_and_that_no_file_has_a_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    without_prompts = write_family(tmp_path / "bert", "bert")
    (without_prompts / "config_sentence_transformers.json").unlink()
    for model in (pylate_bert(tmp_path / "colbert"), without_prompts):
        print_report(await check(model), Console(width=500))
    printed = " ".join(capsys.readouterr().out.split())
    assert "queries padded to 14 tokens documents up to 40 tokens" in printed
    assert "prompts none in the files" in printed


async def test_the_report_lists_the_modules_of_a_cross_encoder_and_weighted_layers_without_effect(tmp_path: Path):
    scored = await check(POOLED["modernbert_with_pooled_scores"](tmp_path / "scored"))
    assert scored.modules == ["Pooling", "Dense", "LayerNorm", "Dense"]
    assert (scored.pooling, scored.pooling_from, scored.labels) == ("cls", "1_Pooling/config.json", ["LABEL_0"])
    ignored = await check(write_weighted_layers(tmp_path / "ignored", "bert", has_hidden_states=False))
    assert (ignored.modules, ignored.pooling_from) == (["Pooling", "Normalize"], "2_Pooling/config.json")
    assert "WeightedLayerPooling has no effect" in ignored.warnings[0]


async def test_the_report_says_what_weights_are_made_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = write_family(tmp_path / "base", "qwen3")
    name = "layers.0.self_attn.q_proj"
    quantization = {"quant_method": "fp8"}
    edit_json(base / "config.json", lambda config: config.update(quantization_config=quantization))
    adapter = write_adapter(tmp_path / "adapter", factors(name, size=32, out=32), target_modules=[name])
    reports = [await check(base), await check(adapter, adapter_base=str(base))]
    dequantised = "dequantised from FP8"
    assert [report.weights for report in reports] == [dequantised, f"LoRA adapter on {base}, {dequantised}"]
    print_report(reports[1], Console(width=500))
    assert f"LoRA adapter on {base}, {dequantised}" in capsys.readouterr().out


async def test_on_a_machine_with_gpus_the_report_says_whether_its_engine_processes_would_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model = write_family(tmp_path / "model", "bert")
    assert (await check(model)).mps == ""
    monkeypatch.setenv("PATH", str(write_nvidia_smi(tmp_path / "bin", printing(EIGHT))), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with on_simulated_device():
        report = await check(model, device="cuda", dtype="bfloat16")
    assert report.engine == "process"
    assert f"no MPS control daemon answers at {tmp_path} " in report.mps
    print_report(report, Console(width=500))
    assert (
        "MPS            replicas on the same GPU take turns: no MPS control daemon answers" in capsys.readouterr().out
    )
    assert msgspec.json.decode(msgspec.json.encode(asdict(report)))["mps"] == report.mps


async def test_a_check_that_is_cancelled_leaves_nothing_behind(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert")
    with trio.CancelScope() as scope:
        await check_model(config_for(model), lambda step: scope.cancel() if step.startswith("measuring") else None)
    assert scope.cancelled_caught


async def test_a_range_of_replicas_is_checked_by_its_most(tmp_path: Path):
    """A check computes in its own process, where a server with ``--engine ray`` would start more."""
    config = config_for(write_family(tmp_path / "model", "bert"))
    config = evolve(config, processes=evolve(config.processes, engine="ray", replicas="1..3"))
    report = await check_model(config, str, measure=False)
    assert (report.engine, report.replicas) == ("ray", 3)


@pytest.mark.slow
async def test_the_command_writes_json_about_a_model_that_openvino_computes(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert")
    flags = ("--backend", "openvino", "--dtype", "float32", "--cache-dir", str(tmp_path / "cache"), "--no-measure")
    done = await trio.run_process([*CHECK, f"m={model}", *flags, "--json"], capture_stdout=True, cwd=ROOT)
    report = json.loads(done.stdout)
    assert (report["servable"], report["id"], report["dtype"]) == (True, "m", "float32")
    assert report["command"] == shlex.join(["trio-pool-serve", "serve", f"m={model}", *flags[:-1]])
    assert report["computation"].startswith("by OpenVINO")
    assert report["pooling_from"] == "1_Pooling/config.json"
    assert report["memory"]["resident_before"] < report["memory"]["resident_after_load"]


@pytest.mark.slow
async def test_a_model_that_a_server_refuses_is_refused_with_the_same_words(tmp_path: Path):
    model = write_family(tmp_path / "model", "bert")
    edit_json(model / "modules.json", lambda modules: modules[1].update(type="my.own.Module"))
    checked = await trio.run_process(
        [*CHECK, str(model), "--json"], capture_stdout=True, capture_stderr=True, check=False, cwd=ROOT
    )
    assert checked.returncode == 1
    serve = [*CHECK[:-1], "serve", str(model), "--port", "0"]
    served = await trio.run_process(serve, capture_stderr=True, check=False, cwd=ROOT)
    assert served.returncode == 1
    log = map(json.loads, served.stderr.decode().splitlines())
    (reason,) = (line["message"] for line in log if line["level"] == "CRITICAL")
    assert f"{model} does not work: {reason}" in checked.stderr.decode().splitlines()
    assert json.loads(checked.stdout) == {"servable": False, "error": reason}


def test_the_settings_of_a_server_are_those_of_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "settings.toml"
    file.write_text('pooling = "cls"\nport = 8080\nmax-batch-tokens = 300\n')
    monkeypatch.setenv("TRIO_POOL_SERVE_MAX_BATCH_TOKENS", "400")
    settings = read_settings("check", ["m=folder", "--config", str(file), "--dtype", "float32", "--no-measure"])
    assert settings.config.models == ("m=folder",)
    assert settings.config.loading == ModelConfig(pooling="cls", dtype="float32")
    assert settings.config.scheduling.max_batch_tokens == 400
    assert settings.report == ReportOptions(measure=False, json=False)


def test_the_peak_of_memory_counts_from_where_it_was_reset():
    with mmap.mmap(-1, 64 * 2**20) as block:  # goes back to the system, whatever the allocator keeps
        block[::4096] = b"\1" * (len(block) // 4096)
        with_block = resident_bytes()
    reset_peak()
    assert peak_bytes() < with_block
