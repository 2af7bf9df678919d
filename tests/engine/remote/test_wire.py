import msgspec
import numpy as np
import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_pool_serve import errors
from trio_pool_serve.engine.compute_rates import UNKNOWN
from trio_pool_serve.engine.remote.arrays import Payload
from trio_pool_serve.engine.remote.wire import (
    FAILURES,
    MAX_PART_BYTES,
    Answers,
    Frame,
    Part,
    RemoteScope,
    Row,
    Scopes,
    Submit,
    add_answer,
    add_row,
    parts_of,
    read_answer,
    read_row,
)
from trio_pool_serve.errors import (
    BatchFailedError,
    MethodNotAllowedError,
    OverloadedError,
    PoolServeError,
    QueryGoneError,
    UnsendableError,
)
from trio_pool_serve.types import (
    Classify,
    Embed,
    HeldQuery,
    HoldQuery,
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


class Scope:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def sent(frame: Frame, kind: type) -> list[tuple[Part, Payload]]:
    """Send a frame's parts through the wire's bytes."""
    message = Submit(frame.parts) if kind is Submit else Answers(frame.parts, 0, 0.0, UNKNOWN.tobytes())
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)
    return list(parts_of(decoded.rows, memoryview(bytearray(b"".join(frame.buffers)))))


def through(requests: list[PoolingRequest], scopes: Scopes | None = None) -> list[PoolingRequest]:
    """Send rows through the wire's bytes."""
    frame = Frame()
    for number, request in enumerate(requests, start=7):
        add_row(frame, number, request)
    parts = sent(frame, Submit)
    assert [part.id for part, _ in parts] == list(range(7, 7 + len(requests)))
    return [read_row(part, payload, scopes or Scopes(Scope)) for part, payload in parts]


def back(*outcomes: PoolingOutput | Exception) -> list[PoolingOutput | PoolServeError]:
    """Send what became of rows through the wire's bytes."""
    frame = Frame()
    for number, outcome in enumerate(outcomes):
        add_answer(frame, number, outcome)
    return [read_answer(part, payload) for part, payload in sent(frame, Answers)]


def output(*values: PooledValue) -> PoolingOutput:
    return PoolingOutput(values, 0.1, 0.2, 0.3)


def assert_same(ours: PoolingRequest, theirs: PoolingRequest) -> None:
    assert (ours.params, ours.priority, ours.group) == (theirs.params, theirs.priority, theirs.group)
    for name in ("instruction_tokens", "attended"):
        assert getattr(ours.prompt, name) == getattr(theirs.prompt, name)
    for name in ("token_ids", "type_ids", "kept", "embeds"):
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
        draw(st.integers(0, 3)),
        type_ids=draw(st.none() | st.just(np.ones(len(ids), dtype=np.int32))),
        attended=draw(st.none() | st.integers(1, 20)),
        kept=draw(st.none() | hnp.arrays(np.bool_, len(ids))),
        embeds=draw(st.none() | hnp.arrays(st.sampled_from([np.float32, np.float16, np.uint16]), (len(ids), 2))),
        images=images,
    )
    params = tuple(draw(st.lists(PARAMS, min_size=1, max_size=3)))
    return PoolingRequest(prompt, params, draw(st.integers(-5, 5)), draw(st.integers(0, 2**62)))


@given(st.lists(requests(), max_size=5))
def test_rows_arrive_as_they_were_sent(asked):
    for ours, theirs in zip(asked, through(asked), strict=True):
        assert_same(ours, theirs)


def test_arrays_that_do_not_lie_together_arrive_as_they_are():
    ids = np.arange(20, dtype=np.int32)[::2]
    embeds = np.arange(40, dtype=np.float32).reshape(4, 10).T
    (arrived,) = through([PoolingRequest(RenderedPrompt(ids, embeds=embeds))])
    np.testing.assert_array_equal(arrived.prompt.token_ids, ids)
    np.testing.assert_array_equal(arrived.prompt.embeds, embeds)


