import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import trio
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from trio_pool_serve.engine.admission import COMES_AGAIN, MAX_RETRY_AFTER_S, Admission, AdmittedRequest, EstimatedWork
from trio_pool_serve.engine.batching import BatchLimits
from trio_pool_serve.engine.queue_classes import FAIRNESS
from trio_pool_serve.engine.queue_entry import QueueEntry
from trio_pool_serve.engine.scheduler import Scheduler
from trio_pool_serve.engine.speed import UNKNOWN, WORK_CLASSES, ComputeRates, work_class
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.types import Client, ImageFeatures, PoolingRequest, RenderedPrompt

pytestmark = pytest.mark.unit

TEN_PER_S = np.full(WORK_CLASSES, 0.1)


def admission_of(rates: np.ndarray = TEN_PER_S, max_queue_s: float = 5.0) -> Admission:
    measured = ComputeRates()
    measured.shared = rates
    return Admission(max_queue_s, measured, margin=1.0)


def work(tokens: int, client: str = "a", **fields) -> EstimatedWork:
    return EstimatedWork(tokens=tokens, client=Client(client), **fields)


@contextmanager
def admitting(admission: Admission, *works: EstimatedWork) -> Iterator[None]:
    with ExitStack() as admitted:
        for each in works:
            admitted.enter_context(admission.admit(each))
        yield


def prompt(tokens: int) -> RenderedPrompt:
    return RenderedPrompt(np.ones(tokens, dtype=np.int32))


def image(tokens: int) -> RenderedPrompt:
    features = ImageFeatures({"pixel_values": np.zeros((1, 3, 2, 2), np.float32)}, (tokens,))
    return RenderedPrompt(np.zeros(tokens, dtype=np.int32), images=features)


# -- who is refused -----------------------------------------------------------------------------------


def test_a_request_is_refused_when_what_waits_before_it_takes_too_long():
    admission = admission_of()
    with admitting(admission, *[work(1)] * 51):  # the last one waits for 5.0 s
        with pytest.raises(OverloadedError, match=r"about 5\.1 s, longer than 5 s"), admission.admit(work(1)):
            pytest.fail("admitted")
        assert admission.tokens == 51
    assert admission.tokens == 0


def test_a_request_is_admitted_when_nothing_waits_however_long_it_is():
    admission = admission_of()
    with admission.admit(work(100_000)):
        assert admission.waiting_s == pytest.approx(10_000)


def test_nothing_is_refused_before_the_rate_is_known():
    admission = admission_of(UNKNOWN)
    with admission.admit(work(10**9)), admission.admit(work(10**9)):
        assert admission.waiting_s == 0


async def test_a_request_whose_deadline_comes_before_its_turn_is_refused():
    admission = admission_of()
    now = trio.current_time()
    with admission.admit(work(20)):  # 2 s
        with pytest.raises(OverloadedError, match=r"longer than its deadline, [01]\.\d s"):
            admission.refuse_late(work(20, deadline=now + 1))
        admission.refuse_late(work(20, deadline=now + 60))


def test_a_client_that_floods_is_refused_and_its_neighbour_is_not():
    admission = admission_of()
    with admitting(admission, *[work(1, "flood")] * 51):
        with pytest.raises(OverloadedError):
            admission.refuse_late(work(1, "flood"))
        assert admission.wait_s(work(1, "neighbour")) == pytest.approx(0.1)  # as much as its own
        with admitting(admission, *[work(1, "neighbour")] * 20):
            assert admission.wait_s(work(1, "neighbour")) == pytest.approx(2.0 + 2.1)


def test_a_client_waits_only_for_those_of_its_requests_that_are_as_urgent():
    admission = admission_of()
    with admitting(admission, *[work(1, priority=3)] * 40, *[work(1, priority=-1)] * 10):
        assert admission.wait_s(work(1, priority=-2)) == 0
        assert admission.wait_s(work(1, priority=0)) == pytest.approx(1)
        assert admission.wait_s(work(1, priority=3)) == pytest.approx(5)


def test_only_a_client_that_may_outrank_others_waits_for_none_or_for_all_of_them():
    admission = admission_of()
    trusted = Client("trusted", may_outrank=True)
    with admission.admit(work(60, "flood")):
        urgent = EstimatedWork(tokens=1, client=trusted, priority=-1)
        assert admission.wait_s(urgent) == 0
        with pytest.raises(OverloadedError):
            admission.refuse_late(EstimatedWork(tokens=1, client=trusted, priority=1))
        assert admission.wait_s(work(1, "other", priority=-1)) > 0


def test_when_to_come_back_follows_from_the_rate_and_is_bounded():
    admission = admission_of()
    with admission.admit(work(100)), pytest.raises(OverloadedError) as refused:
        admission.refuse_late(work(100))
    assert refused.value.retry_after_s == pytest.approx(10 - 2.5)
    with admission.admit(work(10_000)), pytest.raises(OverloadedError) as refused:
        admission.refuse_late(work(10_000))
    assert refused.value.retry_after_s == MAX_RETRY_AFTER_S


# -- requests of one client ---------------------------------------------------------------------------

FAST = np.full(WORK_CLASSES, 1e-4)


def test_a_client_s_large_requests_do_not_refuse_its_single_texts():
    admission = admission_of(FAST, max_queue_s=math.inf)
    singles = [work(34)] * 1500  # 5.1 s by themselves
    with admitting(admission, *[work(70_000, rows=2048)] * FAIRNESS):  # each takes 7 s
        assert admission.wait_s(work(34)) < 0.5
        with admitting(admission, *singles):
            admission.max_queue_s = 5.0
            with pytest.raises(OverloadedError):
                admission.refuse_late(work(34))
        admission.refuse_late(work(34))
        with pytest.raises(OverloadedError):
            admission.refuse_late(work(70_000, rows=2048))


