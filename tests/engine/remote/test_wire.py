from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from trio_pool_serve import errors
from trio_pool_serve.engine.remote.frames import MAX_PART_BYTES, Frame, ReceivedPart, received_parts
from trio_pool_serve.engine.remote.parts import FAILURES, answer_frames, read_answers, read_rows, row_frames
from trio_pool_serve.engine.remote.wire import Answers, BatchFacts, LonePrompt, Part, Rows, Submit
from trio_pool_serve.errors import (
    BatchFailedError,
    EngineDeadError,
    MethodNotAllowedError,
    OverloadedError,
    PoolServeError,
    UnsendableError,
)
from trio_pool_serve.types import (
    Adapter,
    Classify,
    Embed,
    EmbedChunks,
    ImageFeatures,
    MaxSim,
    PooledValue,
    PoolingOutput,
    PoolingParams,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseLookup,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)

pytestmark = pytest.mark.unit


def sent(frame: Frame, kind: type) -> list[ReceivedPart]:
    """Send a frame's parts through the wire's bytes."""
    message = Submit(frame.parts, BatchFacts(1, 1)) if kind is Submit else Answers(frame.parts, [], 2048)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)
    return list(received_parts(decoded.parts, memoryview(bytearray(b"".join(frame.buffers)))))


def read(frame: Frame) -> dict[int, PoolingRequest]:
    """Return a frame's rows, as they arrive, by number."""
    parts = [(part.ids, read_rows(part)) for part in sent(frame, Submit)]
    return {number: row for ids, rows in parts for number, row in zip(ids, rows, strict=True)}


def through(requests: list[PoolingRequest]) -> list[PoolingRequest]:
    """Send rows through the wire's bytes."""
    arrived = [each for frame in row_frames(enumerate(requests), pytest.fail) for each in read(frame).items()]
    assert [number for number, _ in arrived] == list(range(len(requests)))
    return [row for _, row in arrived]


def refused(*requests: PoolingRequest) -> tuple[list[int], dict[int, UnsendableError]]:
    """Send rows; return the numbers of those that arrive, and the errors of the others."""
    errors: dict[int, UnsendableError] = {}
    frames = list(row_frames(enumerate(requests), errors.__setitem__))
    return [number for frame in frames for number in read(frame)], errors


def outcomes_of(part: ReceivedPart) -> dict[int, PoolingOutput | PoolServeError]:
    """Return the outcomes of a part's rows by number."""
    try:
        answer, rows = read_answers(part)
    except PoolServeError as error:
        return dict.fromkeys(part.ids, error)
    times = answer.queue_s, answer.forward_s, answer.copy_s
    return dict(zip(part.ids, [PoolingOutput(row, *times) for row in rows], strict=True))


def types_of(parts: Sequence[Part], frame_payload: memoryview) -> dict[int, type]:
    """Return of which type the outcome of each row of a frame is."""
    arrived = [outcomes_of(part) for part in received_parts(parts, frame_payload)]
    return {number: type(outcome) for outcomes in arrived for number, outcome in outcomes.items()}


def answers_of(frame: Frame) -> dict[int, PoolingOutput | PoolServeError]:
    """Return a frame's outcomes, as they arrive, by number."""
    return {number: outcome for part in sent(frame, Answers) for number, outcome in outcomes_of(part).items()}


def back(*outcomes: PoolingOutput | Exception) -> list[PoolingOutput | PoolServeError]:
    """Send what became of rows through the wire's bytes."""
    found = dict(each for frame in answer_frames([[*enumerate(outcomes)]]) for each in answers_of(frame).items())
    assert sorted(found) == list(range(len(outcomes)))
    return [found[number] for number in range(len(outcomes))]


def output(*values: PooledValue) -> PoolingOutput:
    return PoolingOutput(values, 0.1, 0.2, 0.3)


