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
from trio_pool_serve.engine.remote.wire import (
    Answers,
    Frame,
    Scopes,
    Submit,
    add_answer,
    add_row,
    parts_of,
    read_answer,
    read_row,
)
from trio_pool_serve.types import PoolingOutput, PoolingRequest, RenderedPrompt

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
    there, back = Frame(), Frame()
    for number, request in enumerate(requests):
        add_row(there, number, request)
    header = msgspec.msgpack.encode(Submit(there.parts))
    message = msgspec.msgpack.decode(header, type=Submit)
    scopes = Scopes(lambda: None)  # type: ignore[arg-type, return-value]
    read: list[Any] = [
        read_row(part, payload, scopes) for part, payload in parts_of(message.rows, memoryview(b"".join(there.buffers)))
    ]
    for number, output in enumerate(outputs):
        add_answer(back, number, output)
    answers = msgspec.msgpack.decode(msgspec.msgpack.encode(Answers(back.parts, 0, 0.0)), type=Answers)
    read += [read_answer(part, payload) for part, payload in parts_of(answers.rows, memoryview(b"".join(back.buffers)))]
    return read


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
    requests = [PoolingRequest(RenderedPrompt(np.arange(TOKENS, dtype=np.int32))) for _ in range(rows)]
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
