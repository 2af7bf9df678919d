"""From which size on a thread hop is worth its price: what ``LOOP_BYTES`` and ``LOOP_CHARACTERS`` are read from.

Compares one hop to a thread and back with decoding bodies and encoding answers of 1 KiB to 1 MiB, and with tokenising
texts of an eighth of that.

    python -m benchmarks.hop_size
"""

import json
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import cyclopts
import numpy as np
import trio
from attrs import frozen
from cyclopts import Parameter

from benchmarks.machine import describe_machine
from benchmarks.model import MODEL_PATH, Texts
from benchmarks.report import RESULTS, open_figure, open_progress, print_table, warn_if_busy, write_figure, write_json
from trio_pool_serve.api.dialects.openai import EmbeddingsRequest
from trio_pool_serve.api.fields.embedding_responses import VectorEncoding, encode_embeddings
from trio_pool_serve.api.http.endpoint import LOOP_BYTES
from trio_pool_serve.api.http.json_body import decode_json
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.loading.renderer_loading import text_renderer_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.prompts import RenderingParams, TextPrompt
from trio_pool_serve.rendering.renderer import LOOP_CHARACTERS
from trio_pool_serve.rendering.text.text_renderer import TextRenderer

SIZES = tuple(2**power for power in range(10, 21))

DIMENSIONS = 384

TEXT_TOKENS = 34

BUDGET_MS = 2.0
"""Nothing on the loop may take longer."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``seconds`` per kind of work, size and round."""

    rounds: int = 5
    seconds: float = 0.2
    output_dir: Path = RESULTS


@frozen
class Work:
    """Something that could be done on the loop or in a thread; ``size`` is what the server would look at, bytes."""

    name: str
    size: int
    run: Callable[[], object]
    loop_size: int = LOOP_BYTES
    """Up to which size the server does it on the loop."""


def works() -> list[Work]:
    """Return every kind of work at every size."""
    texts = Texts().make(256, TEXT_TOKENS)
    makers = (_decode_texts, _decode_tokens, partial(_encode, "float"), partial(_encode, "base64"), _tokenise)
    return [make(texts, size) for make in makers for size in SIZES]


def _decode_texts(texts: list[str], size: int) -> Work:
    """Decode short texts, as many as fit."""
    return _decode("decode texts", list(_fill(cycle(texts), size)))


def _decode_tokens(texts: list[str], size: int) -> Work:
    """Decode lists of token ids, which become arrays."""
    rows = ([1000 + 7 * column for column in range(TEXT_TOKENS)] for _ in cycle(texts))
    return _decode("decode token ids", list(_fill(rows, size)))


def _fill(items: Iterator[Any], size: int) -> Iterator[Any]:
    """Yield items until their JSON has ``size`` bytes; at least one."""
    for item in items:
        yield item
        size -= len(json.dumps(item)) + 2
        if size <= 0:
            return


def _decode(name: str, inputs: list[Any]) -> Work:
    body = json.dumps({"model": "all-MiniLM-L6-v2", "input": inputs}).encode()
    network = NetworkConfig(max_inputs_per_request=1_000_000)
    return Work(name, len(body), lambda: decode_json(body, EmbeddingsRequest).job(network))