def assert_same(ours: PoolingRequest, theirs: PoolingRequest) -> None:
    assert (ours.params, ours.adapter) == (theirs.params, theirs.adapter)
    for name in ("instruction_tokens", "attended"):
        assert getattr(ours.prompt, name) == getattr(theirs.prompt, name)
    for name in ("token_ids", "type_ids", "kept", "embeds", "chunks"):
        assert_same_array(getattr(ours.prompt, name), getattr(theirs.prompt, name))
    assert (ours.prompt.images is None) == (theirs.prompt.images is None)
    if ours.prompt.images is not None:
        assert ours.prompt.images.tokens == theirs.prompt.images.tokens
        assert list(ours.prompt.images.arrays) == list(theirs.prompt.images.arrays)
        for name, array in ours.prompt.images.arrays.items():
            assert_same_array(array, theirs.prompt.images.arrays[name])


def assert_same_array(ours: np.ndarray | None, theirs: np.ndarray | None) -> None:
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


PARAMS = st.sampled_from(
    [
        Embed(),
        Embed(dimensions=3, normalize=False),
        EmbedChunks(dimensions=2),
        TokenEmbed(normalize=True),
        SparseEmbed(),
        SparseLookup(),
        Classify("raw"),
        TokenClassify("score"),
    ]
)
IDS = hnp.arrays(np.int32, st.integers(1, 20), elements=st.integers(0, 2**31 - 1))


@st.composite
def requests(draw: st.DrawFn) -> PoolingRequest:
    ids = draw(IDS)
    images = None
    if draw(st.booleans()):
        pixels = draw(hnp.arrays(np.float32, hnp.array_shapes(max_side=4), elements=st.floats(width=32)))
        images = ImageFeatures({"pixel_values": pixels, "grid": np.array([[1, 2, 3]])}, tokens=(len(ids),))
    prompt = RenderedPrompt(
        ids,
        draw(st.integers(0, len(ids))),
        type_ids=draw(st.none() | st.just(np.ones(len(ids), dtype=np.int32))),
        attended=draw(st.none() | st.integers(0, len(ids))),
        kept=draw(st.none() | hnp.arrays(np.bool_, len(ids))),
        embeds=draw(st.none() | hnp.arrays(st.sampled_from([np.float32, np.float16, np.uint16]), (len(ids), 2))),
        images=images,
        chunks=draw(st.none() | st.just(np.array([[0, len(ids)], [len(ids) - 1, len(ids)]], dtype=np.int32))),
    )
    params = tuple(draw(st.lists(PARAMS, min_size=1, max_size=3)))
    return PoolingRequest(
        prompt, params, adapter=draw(st.none() | st.builds(Adapter, st.just("/a"), st.sampled_from("xy")))
    )


@st.composite
def some_alike(draw: st.DrawFn) -> list[PoolingRequest]:
    """Requests of which some neighbours have the same params, and arrays of the same kinds."""
    found: list[PoolingRequest] = []
    for like in draw(st.lists(requests(), max_size=4)):
        for ids in draw(st.lists(IDS, min_size=1, max_size=3)):
            prompt = replace(
                like.prompt,
                token_ids=ids,
                instruction_tokens=min(like.prompt.instruction_tokens, len(ids)),
                attended=None if like.prompt.attended is None else min(like.prompt.attended, len(ids)),
                embeds=None if like.prompt.embeds is None else np.zeros((len(ids), 2), like.prompt.embeds.dtype),
                type_ids=None if like.prompt.type_ids is None else np.arange(len(ids), dtype=np.int32),
                kept=None if like.prompt.kept is None else ids % 2 == 0,
                chunks=None if like.prompt.chunks is None else np.array([[0, len(ids)]], dtype=np.int32),
            )
            found.append(replace(like, prompt=prompt))
    return found