def test_queries_are_the_same_ones_at_the_other_end():
    opened: list[Scope] = []

    def open_scope() -> Scope:
        opened.append(Scope())
        return opened[-1]

    scopes = Scopes(open_scope)
    closed = []
    ours, others = RemoteScope(1, closed.append), RemoteScope(2, closed.append)
    first, second, third = HeldQuery(ours), HeldQuery(ours), HeldQuery(others)
    prompt = RenderedPrompt(np.ones(1, dtype=np.int32))
    params = [(HoldQuery(first),), (HoldQuery(second),), (HoldQuery(third),), (MaxSim(second), Embed())]
    arrived = [request.params for request in through([PoolingRequest(prompt, each) for each in params], scopes)]
    held = [each[0].query for each in arrived]
    assert held[3] is held[1]
    assert len({*held}) == 3
    assert [query.scope for query in held[:3]] == [opened[0], opened[0], opened[1]]
    scopes.close(1)
    assert [scope.closed for scope in opened] == [1, 0]
    scopes.close_all()
    assert [scope.closed for scope in opened] == [1, 1]
    ours.close()
    assert closed == [ours]


@pytest.mark.parametrize("shape", [(0,), (4,), (3, 2), (0, 5)])
def test_values_arrive_as_they_were_sent(shape):
    value = np.random.default_rng(0).random(shape, dtype=np.float32)
    (arrived,) = back(output(value))
    assert_same_array(value, arrived.values[0])
    assert (arrived.queue_s, arrived.forward_s, arrived.copy_s) == (0.1, 0.2, 0.3)


@pytest.mark.parametrize("length", [0, 3])
def test_sparse_values_arrive_as_they_were_sent(length):
    value = SparseVector(np.arange(length, dtype=np.int32), np.ones(length, dtype=np.float32))
    (arrived,) = back(output(value))
    assert_same_array(value.indices, arrived.values[0].indices)
    assert_same_array(value.values, arrived.values[0].values)


def test_values_of_other_types_arrive_as_float32():
    (arrived,) = back(output(np.array([0.5, 2], dtype=np.float64)))
    assert_same_array(np.array([0.5, 2], dtype=np.float32), arrived.values[0])


# -- errors ----------------------------------------------------------------------------------------------


def test_every_error_that_is_made_of_a_message_arrives_as_what_it_was():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PoolServeError)]
    assert {*kinds} - {*FAILURES.values()} == {OverloadedError, MethodNotAllowedError}
    for kind in FAILURES.values():
        (error,) = back(kind("why"))
        assert (type(error), str(error)) == (kind, "why")


def test_other_errors_arrive_as_the_nearest_that_is_known_or_as_a_failed_batch():
    class QueryLostError(QueryGoneError):
        pass

    found = back(QueryLostError("gone"), ZeroDivisionError("oops"))
    assert [type(error) for error in found] == [QueryGoneError, BatchFailedError]


def test_what_an_error_says_is_bounded_and_can_be_encoded():
    bad, long = back(ValueError("a\ud800b"), ValueError("ä" * 2**20))
    assert str(bad) == "a?b"
    assert len(str(long)) == 4000


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


UNSENDABLE = {
    "an integer of 65 bits": Embed(dimensions=2**64),
    "a lone surrogate": Anything("\ud800"),
    "an object": Anything(Scope()),
    "an array": Anything(np.ones(2)),
    "a set in itself": Anything({1: {2: object}}),
    "a query of another engine": HoldQuery(HeldQuery(Scope())),
    "too long": Anything("a" * MAX_PART_BYTES),
    "no params at all": "embed",
}


@pytest.mark.parametrize("wrong", UNSENDABLE.values(), ids=UNSENDABLE)
def test_a_row_that_cannot_be_sent_is_refused_and_leaves_nothing_in_the_frame(wrong):
    frame = Frame()
    add_row(frame, 1, PoolingRequest(ROW))
    with pytest.raises(UnsendableError, match="cannot be sent"):
        add_row(frame, 2, PoolingRequest(ROW, (wrong,)))
    add_row(frame, 3, PoolingRequest(ROW))
    parts = sent(frame, Submit)
    assert [part.id for part, _ in parts] == [1, 3]
    for part, payload in parts:
        assert_same(PoolingRequest(ROW), read_row(part, payload, Scopes(Scope)))