def _encode(encoding: Any, _texts: list[str], size: int) -> Work:
    """Encode vectors, as many as fit."""
    rows = max(1, size // (4 * DIMENSIONS))
    vectors = np.random.default_rng(0).standard_normal((rows, DIMENSIONS), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encode = partial(
        encode_embeddings,
        list(vectors),
        VectorEncoding(encoding),
        prompt_tokens=rows * TEXT_TOKENS,
        answer_id="embd-0",
        model="all-MiniLM-L6-v2",
        created=0,
    )
    return Work(f"encode {encoding}", vectors.nbytes, encode)


@cache
def _text_renderer() -> TextRenderer:
    folder = read_model_folder(Path(MODEL_PATH))
    return text_renderer_of(folder, load_tokenizer(folder), workers=1)


def _tokenise(texts: list[str], size: int) -> Work:
    """Tokenise short texts, as many as fit into an eighth of the size."""
    prompts = [(TextPrompt(text), RenderingParams(), False) for text in _fill(cycle(texts), size // 8)]
    characters = sum(len(prompt.text) for prompt, _, _ in prompts)
    return Work("tokenise", characters, partial(_text_renderer().render_rows, prompts), LOOP_CHARACTERS)


async def time_hop(seconds: float) -> float:
    """Return the µs that a task waits for a thread that does nothing."""
    limiter = trio.CapacityLimiter(1)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        await trio.to_thread.run_sync(_nothing, limiter=limiter)
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)


def _nothing() -> None:
    pass


def time_work(work: Work, seconds: float) -> float:
    """Return the µs that one piece of work takes."""
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        began = time.perf_counter()
        work.run()
        times.append(time.perf_counter() - began)
    return 1e6 * median(times)


@frozen
class Curve:
    """µs by size for one kind of work."""

    name: str
    sizes: list[int]
    times_us: list[float]
    loop_size: int

    def size_at(self, limit_us: float) -> int | None:
        """Return the size that takes ``limit_us``, by straight lines between the measured ones."""
        if limit_us < self.times_us[0] or limit_us > self.times_us[-1]:
            return None
        return int(np.interp(limit_us, np.maximum.accumulate(self.times_us), self.sizes))

    def time_at(self, size: int) -> float:
        """Return the µs that ``size`` takes."""
        return float(np.interp(size, self.sizes, self.times_us))


async def measure(settings: Settings) -> tuple[float, list[Curve]]:
    """Return the hop's µs, and a curve for each kind of work: medians of interleaved rounds."""
    todo = works()
    hops: list[float] = []
    times: list[list[float]] = [[] for _ in todo]
    with open_progress() as progress:
        for _ in progress.track(range(settings.rounds), description="rounds"):
            hops.append(await time_hop(settings.seconds))
            for work, into in zip(todo, times, strict=True):
                into.append(time_work(work, settings.seconds))
                await trio.lowlevel.checkpoint()
    per_curve = len(SIZES)
    curves = []
    for first in range(0, len(todo), per_curve):
        same = slice(first, first + per_curve)
        sizes = [work.size for work in todo[same]]
        curves.append(Curve(todo[first].name, sizes, [*map(median, times[same])], todo[first].loop_size))
    return median(hops), curves


def show(hop_us: float, curves: list[Curve]) -> None:
    """Print where the curves cross the hop, and what is done on the loop at most."""
    columns = ["work", f"takes a hop ({hop_us:.0f} µs) at", "on the loop up to", "which takes", f"{BUDGET_MS:g} ms at"]
    rows = [
        [
            curve.name,
            _kib(curve, hop_us),
            f"{curve.loop_size / 1024:g} KiB",
            f"{curve.time_at(curve.loop_size):.0f} µs",
            _kib(curve, 1e3 * BUDGET_MS),
        ]
        for curve in curves
    ]
    print_table("on the loop, or in a thread", columns, rows)


def _kib(curve: Curve, limit_us: float) -> str:
    size = curve.size_at(limit_us)
    if size is None:
        return "less" if limit_us < curve.times_us[0] else f"> {curve.sizes[-1] // 1024} KiB"
    return f"{size / 1024:.1f} KiB"


def draw(hop_us: float, curves: list[Curve], settings: Settings) -> None:
    """Plot the curves, the hop and ``LOOP_BYTES``."""
    figure, (axis,) = open_figure(1)
    for curve in curves:
        axis.plot([size / 1024 for size in curve.sizes], curve.times_us, marker="o", markersize=3, label=curve.name)
    axis.axhline(hop_us, color="black", linestyle="--", label="thread hop")
    axis.axvline(LOOP_BYTES / 1024, color="gray", linestyle=":", label="LOOP_BYTES")
    axis.set(xscale="log", yscale="log", xlabel="size, KiB (bodies: JSON; answers: float32)", ylabel="µs")
    axis.set_title("What a piece of work takes")
    axis.legend(frameon=False)
    write_figure(figure, settings.output_dir, "hop_size")


async def run(settings: Settings) -> None:
    """Measure and report."""
    machine = describe_machine()
    warn_if_busy(machine)
    hop_us, curves = await measure(settings)
    show(hop_us, curves)
    document = {
        "machine": machine,
        "settings": attrs.asdict(settings, filter=lambda attribute, _: attribute.name != "output_dir"),
        "loop_bytes": LOOP_BYTES,
        "hop_us": hop_us,
        "curves": [attrs.asdict(curve) | {"bytes_at_a_hop": curve.size_at(hop_us)} for curve in curves],
    }
    write_json(settings.output_dir, "hop_size", document)
    draw(hop_us, curves, settings)


def main(settings: Settings = Settings()) -> None:
    """Compare a thread hop with decoding and encoding, by size."""
    trio.run(run, settings)


if __name__ == "__main__":
    cyclopts.run(main)