@given(some_alike())
def test_rows_arrive_as_they_were_sent(asked):
    for ours, theirs in zip(asked, through(asked), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "said",
    [
        {"instruction_tokens": -1},
        {"instruction_tokens": 3},
        {"attended": -1},
        {"attended": 3},
        {"embeds": np.zeros((5, 4), np.float32)},
        {"embeds": np.zeros(2, np.float32)},
        {"chunks": np.array([[0, 3]], np.int32)},
        {"chunks": np.array([[-1, 1]], np.int32)},
        {"chunks": np.array([[0, 2], [1, 1]], np.int32)},
        {"chunks": np.array([[2, 1]], np.int32)},
        {"chunks": np.array([[0, 1, 2]], np.int32)},
        {"chunks": np.zeros((0, 2), np.int32)},
        {"chunks": np.array([0, 2], np.int32)},
        {"chunks": np.array([[0, 1]], np.int64)},
    ],
)
def test_a_row_of_which_more_is_said_than_it_has_is_refused(said):
    """On a GPU such numbers would be addresses of other rows."""
    prompt = RenderedPrompt(np.array([1, 2], dtype=np.int32), **said)
    (frame,) = row_frames([(0, PoolingRequest(prompt))], pytest.fail)
    (part,) = sent(frame, Submit)
    with pytest.raises(UnsendableError, match="cannot read an input"):
        read_rows(part)


def test_arrays_that_do_not_lie_together_arrive_as_they_are():
    ids = np.arange(20, dtype=np.int32)[::2]
    embeds = np.arange(40, dtype=np.float32).reshape(4, 10).T
    assert len(ids) == len(embeds)
    (arrived,) = through([PoolingRequest(RenderedPrompt(ids, embeds=embeds))])
    np.testing.assert_array_equal(arrived.prompt.token_ids, ids)
    np.testing.assert_array_equal(arrived.prompt.embeds, embeds)


def test_queries_of_any_length_arrive_with_the_rows_that_are_scored_against_them():
    queries = [np.random.default_rng(0).random((tokens, 128), np.float32) for tokens in (32, 8192, 0)]
    assert queries[1].nbytes > MAX_PART_BYTES
    first, long, empty = [(MaxSim(query),) for query in queries]
    equal = (MaxSim(queries[0].copy()),)
    rows = [PoolingRequest(ROW, params) for params in (first, first, equal, long, empty, (Embed(), *first), first)]
    frames = list(row_frames(enumerate(rows), pytest.fail))
    assert [part.ids for frame in frames for part in frame.parts] == [[0, 1, 2], [3], [4], [5], [6]]
    for ours, theirs in zip(rows, through(rows), strict=True):
        assert_same(ours, theirs)
        assert_same_array(ours.params[-1].query, theirs.params[-1].query)


def test_values_of_other_types_arrive_as_float32():
    (arrived,) = back(output(np.array([0.5, 2], dtype=np.float64)))
    assert_same_array(np.array([0.5, 2], dtype=np.float32), arrived.values[0])


# -- errors ----------------------------------------------------------------------------------------------


def test_every_error_that_is_made_of_a_message_arrives_as_what_it_was():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PoolServeError)]
    assert {*kinds} - {*FAILURES.values()} == {OverloadedError, MethodNotAllowedError, errors.MissingFieldError}
    for kind in FAILURES.values():
        (error,) = back(kind("why"))
        assert (type(error), str(error)) == (kind, "why")


def test_other_errors_arrive_as_the_nearest_that_is_known_or_as_a_failed_batch():
    class EngineLostError(EngineDeadError):
        pass

    found = back(EngineLostError("gone"), ZeroDivisionError("oops"))
    assert [type(error) for error in found] == [EngineDeadError, BatchFailedError]


def test_what_an_error_says_is_bounded_and_can_be_encoded():
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no message")

    bad, long, unreadable, good = back(
        ValueError("a\ud800b"), ValueError("ä" * 2**20), UnreadableError(), output(np.ones(3, dtype=np.float32))
    )
    assert str(bad) == "a?b"
    assert len(str(long)) == 4000
    assert type(unreadable) is BatchFailedError
    assert type(good) is PoolingOutput


