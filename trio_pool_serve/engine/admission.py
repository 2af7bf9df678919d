"""Admission: a request is admitted whole, or refused whole if what waits before it takes too long.

The work of admitted requests is counted in tokens, by client and by work class, and converted to seconds at the rate
that is measured for each work class: see ``ComputeRates``.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import trio
from attrs import Factory, define, evolve, field, frozen

from trio_pool_serve.engine.compute_rates import SecondsPerToken, work_class
from trio_pool_serve.engine.queue import FAIRNESS
from trio_pool_serve.engine.waiting_work import CLIENTS, REQUESTS, SIZES, WaitingWork, size_of
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.threads.backlog import Backlog
from trio_pool_serve.types import Client, RenderedPrompt

MAX_RETRY_AFTER_S = 30.0

LOAD_MARGIN = 1.25
"""By how much computing is estimated slower than measured. When a flood begins the rates are those of before: from then
on the event loop takes more of the cores, to admit some of the requests and to refuse the others."""

IMAGE_ROW_WEIGHT = 0.1
"""Weight of the newest row in the average length of those with images."""

DUE_AFTER = FAIRNESS * 2.0 ** np.arange(SIZES)
"""Tokens that the queue takes of a client until all of a request is due, by request size."""

ALL_DUE = 1.5 * FAIRNESS
"""Large requests of one client that come due faster than they are computed: ``FAIRNESS`` of them, and half as many more
because the queue rounds virtual deadlines up to powers of two."""


@frozen(eq=False, kw_only=True)
class EstimatedWork:
    """What a request will have the engine compute, as far as that is known before its prompts are rendered.

    ``deadline`` is in the trio clock's seconds. For ``waited_s`` seconds it has been waiting to be read.
    """

    tokens: int
    rows: int = 1
    has_images: bool = False
    client: Client = Factory(Client)
    priority: int = 0
    deadline: float = math.inf
    waited_s: float = 0.0

    @property
    def rank(self) -> int:
        """The priority among the rows of all clients."""
        return self.priority if self.client.may_outrank else 0


@define(eq=False)
class AdmittedRequest:
    """The work of one admitted request that is not computed yet, as counted by ``Admission``.

    Its rows replace the estimate once they are rendered, and no longer count once they are computed. Background work is
    not counted at all.
    """

    work: EstimatedWork
    _key: tuple[int, int]
    """Its size, and the number of its client."""
    _waiting: WaitingWork
    _by_priority: Counter[int]
    """Tokens of the client's requests of this size in this process, and one more for each, by priority."""
    _image_rows: "ImageRows"
    _unrendered: int = field(init=False)
    _estimate: dict[int, int] = field(init=False, factory=dict)
    _counted: dict[int, int] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        work = self.work
        self._unrendered = work.rows
        if work.client.is_background:
            return
        self._count(REQUESTS, 1)
        estimated_class = work_class(work.tokens // max(1, work.rows), has_images=work.has_images)
        self._estimate = {estimated_class: work.tokens}
        self._count(estimated_class, work.tokens)
        if work.has_images:
            self._image_rows.unrendered.add(work.client.number, work.rows)

    def note_rendered(self, prompts: Iterable[RenderedPrompt], rows: int) -> None:
        """Replace the estimate for ``rows`` rows of the request by the exact lengths of their ``prompts``."""
        if self.work.client.is_background:
            return
        for estimated_class, estimate in self._estimate.items():
            replaced = estimate if rows >= self._unrendered else estimate * rows // self._unrendered
            self._estimate[estimated_class] = estimate - replaced
            self._count(estimated_class, -replaced)
        if self.work.has_images:
            self._image_rows.unrendered.note_done(self.work.client.number, min(rows, self._unrendered))
        self._unrendered = max(0, self._unrendered - rows)
        for prompt in prompts:
            tokens = len(prompt.token_ids)
            self._count(class_of(prompt), tokens)
            if prompt.images is not None:
                self._image_rows.observe_tokens(tokens)

    def note_computed(self, prompt: RenderedPrompt) -> None:
        """Count a rendered row no longer."""
        if not self.work.client.is_background:
            self._count(class_of(prompt), -len(prompt.token_ids))

    def release(self) -> None:
        """Count nothing of the request any longer."""
        for counted_class, tokens in self._counted.items():
            self._waiting.add(*self._key, counted_class, -tokens)
        self._add_by_priority(-sum(self._counted.values()))
        self._counted.clear()
        self._estimate.clear()
        if self.work.has_images:
            self._image_rows.unrendered.withdraw(self.work.client.number, self._unrendered)
        self._unrendered = 0

    def _count(self, counted_class: int, tokens: int) -> None:
        self._counted[counted_class] = self._counted.get(counted_class, 0) + tokens
        self._waiting.add(*self._key, counted_class, tokens)
        self._add_by_priority(tokens)

    def _add_by_priority(self, tokens: int) -> None:
        self._by_priority[self.work.priority] += tokens
        if self._by_priority[self.work.priority] <= 0:
            del self._by_priority[self.work.priority]


@define(eq=False)
class ImageRows:
    """The rows with images of one model, in one process: those not rendered yet, and how long they are.

    ``tokens`` is a moving average, 0 before the first.
    """

    unrendered: Backlog = field(factory=Backlog)
    tokens: float = 0.0

    def observe_tokens(self, tokens: int) -> None:
        """Record the length of a row."""
        self.tokens += (tokens - self.tokens) * (IMAGE_ROW_WEIGHT if self.tokens else 1.0)


def class_of(prompt: RenderedPrompt) -> int:
    """Return the work class of a row."""
    return work_class(len(prompt.token_ids), has_images=prompt.images is not None)


@define(eq=False)
class Admission:
    """Refuses requests that would wait for more than ``max_queue_s`` seconds, or until their deadline.

    ``seconds_per_token()`` are the rates at which the model's devices compute together, to which ``margin`` is applied.
    What waits before a request is what the queue would take of its client's rows before its own, and of each other
    client as much again, as the queue takes turns between clients. A request is always admitted when nothing waits
    before it, and while the rates are unknown. To prepare images may take longer than to compute them.
    """

    max_queue_s: float
    seconds_per_token: Callable[[], SecondsPerToken]
    waiting: WaitingWork = field(factory=WaitingWork)
    margin: float = LOAD_MARGIN
    _by_priority: dict[tuple[int, int], Counter[int]] = field(init=False, factory=lambda: defaultdict(Counter))
    """By request size and client, of this process."""
    _image_rows: ImageRows = field(init=False, factory=ImageRows)

    @property
    def tokens(self) -> int:
        """Tokens of the requests admitted by this process that are not computed yet."""
        return self.waiting.own_tokens

    @property
    def waiting_s(self) -> float:
        """Seconds that all admitted work will take."""
        seconds = float(self.waiting.total() @ self.seconds_per_token())
        return 0.0 if math.isnan(seconds) else seconds * self.margin

    def is_full(self, waited_s: float = 0.0) -> bool:
        """Return whether all admitted work takes longer than a request may wait that has ``waited_s`` behind it."""
        return self.waiting_s + self._image_rows.unrendered.total_s > max(0.0, self.max_queue_s - waited_s)

    @contextmanager
    def admit(self, work: EstimatedWork) -> Iterator[AdmittedRequest]:
        """Count a request's work until the context ends; not that of background work. Raises ``OverloadedError``."""
        if work.client.is_background:
            yield AdmittedRequest(work, (0, 0), self.waiting, Counter(), self._image_rows)
            return
        if work.has_images and self._image_rows.tokens:  # which says more than a guess that is the same for all models
            work = evolve(work, tokens=math.ceil(self._image_rows.tokens * work.rows))
        self.refuse_late(work)
        key = size_of(work.tokens), work.client.number
        by_priority = self._by_priority[key]
        admitted = AdmittedRequest(work, key, self.waiting, by_priority, self._image_rows)
        try:
            yield admitted
        finally:
            admitted.release()
            if not by_priority and self._by_priority.get(key) is by_priority:
                del self._by_priority[key]

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise ``OverloadedError`` if a request would wait for too long."""
        if work.client.is_background:
            return
        left_s = work.deadline - trio.current_time() if work.deadline < math.inf else math.inf
        queue_s = self.max_queue_s - work.waited_s
        limit_s = min(queue_s, left_s)
        rendering_s = self._image_rows.unrendered.wait_s(work.client.number, work.rows) if work.has_images else 0.0
        waiting_s = self.waiting_s
        if not waiting_s or waiting_s + rendering_s <= limit_s:
            return  # without a look at the clients: this is for each request
        # Not the longer of both: without an accelerator they share the cores.
        wait_s = self.wait_s(work) + rendering_s
        if not wait_s or wait_s <= limit_s:
            return
        limit = f"{self.max_queue_s:g} s" if queue_s < left_s else f"its deadline, {max(0.0, left_s):.1f} s"
        waits_s = wait_s + work.waited_s if queue_s < left_s else wait_s
        raise OverloadedError(
            f"The queue is full: this request would wait for about {waits_s:.1f} s, longer than {limit}.",
            retry_after_s=retry_after_s(wait_s, self.max_queue_s),
        )

    def wait_s(self, work: EstimatedWork) -> float:
        """Return for how many seconds a request would wait; 0 if that is unknown."""
        rates = self.seconds_per_token() * self.margin
        if math.isnan(rates[0]):
            return 0.0
        seconds = self.waiting.by_client() @ rates
        if work.rank > 0:
            return float(seconds.sum())  # behind all others
        before = self._own_before_s(work, rates)
        if work.rank < 0:
            return before
        row_class = work_class(work.tokens // max(1, work.rows), has_images=work.has_images)
        turn = before + work.tokens * float(rates[row_class])
        return before + float(np.minimum(seconds, turn).sum()) - min(float(seconds[work.client.number % CLIENTS]), turn)

    def _own_before_s(self, work: EstimatedWork, rates: SecondsPerToken) -> float:
        """Return for how many seconds a request waits for others of its client.

        The queue takes what is due before this one is: a part of each larger one, which grows until its turn comes.
        With ``ALL_DUE`` larger ones it does not come before they are computed.
        """
        client = work.client.number
        counts = self.waiting.by_size(client)
        sizes = np.flatnonzero(counts[:, REQUESTS])
        requests, counts = counts[sizes, REQUESTS], counts[sizes, :REQUESTS]
        tokens = counts.sum(axis=1)
        urgency = [self._urgency(client, size, work.priority) for size in sizes.tolist()]
        more_urgent, as_urgent = np.array(urgency).reshape(-1, 2).T
        due = more_urgent * tokens + as_urgent * np.minimum(tokens, DUE_AFTER[:, np.newaxis] * requests / ALL_DUE)
        turns = DUE_AFTER[size_of(work.tokens)] + due.sum(axis=1)
        turn = min(np.count_nonzero(turns > DUE_AFTER), SIZES - 1)
        return float(due[turn] / np.maximum(tokens, 1.0) @ (counts @ rates))

    def _urgency(self, client: int, size: int, priority: int) -> tuple[float, float]:
        """Return the shares of a client's waiting requests of one size that are more urgent, and as urgent."""
        by_priority = self._by_priority.get((size, client)) or {priority: 1}
        more_urgent = sum(tokens for each, tokens in by_priority.items() if each < priority)
        total = sum(by_priority.values())
        return more_urgent / total, by_priority.get(priority, 0) / total


def retry_after_s(wait_s: float, max_queue_s: float) -> float:
    """Return the seconds until about half of the queue is computed; from 0.1 to ``MAX_RETRY_AFTER_S``.

    Not when the queue is just short enough: all clients that are refused meanwhile would return at that moment.
    """
    return min(MAX_RETRY_AFTER_S, max(0.1, wait_s - max_queue_s / 2))
