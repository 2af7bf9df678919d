import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trio_pool_serve.engine.remote.wire import (
    FAILURES,
    Payload,
    RemoteScope,
    Scopes,
    Submit,
    error_of,
    failure_of,
    read_rows,
    read_value,
    write_rows,
    write_value,
)
from trio_pool_serve.errors import BatchFailedError, QueryGoneError
from trio_pool_serve.types import (
    Classify,
    Embed,
    HeldQuery,
    HoldQuery,
    ImageFeatures,
    MaxSim,
    PoolingRequest,
    RenderedPrompt,
    SparseEmbed,
    SparseLookup,
    SparseVector,
    TokenClassify,
    TokenEmbed,
)


class Scope:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def through(requests: list[PoolingRequest], scopes: Scopes | None = None) -> list[PoolingRequest]:
    """Send rows through the wire's bytes."""
    message, buffers = write_rows(enumerate(requests, start=7))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Submit)
    rows = read_rows(decoded, Payload(memoryview(bytearray(b"".join(buffers)))), scopes or Scopes(Scope))
    assert [number for number, _ in rows] == list(range(7, 7 + len(requests)))
    return [request for _, request in rows]


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
    buffers = []
    written = write_value(value, buffers)
    assert_same_array(value, read_value(written, Payload(memoryview(bytearray(b"".join(buffers))))))


@pytest.mark.parametrize("length", [0, 3])
def test_sparse_values_arrive_as_they_were_sent(length):
    value = SparseVector(np.arange(length, dtype=np.int32), np.ones(length, dtype=np.float32))
    buffers = []
    written = write_value(value, buffers)
    read = read_value(written, Payload(memoryview(bytearray(b"".join(buffers)))))
    assert_same_array(value.indices, read.indices)
    assert_same_array(value.values, read.values)


def test_errors_arrive_as_what_they_were_or_as_a_failed_batch():
    for name, kind in FAILURES.items():
        error = error_of(failure_of(1, kind("why")))
        assert (type(error).__name__, str(error)) == (name, "why")
    assert isinstance(error_of(failure_of(1, QueryGoneError("gone"))), QueryGoneError)
    assert type(error_of(failure_of(1, ZeroDivisionError("oops")))) is BatchFailedError


def test_no_object_can_be_had_of_a_payload():
    with pytest.raises(ValueError, match="cannot be sent"):
        Payload(memoryview(bytearray(8))).take(("|O", (1,)))