# -- params ----------------------------------------------------------------------------------------------

ROW = RenderedPrompt(np.ones(2, dtype=np.int32))


@frozen
class Threshold:
    least: float
    most: float | None = None


@frozen
class Spans(PoolingParams):
    """Params that the package does not know."""

    threshold: Threshold
    names: tuple[str, ...] = ()


@frozen
class Anything(PoolingParams):
    value: object = None


def test_params_that_are_defined_elsewhere_arrive_as_they_were_sent():
    params = (Spans(Threshold(0.5), ("a", "b")), Embed(), Spans(Threshold(1.0, 2.0)))
    (arrived,) = through([PoolingRequest(ROW, params)])
    assert arrived.params == params


def typed(*lengths: int) -> list[RenderedPrompt]:
    """Return rows of two tokens with this number of type ids each."""
    return [RenderedPrompt(ROW.token_ids, type_ids=np.ones(length, np.int32)) for length in lengths]


UNSENDABLE_PARAMS = {
    "an integer of 65 bits": Embed(dimensions=2**64),
    "a lone surrogate": Anything("\ud800"),
    "an object": Anything(object()),
    "a set in itself": Anything({1: {2: object}}),
    "too long": Anything("a" * MAX_PART_BYTES),
    "no params at all": "embed",
}

UNSENDABLE = {
    **{name: (PoolingRequest(ROW), PoolingRequest(ROW, (wrong,))) for name, wrong in UNSENDABLE_PARAMS.items()},
    **{
        name: (PoolingRequest(good), PoolingRequest(wrong))
        for name, good, wrong in (
            ("objects", ROW, RenderedPrompt(ROW.token_ids, embeds=np.array([{}, {}]))),
            ("broken ids", ROW, RenderedPrompt(np.array([0.5, 1.5]))),
            ("a matrix", ROW, RenderedPrompt(np.ones((2, 2), dtype=np.int32))),
            ("too few type ids", *typed(2, 1)),
            ("numbers for bools", *[RenderedPrompt(ROW.token_ids, kept=np.ones(2, kind)) for kind in (bool, np.int32)]),
        )
    },
}