def test_large_requests_that_come_due_faster_than_they_are_computed_count_before_a_single_text():
    admission = admission_of(FAST, max_queue_s=math.inf)
    with admitting(admission, *[work(70_000, rows=2048)] * (2 * FAIRNESS)):
        assert admission.wait_s(work(34)) == pytest.approx(2 * FAIRNESS * 7)


@define(eq=False)
class Served:
    """A real queue, and an admission by which a token takes a second."""

    queue: Scheduler = field(factory=Scheduler)
    admission: Admission = field(factory=lambda: admission_of(np.ones(WORK_CLASSES), max_queue_s=math.inf))
    admitted: dict[int, tuple[ExitStack, AdmittedRequest]] = field(factory=dict)
    rows_left: Counter[int] = field(factory=Counter)

    def put(self, client: str, priority: int, rows: int, tokens: int) -> tuple[int, float]:
        """Return the number of the request, and how many tokens were said to be taken before it."""
        asked = work(rows * tokens, client, rows=rows, priority=priority)
        estimate, number, context = self.admission.wait_s(asked), 1 + len(self.admitted), ExitStack()
        request = PoolingRequest(prompt(tokens), priority=priority, group=number, client=asked.client.number)
        admitted = context.enter_context(self.admission.admit(asked))
        admitted.note_rendered([request.prompt] * rows, rows)
        self.admitted[number], self.rows_left[number] = (context, admitted), rows
        self.queue.put_nowait(*[QueueEntry(request) for _ in range(rows)])
        return number, estimate

    def take(self, max_tokens: int) -> list[PoolingRequest]:
        """Compute a batch."""
        taken = [entry.request for entry in self.queue.take(BatchLimits(max_tokens))]
        for request in taken:
            context, admitted = self.admitted[request.group]
            admitted.note_computed(request.prompt)
            self.rows_left[request.group] -= 1
            if not self.rows_left[request.group]:
                context.close()
        return taken


LENGTHS = st.sampled_from([4, 17, 34, 250, 500])

ASKED = st.tuples(
    st.sampled_from("abc"), st.sampled_from([0, 0, 0, -1, 1]), st.sampled_from([1, 1, 4, 30, 300]), LENGTHS
)


@given(st.lists(ASKED, max_size=40), st.integers(0, 100), st.sampled_from([512, 2048]), st.sampled_from("abc"), LENGTHS)
def test_what_the_queue_takes_before_a_single_text_is_not_underestimated(asked, batches, max_tokens, client, tokens):
    served = Served()
    for each in asked:
        served.put(*each)
    for _ in range(batches):
        served.take(max_tokens)
    unfinished = served.admission.total.sum()
    number, estimate = served.put(client, 0, 1, tokens)
    before = 0
    while (request := served.take(1)[0]).group != number:
        before += request.tokens
    assert estimate <= COMES_AGAIN * unfinished
    # Clients take turns by batches; virtual deadlines are rounded, to twice as long at most.
    assert before <= 2 * estimate + 3 * max_tokens + 2 * FAIRNESS * tokens
    while served.take(max_tokens):
        pass
    assert not served.admission.of_client.any()
    assert not served.admission.tokens


# -- what is counted ----------------------------------------------------------------------------------


def test_an_estimate_is_corrected_as_rows_are_rendered_and_computed():
    admission = admission_of()
    with admission.admit(work(100, rows=4)) as admitted:
        admitted.note_rendered([prompt(3)], rows=1)
        assert admission.tokens == 75 + 3
        admitted.note_rendered([prompt(10), prompt(500)], rows=3)  # one in two windows, two not needed
        assert admission.tokens == 3 + 10 + 500
        admitted.note_computed(prompt(500))
        assert admission.tokens == 13
    assert admission.tokens == 0
    assert not admission.of_client.any()
    assert not admission.sizes


def test_an_image_counts_by_what_it_turns_out_to_be_as_do_later_ones_at_once():
    rates = TEN_PER_S.copy()
    rates[work_class(1, has_images=True) :] = 1.0
    admission = admission_of(rates)
    with admission.admit(work(256, has_images=True)) as admitted:
        assert admission.waiting_s == pytest.approx(256)
        admitted.note_rendered([image(40)], rows=1)
        assert admission.waiting_s == pytest.approx(40)
    with admission.admit(work(512, rows=2, has_images=True)):
        assert admission.tokens == 80


def test_a_request_counts_in_full_until_it_ends_and_what_is_left_of_it_in_the_time_that_all_takes():
    admission = admission_of(max_queue_s=math.inf)
    with admission.admit(work(100, rows=2)) as admitted:
        admitted.note_rendered([prompt(50), prompt(50)], rows=2)
        admitted.note_computed(prompt(50))
        assert admission.waiting_s == pytest.approx(5)
        assert admission.wait_s(work(100, "b")) == pytest.approx(10), "clients have turns, and others take its place"
    assert admission.waiting_s == 0


def test_images_that_take_longer_to_prepare_than_to_compute_are_refused_in_time():
    now = 0.0
    admission = admission_of(TEN_PER_S / 1000)
    admission.images.clock = lambda: now
    with ExitStack() as admitted:
        requests = [admitted.enter_context(admission.admit(work(10, has_images=True))) for _ in range(100)]
        for request in requests[:20]:
            now += 0.1
            request.note_rendered([image(10)], rows=1)
        with pytest.raises(OverloadedError, match=r"about 8\.1 s"):
            admission.refuse_late(work(10, has_images=True))
        admission.refuse_late(work(10))  # a text needs none of that
        admission.refuse_late(work(10, "b", has_images=True))  # and another client has its turn
    admission.refuse_late(work(10, has_images=True))
    assert admission.images.total == 0
