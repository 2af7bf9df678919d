"""What do several LoRA adapters of one model cost? The same load with one adapter, with several in turn, and with none.

A batch has rows of one adapter, so several in turn are more and smaller batches. torch computes the packaged model and
adapters of all its linear layers with random weights. The three loads of a round are sent in turns to one server.

    python -m benchmarks.adapters
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import cyclopts
import numpy as np
from attrs import frozen
from cyclopts import Parameter
from safetensors.numpy import load_file, save_file

from benchmarks.load import LoadJob, LoadResult, run_load
from benchmarks.model import MODEL_NAME, MODEL_PATH, Texts
from benchmarks.report import RESULTS, Flags, Report, command_of, open_progress, print_table
from benchmarks.servers import open_ours

TOKENS = 34

LAYERS = ("query", "key", "value", "dense")
"""Ends of the names of the modules that have an adapter."""

ROUND_S = 0.5
"""Each load begins after this many seconds, which do not count."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``clients`` send one text after the other, for ``seconds`` in each load of a round."""

    rounds: int = 5
    seconds: float = 8.0
    clients: int = 16
    adapters: int = 8
    rank: int = 16
    flags: Flags = ()
    output_dir: Path = RESULTS


def write_adapter(folder: Path, rank: int, seed: int, layers: Sequence[str] = LAYERS) -> None:
    """Write an adapter of the packaged model's ``layers``, with small random weights."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(Path(MODEL_PATH) / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and weight.ndim == 2 and module.endswith(tuple(layers)) and not module.startswith("pooler"):
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = (
                    random.normal(size=shape).astype(np.float32) / rank
                )
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 1, "target_modules": list(layers)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def jobs_of(port: int, names: list[str], settings: Settings) -> Mapping[str, LoadJob]:
    """Return the loads by what they ask for; a request's text is the same in all of them."""
    texts = Texts().make(64, TOKENS)
    turns = {"no adapter": [MODEL_NAME], "one adapter": names[:1], f"{len(names)} adapters in turn": names}
    return {
        what: LoadJob(
            port=port,
            bodies=[
                json.dumps({"model": models[number % len(models)], "input": text}) for number, text in enumerate(texts)
            ],
            clients=settings.clients,
            seconds=settings.seconds,
            ramp_s=ROUND_S,
        )
        for what, models in turns.items()
    }


async def run(settings: Settings) -> None:
    """Measure and report. Cancellation: at once; the server is stopped."""
    report = Report("adapters", settings)
    with tempfile.TemporaryDirectory() as temporary:
        names = [f"adapter-{number}" for number in range(settings.adapters)]
        flags = ["--backend", "torch", "--dtype", "float32"]
        for seed, name in enumerate(names):
            write_adapter(Path(temporary) / name, settings.rank, seed)
            flags += ["--adapter", f"{name}={temporary}/{name}"]
        async with open_ours(*flags, *settings.flags) as server:
            jobs = jobs_of(server.port, names, settings)
            measured: dict[str, list[LoadResult]] = {what: [] for what in jobs}
            with open_progress() as progress:
                task = progress.add_task("loads", total=settings.rounds * len(jobs))
                for _ in range(settings.rounds):
                    for what, job in jobs.items():
                        measured[what].append(await run_load(job))
                        progress.advance(task)
    one = measured["one adapter"]
    ratios = {
        what: {
            name: float(np.median([getattr(a, name) / getattr(b, name) for a, b in zip(loads, one, strict=True)]))
            for name in ("requests_per_s", "p50_ms", "p99_ms")
        }
        for what, loads in measured.items()
    }
    print_table(
        f"{settings.clients} clients, {TOKENS} tokens; medians of rounds, and of their ratios to one adapter",
        ["", "requests/s", "p50 ms", "p99 ms", "requests/s, ratio", "p50, ratio", "p99, ratio"],
        [
            [
                what,
                *(f"{np.median([getattr(load, name) for load in loads]):.1f}" for name in ratios[what]),
                *(f"{ratio:.2f}" for ratio in ratios[what].values()),
            ]
            for what, loads in measured.items()
        ],
    )
    report.write(ratios=ratios, measured={what: list(map(attrs.asdict, loads)) for what, loads in measured.items()})


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