@pytest.mark.parametrize(("good", "wrong"), UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_row_that_cannot_be_sent_is_refused_alone_among_rows_like_it(good, wrong):
    """They would have been sent as one array, and it leaves nothing in the frame."""
    arrived, errors = refused(good, wrong, good)
    assert arrived == [0, 2]
    assert [(number, "cannot be sent" in str(error)) for number, error in errors.items()] == [(1, True)]


def test_arrays_of_another_length_than_their_row_are_refused_even_if_their_sum_is_right():
    arrived, errors = refused(*map(PoolingRequest, typed(1, 3)))
    assert (arrived, list(errors)) == ([], [0, 1])


def test_ids_of_another_integer_type_arrive_as_int32():
    params = (Embed(),)
    ids = [np.array([1, 2], dtype=dtype) for dtype in (np.int32, np.int64, np.int16)]
    for arrived in through([PoolingRequest(RenderedPrompt(each), params) for each in ids]):
        assert_same_array(np.array([1, 2], dtype=np.int32), arrived.prompt.token_ids)


def test_what_rows_have_in_common_is_sent_once_and_their_place_in_the_queue_stays_behind():
    params = (Spans(Threshold(0.5), ("a" * 1000,)),)
    rows = [PoolingRequest(ROW, params, index % 2, index, 5, 6 - index, 1e9, index) for index in range(100)]
    (frame,) = row_frames(enumerate(rows), pytest.fail)
    (part,) = frame.parts
    assert part.ids == list(range(100))
    assert len(frame.buffers) == 1
    assert len(part.content) < 2 * 1000
    for ours, theirs in zip(rows, read(frame).values(), strict=True):
        assert_same(ours, theirs)
        assert (theirs.priority, theirs.group, theirs.client, theirs.rank, theirs.planned) == (0, 0, 0, 0, None)


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def alike(lengths: list[int], params: list[Any], tokens: int | None = None, **changes: Any) -> Rows:
    """Return rows of ``tokens`` tokens in all, by default as many as are said of them, as they are sent."""
    ids = np.ones(sum(lengths) if tokens is None else tokens, np.int32)
    return replace(Rows(lengths, [0], [None], ids, None, None, None, 0, None, params), **changes)


HUGE = ["<i4", [2**62]]
"""The header of an array of more bytes than any payload has."""

UNREADABLE = {
    "unknown params": alike([2], [("os:system", {"command": "true"})]),
    "a class that is not params": alike([2], [(name_of(Threshold), {"least": 1})]),
    "the base of params": alike([2], [(name_of(PoolingParams), {})]),
    "a field of another type": alike([2], [(Embed.wire_name, {"dimensions": "many"})]),
    "no fields": alike([2], [(Spans.wire_name, {})]),
    "no map": alike([2], [(Embed.wire_name, 5)]),
    "a query of no array": alike([2], [(MaxSim.wire_name, {"query": [{}, {}]})]),
    "a query of half an array": alike([2], [(MaxSim.wire_name, {"query": ["<f4"]})]),
    "a query of more bytes": alike([2], [(MaxSim.wire_name, {"query": ["<f4", [8192, 128]]})]),
    "more tokens than ids": alike([3], [], 2),
    "fewer tokens than ids": alike([2], [], 3),
    "ids of more bytes": [[2**62], [0], [None], HUGE, None, None, None, None, []],
    "ids of another type": alike([2], [], token_ids=np.ones(2, np.int64)),
    "a matrix of ids": alike([2], [], token_ids=np.ones((2, 2), np.int32)),
    "no ids": alike([2], [], token_ids=None),
    "fewer than no tokens": alike([-1], [], 2),
    "no tokens": alike([0], []),
    "more rows than numbers": alike([1, 1], []),
    "fewer rows than numbers": alike([], []),
    "more type ids than tokens": alike([2], [], type_ids=np.ones(3, np.int32)),
    "type ids of more bytes": [[2], [0], [None], ["<i4", [2]], HUGE, None, None, None, []],
    "type ids of another type": alike([2], [], type_ids=np.ones(2, np.float32)),
    "numbers in place of what is kept": alike([2], [], kept=np.ones(2, np.int32)),
    "an adapter without a digest": alike([2], [], adapter=("/a", "")),
    "an adapter of a long path": alike([2], [], adapter=("/" * 5000, "a")),
    "two instructions of one row": alike([2], [], instruction_tokens=[0, 0]),
    "no instruction": alike([2], [], instruction_tokens=[]),
    "no row": [5],
    "not even an array": {"a": 1},
}


@pytest.mark.parametrize("wrong", UNREADABLE.values(), ids=UNREADABLE)
def test_a_row_that_cannot_be_read_fails_alone(wrong):
    good = PoolingRequest(ROW)
    (frame,) = row_frames([(1, good)], pytest.fail)
    (last,) = row_frames([(3, good)], pytest.fail)
    frame.add([2], wrong)
    frame.parts += last.parts
    frame.buffers += last.buffers
    first, second, third = sent(frame, Submit)
    with pytest.raises(UnsendableError, match="cannot read"):
        read_rows(second)
    for part in (first, third):
        assert_same(good, *read_rows(part))


def test_a_part_that_is_larger_than_any_that_is_sent_is_not_read():
    content = msgspec.msgpack.encode([[1], [0], [None], None, None, None, None, None, [["x" * 40_000, {}]]])
    with pytest.raises(UnsendableError, match="are too many"):
        read_rows(ReceivedPart(content, memoryview(b""), [7]))


def test_arrays_of_one_row_do_not_come_with_several():
    frame = Frame()
    frame.add([1, 2], alike([1, 1], [], lone=LonePrompt(np.ones((1, 1), np.float32), None, None)))
    with pytest.raises(UnsendableError, match="alone"):
        read(frame)


UNSENDABLE_VALUES = {
    "no array": "text",
    "objects": np.array([{}, {}, {}]),
    "text": np.array(["a", "b", "c"]),
    "complex numbers": np.ones(3, dtype=np.complex64),
    "no axis": np.float32(1),
    "nothing": None,
    "no values": PoolingOutput(None, 0.1, 0.2, 0.3),
    "a number of values": PoolingOutput(5, 0.1, 0.2, 0.3),
    "a sparse vector of numbers": SparseVector(3, 3.0),
    "a sparse matrix": SparseVector(np.ones((3, 2), dtype=np.int32), np.ones(3, dtype=np.float32)),
    "half a sparse vector": SparseVector(np.ones(3, dtype=np.int32), np.ones(2, dtype=np.float32)),
    "a sparse vector of texts": SparseVector(np.array(["a"]), np.ones(1, dtype=np.float32)),
}


@pytest.mark.parametrize("wrong", UNSENDABLE_VALUES.values(), ids=UNSENDABLE_VALUES)
def test_an_answer_that_cannot_be_sent_fails_alone_among_those_like_it(wrong):
    good: PooledValue = np.ones(3, dtype=np.float32)
    if isinstance(wrong, SparseVector):
        good = SparseVector(np.ones(3, dtype=np.int32), np.ones(3, dtype=np.float32))
    wrong = wrong if isinstance(wrong, PoolingOutput) else output(wrong)
    first, failed, last = back(output(good), wrong, output(good))
    assert type(failed) is UnsendableError
    assert type(first) is type(last) is PoolingOutput


@st.composite
def values(draw: st.DrawFn) -> PooledValue:
    if draw(st.booleans()):
        length = draw(st.integers(0, 4))
        return SparseVector(draw(hnp.arrays(np.int32, length)), draw(hnp.arrays(np.float32, length)))
    return draw(hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, min_side=0, max_side=3)))


