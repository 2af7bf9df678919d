"""Runs over files of lines: what they write, and that a run which is cut off anywhere goes on with the same bytes."""

import json
import random
from functools import partial

import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from tests.runs.requests.line_files import ENDPOINT, cancelled_before, encoded, line, written
from trio_pool_serve.errors import EngineProcessDiedError
from trio_pool_serve.runs.requests.line_results import (
    LineComputer,
    LineResponse,
    Submitter,
    openai_results,
)
from trio_pool_serve.runs.requests.request_lines import (
    WINDOW_BYTES,
    WINDOW_LINES,
    WINDOW_VECTORS,
    decode_line,
    line_windows,
    read_window,
    request_id_of,
)
from trio_pool_serve.runs.run import Position, run_windows
from trio_pool_serve.runs.tables.output_table import ResultFiles, open_lines
from trio_pool_serve.threads.offload import Offload

MAX_LINE_BYTES = 100_000


class Server:
    """Responds to windows of lines with what they are; ``requests`` are the windows that it was asked for."""

    def __init__(self) -> None:
        self.requests: list[list[str]] = []

    async def respond_all(self, lines, submitter) -> list[LineResponse]:
        self.requests.append([each.request_id for each in lines])
        for _ in range(random.randrange(1, 6)):
            await trio.lowlevel.checkpoint()
        return [
            LineResponse(
                400 if b"bad" in each.body else 200,
                json.dumps({"id": each.request_id, "created": each.created, "got": json.loads(each.body)}).encode(),
                tokens=3,
            )
            for each in lines
        ]


class RunOfLines:
    def __init__(self, folder, content: bytes) -> None:
        self.folder = folder
        (folder / "input").write_bytes(content)
        self.server = Server()
        self.committed = [Position()]

    async def commit(self, position: Position) -> None:
        await trio.lowlevel.checkpoint()
        self.committed.append(position)

    async def go(self, **options) -> bool:
        """Run to the end; return whether it was reached."""
        position = await run_windows(
            self.committed[-1],
            windows=partial(line_windows, self.folder / "input", MAX_LINE_BYTES),
            computer=LineComputer(respond_all=self.server.respond_all, submitter=Submitter(), digest="d", created=7),
            open_sink=partial(
                ResultFiles.open,
                partial(open_lines, self.folder / "output"),
                self.folder / "errors",
                openai_results,
            ),
            commit=self.commit,
            offload=Offload(),
            should_pause=lambda: False,
            **options,
        )
        return position.is_finished

    @property
    def written(self) -> tuple[bytes, bytes]:
        return (self.folder / "output").read_bytes(), (self.folder / "errors").read_bytes()


@pytest.fixture
def content() -> bytes:
    lines = [
        line(
            number,
            url=ENDPOINT if number < 1200 else "/pooling",
            input="bad" if number % 50 == 7 else "good " * (number % 40),
        )
        for number in range(1500)
    ]
    parts = encoded(lines).splitlines(keepends=True)
    parts[100] = b"{\n"
    parts[200] = b'{"custom_id": "long", "body": "' + b"x" * (2 * MAX_LINE_BYTES) + b'"}\n'
    parts[300] = b"\n"
    return b"".join(parts).removesuffix(b"\n")


@pytest.fixture
def run(tmp_path, content) -> RunOfLines:
    return RunOfLines(tmp_path, content)


async def test_lines_are_written_in_their_order(run):
    counts = []
    assert await run.go(on_progress=lambda position: counts.append(position.done))
    output, errors = ([json.loads(each) for each in data.splitlines()] for data in run.written)
    failed = sorted({100, 200} | set(range(7, 1500, 50)))
    assert [each["custom_id"] for each in output] == [
        f"row-{number}" for number in range(1500) if number not in {*failed, 300}
    ]
    assert [each["custom_id"] for each in errors] == [
        None if number in (100, 200) else f"row-{number}" for number in failed
    ]
    assert [each["error"]["code"] for each in errors if each["error"]] == ["invalid_json_line", "line_too_long"]
    end = run.committed[-1]
    assert counts == [position.done for position in run.committed[1:]]
    assert len(counts) == len(run.committed) - 1
    assert end == Position(
        line=1500,
        offset=(run.folder / "input").stat().st_size,
        output_bytes=len(run.written[0]),
        error_bytes=len(run.written[1]),
        completed=len(output),
        failed=len(errors),
        tokens=3 * (1500 - 3),
    )
    assert output[0]["response"]["request_id"] == output[0]["response"]["body"]["id"]
    assert output[0]["id"] == "batch_req_" + output[0]["response"]["request_id"]
    assert output[0]["response"]["body"]["created"] == 7


