"""How much does the framing of rows between processes cost? Compared with pickle and out-of-band buffers.

Rows to an engine process and answers back, encoded and decoded in one process, as ``engine/remote/wire.py`` does it and
as pickle protocol 5 would. Pickle is a reference only: with it a process that writes to a socket could run code.

    python -m benchmarks.row_frames
"""

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cyclopts
import msgspec
import numpy as np
from attrs import frozen
from cyclopts import Parameter

from benchmarks.machine import describe_machine
from benchmarks.report import RESULTS, open_steps, print_table, settings_document, write_json
from benchmarks.rounds import Rounds
from trio_pool_serve.engine.compute_rates import UNKNOWN
from trio_pool_serve.engine.remote.answers import answer_frames, read_answers
from trio_pool_serve.engine.remote.rows import read_rows, row_frames
from trio_pool_serve.engine.remote.scopes import Scopes
from trio_pool_serve.engine.remote.wire import Answers, Submit, parts_of
from trio_pool_serve.types import Embed, PoolingOutput, PoolingRequest, RenderedPrompt

TOKENS, DIMENSIONS = 34, 384


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """What is run: ``repeats`` frames of each number of rows in each round."""

    rounds: int = 5
    repeats: int = 300
    rows: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 8, 64)
    output_dir: Path = RESULTS


@frozen
class Cost:
    """Processor time per row, there and back."""

    row_us: float


def through_frames(requests: list[PoolingRequest], outputs: list[PoolingOutput]) -> list[Any]:
    """Encode and decode rows and answers as the link and the engine connection do."""
    scopes = Scopes(lambda: None)  # type: ignore[arg-type, return-value]
    read: list[Any] = []
    for frame in row_frames(enumerate(requests), _refuse):
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(frame.parts)), type=Submit)
        for part, payload in parts_of(message.parts, memoryview(b"".join(frame.buffers))):
            read += read_rows(part, payload, scopes)
    for frame in answer_frames([[*enumerate(outputs)]]):
        header = msgspec.msgpack.encode(Answers(frame.parts, 0, 0.0, UNKNOWN.tobytes()))
        answers = msgspec.msgpack.decode(header, type=Answers)
        for part, payload in parts_of(answers.parts, memoryview(b"".join(frame.buffers))):
            read += read_answers(part, payload)  # type: ignore[arg-type]  # none has failed
    return read


def _refuse(_: int, error: Exception) -> None:
    raise error


def through_pickle(requests: list[PoolingRequest], outputs: list[PoolingOutput]) -> list[Any]:
    """Encode and decode the same with pickle, its arrays out of band."""
    read: list[Any] = []
    for objects in (list(enumerate(requests)), list(enumerate(outputs))):
        buffers: list[pickle.PickleBuffer] = []
        header = pickle.dumps(objects, protocol=5, buffer_callback=buffers.append)
        lengths = [buffer.raw().nbytes for buffer in buffers]
        payload = memoryview(b"".join(buffers))
        ends = np.cumsum(lengths)
        behind = [payload[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        read += pickle.loads(header, buffers=behind)
    return read


WAYS: dict[str, Callable[[list[PoolingRequest], list[PoolingOutput]], list[Any]]] = {
    "frames": through_frames,
    "pickle 5": through_pickle,
}


def measure(way: str, rows: int, repeats: int) -> Cost:
    """Return the cost of one row among ``rows``."""
    params = (Embed(),)
    requests = [PoolingRequest(RenderedPrompt(np.arange(TOKENS, dtype=np.int32)), params) for _ in range(rows)]
    outputs = [PoolingOutput((np.ones(DIMENSIONS, np.float32),), 0.0, 0.0, 0.0) for _ in range(rows)]
    assert len(WAYS[way](requests, outputs)) == 2 * rows
    began = time.process_time()
    for _ in range(repeats):
        WAYS[way](requests, outputs)
    return Cost(1e6 * (time.process_time() - began) / repeats / rows)


def main(settings: Settings = Settings()) -> None:
    """Compare both ways, by the number of rows of a frame."""
    machine = describe_machine()
    rounds: Rounds[tuple[str, int]] = Rounds()
    with open_steps("frames", settings.rounds) as step:
        for number in range(settings.rounds):
            step(f"round {number + 1}")
            for rows in settings.rows:
                for way in WAYS:
                    rounds.add((way, rows), measure(way, rows, settings.repeats))
    table = [
        [
            str(rows),
            *(f"{rounds.median((way, rows), 'row_us'):.1f}" for way in WAYS),
            f"{rounds.ratio(('frames', rows), 'row_us', ('pickle 5', rows)):.2f}",
        ]
        for rows in settings.rows
    ]
    print_table("Processor time per row, µs", ["rows in a frame", *WAYS, "ratio"], table)
    document = {"machine": machine, "settings": settings_document(settings), "ways": rounds.as_document("way", "rows")}
    write_json(settings.output_dir, "row_frames", document)


if __name__ == "__main__":
    cyclopts.run(main)