@given(st.lists(st.lists(values(), max_size=3), max_size=8))
def test_outputs_of_any_kinds_in_any_order_arrive_as_they_were_sent(outputs):
    for ours, theirs in zip(outputs, back(*[output(*row) for row in outputs]), strict=True):
        assert (theirs.queue_s, theirs.forward_s, theirs.copy_s) == (0.1, 0.2, 0.3)
        assert len(ours) == len(theirs.values)
        for value, arrived in zip(ours, theirs.values, strict=True):
            assert type(value) is type(arrived)
            if isinstance(value, SparseVector):
                assert_same_array(value.indices, arrived.indices)
                assert_same_array(value.values, arrived.values)
            else:
                assert value.shape == arrived.shape
                assert_same_array(value, arrived)


def test_vectors_of_one_batch_arrive_as_rows_of_one_matrix():
    matrix = np.random.default_rng(0).random((50, 8), dtype=np.float32)
    outputs = [output(row[:5]) for row in matrix]
    (frame,) = answer_frames([[*enumerate(outputs)]])
    assert len(frame.parts) == len(frame.buffers) == 1
    arrived = answers_of(frame)
    np.testing.assert_array_equal(np.stack([arrived[index].values[0] for index in range(50)]), matrix[:, :5])


WRONG_VALUES = {
    "too many": [[4], ["<f4", [3]]],
    "more than there are bytes": [[4], ["<f4", [4]]],
    "very many": [[2**62], ["<f4", [2**62]]],
    "very many of very many": [[2**40], ["<f4", [2**40, 2**40]]],
    "fewer than none": [[-1], ["<f4", [-1]]],
    "fewer than none of some": [[2], ["<f4", [2, -3]]],
    "no axis": [[1], ["<f4", []]],
    "another type": [[3], ["<i4", [3]]],
    "a sparse vector of half the bytes": [[3], ["<f4", [3]], ["<i4", [3]]],
    "a sparse vector of pairs": [[1], ["<f4", [1]], ["<i4", [1, 2]]],
    "a sparse vector that is very long": [[2**62], ["<f4", [1]], ["<i4", [2**62]]],
    "values of no row": [[], ["<f4", [0]]],
    "values of two rows": [[1, 2], ["<f4", [3]]],
}