def test_a_prompt_that_cannot_be_sent_is_refused():
    with pytest.raises(UnsendableError):
        add_row(Frame(), 1, PoolingRequest(RenderedPrompt(ROW.token_ids, embeds=[1.0])))
    with pytest.raises(UnsendableError):
        add_row(Frame(), 1, PoolingRequest(ROW, priority=2**64))


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


UNREADABLE = {
    "unknown params": Row(2, [("os:system", {"command": "true"})]),
    "a class that is not params": Row(2, [(name_of(Threshold), {"least": 1})]),
    "the base of params": Row(2, [(name_of(PoolingParams), {})]),
    "a field of another type": Row(2, [(Embed.wire_name, {"dimensions": "many"})]),
    "no fields": Row(2, [(Spans.wire_name, {})]),
    "no map": Row(2, [(Embed.wire_name, 5)]),
    "a query of no numbers": Row(2, [(MaxSim.wire_name, {"query": [{}, {}]})]),
    "a query of one number": Row(2, [(MaxSim.wire_name, {"query": [1]})]),
    "more tokens than bytes": Row(3, []),
    "fewer than no tokens": Row(-1, []),
    "very many tokens": Row(2**62, []),
    "no row": [5],
    "not even an array": {"a": 1},
}


@pytest.mark.parametrize("wrong", UNREADABLE.values(), ids=UNREADABLE)
def test_a_row_that_cannot_be_read_fails_alone(wrong):
    good, ids = PoolingRequest(ROW), ROW.token_ids.tobytes()
    frame = Frame()
    add_row(frame, 1, good)
    frame.add(2, wrong, [ids])
    add_row(frame, 3, good)
    first, second, third = sent(frame, Submit)
    with pytest.raises(UnsendableError, match="cannot read"):
        read_row(*second, Scopes(Scope))
    for part in (first, third):
        assert_same(good, read_row(*part, Scopes(Scope)))


def test_an_answer_that_cannot_be_sent_or_read_fails_alone():
    good = output(np.ones(3, dtype=np.float32))
    first, text, mixed, last = back(good, output("no array"), output(np.array([{}])), good)
    for answer in (first, last):
        assert_same_array(good.values[0], answer.values[0])
    assert type(text) is type(mixed) is UnsendableError


@pytest.mark.parametrize("shape", [(4,), (2**40, 2**40), (2, -3), (-1,), (-1, 2**62), (-1, -1)], ids=str)
def test_an_answer_of_a_shape_that_is_not_there_is_an_error(shape):
    frame = Frame()
    add_answer(frame, 1, output(np.ones(3, dtype=np.float32)))
    ((part, payload),) = sent(frame, Answers)
    content = ["Answer", 0.0, 0.0, 0.0, [shape]]
    assert type(read_answer(Part(1, part.nbytes, msgspec.msgpack.encode(content)), payload)) is UnsendableError


@pytest.mark.parametrize("kind", ["|O", "<U4", "|V4", "|S4", "<M8[s]", "i4,O", "nonsense"])
def test_arrays_of_a_payload_hold_numbers(kind):
    with pytest.raises((ValueError, TypeError)):
        Payload(memoryview(bytearray(64))).take((kind, (1,)))


def test_a_frame_is_full_before_it_is_too_large(monkeypatch):
    monkeypatch.setattr("trio_pool_serve.engine.remote.wire.FULL_FRAME_BYTES", 100)
    frame, added = Frame(), 0
    while not frame.is_full:
        add_row(frame, added, PoolingRequest(RenderedPrompt(np.ones(5, dtype=np.int32))))
        added += 1
    assert added == 5
    many = Frame()
    for number in range(1024):
        assert not many.is_full
        add_answer(many, number, ValueError("a" * 2**20))
    assert many.is_full


def test_an_error_whose_message_cannot_be_read_fails_its_row_alone():
    class UnreadableError(Exception):
        def __str__(self) -> str:
            raise ValueError("no message")

    frame = Frame()
    add_answer(frame, 1, UnreadableError())
    add_answer(frame, 2, output(np.ones(3, dtype=np.float32)))
    (failed, _), (good, payload) = sent(frame, Answers)
    assert type(read_answer(failed, _)) is BatchFailedError
    assert type(read_answer(good, payload)) is PoolingOutput
