"""How fast an engine computes rows on this machine, and in how much memory."""

import math
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import trio
from attrs import frozen

from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.types import PoolingRequest, RenderedPrompt

LENGTHS = (16, 128, 512, 2048)
"""Tokens of the rows that are computed, as far as the model's maximum allows."""

SECONDS = 1.0
"""For which rows of one length are computed, or one batch, if that takes longer."""

SECONDS_ALONE = 0.25
"""For which single rows of one length are computed."""

ROWS_ALONE = 3
"""Fewest single rows of one length."""


@frozen(kw_only=True)
class Speed:
    """How fast rows of one length are computed, without HTTP and tokenising."""

    tokens: int
    """Of each row."""
    rows_per_s: float
    """In batches, as many at a time as a server would compute."""
    tokens_per_s: float
    ms_alone: float
    """Milliseconds from one row's submission to its output, if there are no others: the median."""


def lengths_for(max_model_len: int) -> list[int]:
    """Return the lengths to measure: of those that the model does not accept there is the longest that it does."""
    return sorted({min(length, max_model_len) for length in LENGTHS})


async def measure_speed(engine: Engine, like: PoolingRequest, length: int, *, batches_at_once: int) -> Speed:
    """Compute rows of ``length`` tokens for about ``SECONDS``.

    ``like`` is a row that the model can compute. Raises as ``Engine.submit_all``. Cancellation: at once.
    """
    alone_s = await _seconds_alone(engine, row_of(like, length))
    of_batch = max(1, engine.facts.max_batch_tokens // length)
    rows = [row_of(like, length)] * min(of_batch, max(1, math.ceil(SECONDS / alone_s)))
    done = 0
    began = time.perf_counter()

    async def keep_computing() -> None:
        nonlocal done
        while time.perf_counter() < began + SECONDS:
            done += len(await engine.submit_all(rows))

    async with trio.open_nursery() as nursery:
        for _ in range(batches_at_once + 1):  # one more, so that a batch waits when another is done
            nursery.start_soon(keep_computing)
    rows_per_s = done / (time.perf_counter() - began)
    return Speed(tokens=length, rows_per_s=rows_per_s, tokens_per_s=rows_per_s * length, ms_alone=alone_s * 1000)


async def _seconds_alone(engine: Engine, row: PoolingRequest) -> float:
    took: list[float] = []
    while len(took) < ROWS_ALONE or sum(took) < SECONDS_ALONE:
        began = time.perf_counter()
        await engine.submit(row)
        took.append(time.perf_counter() - began)
        if took[-1] > SECONDS:
            break
    return median(took)


async def peak_of_largest_batch(
    engine: Engine, like: PoolingRequest, max_model_len: int, *, batches_at_once: int
) -> int:
    """Return the most bytes resident while batches of ``max_batch_tokens`` are computed, as many at a time as would be.

    Raises as ``Engine.submit_all``. Cancellation: at once.
    """
    length = min(max_model_len, engine.facts.max_batch_tokens)
    rows = [row_of(like, length)] * (engine.facts.max_batch_tokens // length)
    reset_peak()
    async with trio.open_nursery() as nursery:
        for _ in range(batches_at_once):
            nursery.start_soon(engine.submit_all, rows)
    return peak_bytes()


def row_of(like: PoolingRequest, tokens: int) -> PoolingRequest:
    """Return a row of so many tokens, all of them the first one of ``like``, with the same params."""
    ids = np.full(tokens, like.prompt.token_ids[0], dtype=np.int32)
    return msgspec.structs.replace(like, prompt=RenderedPrompt(ids))


STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")

RESET_PEAK = "5"
"""What sets the peak to what is resident now: proc(5)."""


def peak_bytes() -> int:
    """Return the most bytes that were resident since ``reset_peak``."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    """Begin to look for the peak anew; where the kernel does not allow it, the peak is that of the whole process."""
    with suppress(OSError):
        PEAK.write_text(RESET_PEAK)