@pytest.mark.parametrize("wrong", WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_an_answer_of_a_shape_that_is_not_there_is_an_error(wrong):
    (frame,) = answer_frames([[(1, output(np.ones(3, dtype=np.float32)))]])
    (part,) = sent(frame, Answers)
    content = msgspec.msgpack.encode([0.0, 0.0, 0.0, [wrong]])
    with pytest.raises(UnsendableError):
        read_answers(ReceivedPart(content, part.payload, [1]))


@pytest.mark.parametrize("kind", ["|O", "<U4", "|V4", "|S4", "<M8[s]", "i4,O", "nonsense"])
def test_arrays_of_a_payload_hold_numbers(kind):
    with pytest.raises((ValueError, TypeError)):
        ReceivedPart(msgspec.msgpack.encode([kind, (1,)]), memoryview(bytearray(64)), [1]).decode(np.ndarray)


def rows_of(frames: Iterable[Frame]) -> list[list[int]]:
    """Return the numbers of rows of the parts of frames."""
    return [[len(part.ids) for part in frame.parts] for frame in frames]


def test_a_part_is_no_larger_than_a_full_frame(monkeypatch):
    monkeypatch.setattr("trio_pool_serve.engine.remote.frames.FULL_FRAME_BYTES", 100)
    prompt, params = RenderedPrompt(np.ones(5, dtype=np.int32)), (Embed(),)
    rows = [PoolingRequest(prompt, params) for _ in range(12)]
    assert rows_of(row_frames(enumerate(rows), pytest.fail)) == [[3, 3], [3, 3]]
    apart = [PoolingRequest(prompt, (Embed(index),)) for index in range(12)]
    assert rows_of(row_frames(enumerate(apart), pytest.fail)) == [[1] * 5, [1] * 5, [1] * 2]
    vectors = [[*enumerate([output(np.ones(10, dtype=np.float32))] * 5)]]
    assert rows_of(answer_frames(vectors)) == [[2, 1], [2]]
    sparse = SparseVector(np.ones(5, dtype=np.int32), np.ones(5, dtype=np.float32))
    assert rows_of(answer_frames([[*enumerate([output(sparse)] * 5)]])) == [[2, 1], [2]]
    large = [[*enumerate([output(np.ones(100, dtype=np.float32))] * 2)]]
    assert rows_of(answer_frames(large)) == [[1], [1]]


def test_a_frame_has_at_most_1024_rows():
    params = (Embed(),)
    rows = [PoolingRequest(ROW, params) for _ in range(2500)]
    assert rows_of(row_frames(enumerate(rows), pytest.fail)) == [[1024], [1024], [452]]
    failed = [[(number, ValueError("a" * 2**20))] for number in range(1030)]
    assert rows_of(answer_frames(failed)) == [[1] * 1024, [1] * 6]


def test_one_guilty_row_of_many_costs_few_parts():
    good, bad = output(np.ones(3, dtype=np.float32)), output(np.array([{}, {}, {}]))
    frames = list(answer_frames([[*enumerate([good] * 300 + [bad] + [good] * 300)]]))
    assert sum(len(frame.parts) for frame in frames) <= 2 * 10 + 1
    outcomes = back(*[good] * 300, bad, *[good] * 300)
    assert [index for index, outcome in enumerate(outcomes) if isinstance(outcome, UnsendableError)] == [300]