async def test_a_run_that_is_cut_off_at_each_of_its_steps_writes_the_same_bytes_and_the_same_windows(tmp_path, content):
    (tmp_path / "whole").mkdir()
    whole = RunOfLines(tmp_path / "whole", content)
    await whole.go()
    (tmp_path / "parts").mkdir()
    parts = RunOfLines(tmp_path / "parts", content)
    for steps in range(1, 400):
        with cancelled_before(steps) as scope:
            ended = await parts.go()
        if not scope.cancelled_caught:
            break
    assert ended
    assert steps > 10
    assert parts.written == whole.written
    assert parts.committed == whole.committed
    # No window had other lines than in the whole run, and none was computed after its commit.
    expected = {tuple(each) for each in whole.server.requests}
    assert {tuple(each) for each in parts.server.requests} == expected


async def test_a_line_with_which_the_engine_dies_fails_alone(tmp_path, autojump_clock):
    run = RunOfLines(tmp_path, encoded([line(number) for number in range(40)]))
    poisoned, respond_all = request_id_of("d", 1), run.server.respond_all

    async def die(lines, submitter):
        if any(each.request_id == poisoned for each in lines):
            await trio.lowlevel.checkpoint()
            raise EngineProcessDiedError("The engine process died; another one is being started.")
        return await respond_all(lines, submitter)

    run.server.respond_all = die
    assert await run.go()
    output, errors = ([json.loads(each) for each in part.splitlines()] for part in run.written)
    assert [each["custom_id"] for each in output] == [f"row-{number}" for number in range(40) if number != 1]
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("row-1", 500)]


# -- windows --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=700))
@example([1] * 700)
@example([0] * 700)
@example([2] * 30)
@example([3] * 30)
def test_windows_are_all_of_the_lines_and_bounded(kinds):
    import io

    makers = (
        lambda n: encoded([line(n)]),
        lambda n: b"\n",
        lambda n: encoded([line(n, input="x" * 30_000)]),
        lambda n: encoded([line(n, input=["x"] * 3000)]),
    )
    content = b"".join(makers[kind](number) for number, kind in enumerate(kinds))
    file = io.BytesIO(content)
    at, offset, seen = 0, 0, []
    while (window := read_window(file, at, offset, MAX_LINE_BYTES)) is not None:
        assert window == read_window(file, at, offset, MAX_LINE_BYTES)
        assert 0 < window.next_line - at <= WINDOW_LINES
        assert window.next_offset - offset < WINDOW_BYTES + MAX_LINE_BYTES
        assert sum(each.body.count(b'"x"') for each in window.rows) <= WINDOW_VECTORS + 3000
        seen += [each.number for each in window.rows]
        at, offset = window.next_line, window.next_offset
    assert seen == [number for number, kind in enumerate(kinds) if kind != 1]
    assert (at, offset) == (len(kinds), len(content))


@pytest.mark.parametrize("url", ["/pooling", "/embed_all/", "/v1/pooling", "/invocations", "/"])
def test_windows_of_vectors_of_tokens_are_bounded_by_their_lines_alone(tmp_path, url):
    """Each token has a vector, four bytes of a line are about one, and an image has a thousand."""
    text, image = "x" * 1000, "https://host/image.png"
    path = written(tmp_path / "a", [line(number, url=url, input=text) for number in range(100)])
    with path.open("rb") as file:
        vectors = read_window(file, 0, 0, MAX_LINE_BYTES).next_offset // 4
    assert WINDOW_VECTORS * 0.9 < vectors < WINDOW_VECTORS + 300
    written(path, [line(number, url=url, input=image) for number in range(100)])
    with path.open("rb") as file:
        assert read_window(file, 0, 0, MAX_LINE_BYTES).next_line == WINDOW_VECTORS // 1024
    written(path, [line(number, input=text) for number in range(100)])
    with path.open("rb") as file:
        assert read_window(file, 0, 0, MAX_LINE_BYTES).next_line == 100


def test_a_byte_order_mark_and_line_ends_of_windows_are_skipped(tmp_path):
    path = written(tmp_path / "a", [line(0), line(1)])
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    with path.open("rb") as file:
        window = read_window(file, 0, 0, MAX_LINE_BYTES)
    assert [each.custom_id for each in window.rows] == ["row-0", "row-1"]


@given(st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode)))
def test_any_bytes_are_a_line_or_refused(data):
    line = decode_line(3, data)
    assert line.error is not None or (line.custom_id and line.url and line.body)
