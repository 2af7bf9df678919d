"""Admission: a request is admitted whole, or refused whole if the work before it takes too long.

The work of admitted requests is counted in tokens, by client and work class, and converted to seconds at the measured
rate of each work class: see ``ComputeRates``.

Clients take turns, and so do the requests of one client. While a server is overloaded, a new request replaces each one
that ends, so a request of many rows waits for as much work of every other client as it has itself, however much of
theirs is computed already. So a request counts in full until its last row is computed.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import trio
from attrs import Factory, define, evolve, field

from trio_pool_serve.engine.queue_classes import FAIRNESS
from trio_pool_serve.engine.speed import WORK_CLASSES, ComputeRates, work_class
from trio_pool_serve.errors import OverloadedError
from trio_pool_serve.threads.client_turns import Backlog
from trio_pool_serve.threads.moving_average import MovingAverage
from trio_pool_serve.types import Client, RenderedPrompt

MAX_RETRY_AFTER_S = 30.0

LOAD_MARGIN = 1.25
"""Factor by which computing is assumed to be slower than measured. When a flood begins, the rates were measured before
it: now the event loop takes more of the cores, to admit some requests and to refuse the others."""

CLIENTS = 256
"""Maximum clients counted separately; clients with equal numbers modulo this count as one."""

ALL_DUE = 1.5 * FAIRNESS
"""If a client has at least this many requests larger than the one to admit, all of them are computed before it.

While a token is computed, each of them comes due by 1/``FAIRNESS`` of a token. The factor 1.5 is for the queue, which
rounds virtual deadlines up to powers of two."""

NEARLY_FULL = 0.75
"""Share of ``max_queue_s`` above which requests may be refused before they are decoded."""

COMES_AGAIN = 2.0
"""Factor for the waiting work of other clients: in an overload, they send as much again while it is computed."""


Tokens: TypeAlias = npt.NDArray[np.float64]
"""Numbers of tokens, to be multiplied by rates."""


@define(eq=False, kw_only=True)
class EstimatedWork:
    """The work that a request gives the engine, estimated before its prompts are rendered.

    ``deadline`` is in the trio clock's seconds. The request has already waited ``waited_s`` seconds to be read.
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

    @property
    def row_class(self) -> int:
        """The work class of its rows."""
        return work_class(self.tokens // max(1, self.rows), has_images=self.has_images)


@define(eq=False)
class AdmittedRequest(AbstractContextManager["AdmittedRequest"]):
    """The work of one admitted request, counted by ``Admission`` until the end of this context.

    Once rows are rendered, they replace the estimate. Background work is not counted at all.
    """

    work: EstimatedWork
    _admission: "Admission"
    _unrendered: int = field(init=False, default=0)
    _estimate: int = field(init=False, default=0)
    """Estimated tokens of the rows that are not rendered."""
    _counted: defaultdict[int, int] = field(init=False, factory=partial(defaultdict, int))
    """Tokens of all its rows, by work class."""
    _remaining: defaultdict[int, int] = field(init=False, factory=partial(defaultdict, int))
    """Tokens of its rows that are not computed, by work class."""

    def __attrs_post_init__(self) -> None:
        work = self.work
        if work.client.is_background:
            return
        self._unrendered, self._estimate = work.rows, work.tokens
        self._count({work.row_class: work.tokens})
        if work.has_images:
            self._admission.images.add(work.client.number, work.rows)

    def __exit__(self, *_: object) -> None:
        self.release()

    def note_rendered(self, prompts: Sequence[RenderedPrompt], rows: int) -> None:
        """Replace the estimate for ``rows`` rows of the request by the exact lengths of their ``prompts``."""
        if self.work.client.is_background:
            return
        rendered = min(rows, self._unrendered)
        replaced = self._estimate if rendered == self._unrendered else self._estimate * rendered // self._unrendered
        self._estimate -= replaced
        self._unrendered -= rendered
        changes = defaultdict(int, {self.work.row_class: -replaced})
        for prompt in prompts:
            tokens, has_images = len(prompt.token_ids), prompt.images is not None
            changes[work_class(tokens, has_images=has_images)] += tokens
            if has_images:
                self._admission.image_tokens.observe(tokens)
        self._count(changes)
        if self.work.has_images:
            self._admission.images.note_done(self.work.client.number, rendered)

    def note_computed(self, *prompts: RenderedPrompt) -> None:
        """Count rendered rows as computed; after the last row, the request does not count any more."""
        if self.work.client.is_background:
            return
        for prompt in prompts:
            tokens = len(prompt.token_ids)
            row_class = work_class(tokens, has_images=prompt.images is not None)
            self._remaining[row_class] -= tokens
            self._admission.remaining[row_class] -= tokens
        if not self._unrendered and not sum(self._remaining.values()):
            self.release()

    def release(self) -> None:
        """Stop counting the request."""
        if not self._counted:
            return
        for row_class, tokens in self._counted.items():
            self._admission.remaining[row_class] += tokens - self._remaining[row_class]
        self._count({row_class: -tokens for row_class, tokens in self._counted.items()}, ends=True)
        if self.work.has_images:
            self._admission.images.withdraw(self.work.client.number, self._unrendered)
        self._counted.clear()
        self._remaining.clear()
        self._unrendered = 0

    def _count(self, changes: Mapping[int, int], *, ends: bool = False) -> None:
        admission, client, begins = self._admission, self.work.client.number, not self._counted
        for row_class, tokens in changes.items():
            self._counted[row_class] += tokens
            self._remaining[row_class] += tokens
            admission.remaining[row_class] += tokens
            admission.total[row_class] += tokens
            admission.of_client[client % CLIENTS, row_class] += tokens
        sizes, key = admission.sizes[client], (self.work.priority, self.work.tokens.bit_length())
        counts = sizes.setdefault(key, [0, 0])
        counts[0] += begins - ends
        counts[1] += sum(changes.values())
        if not counts[0]:
            del sizes[key]
            if not sizes:
                del admission.sizes[client]


@define(eq=False)
class Admission:
    """Refuses requests that would wait for more than ``max_queue_s`` seconds, or until their deadline.

    ``rates`` are those at which the model's devices compute together; ``margin`` is applied to them. The work before a
    request is the earlier work of its own client, and as much again of each other client, since clients take turns. If
    nothing waits before a request, or the rates are unknown, it is admitted. Preparing images may take longer than
    computing them.
    """

    max_queue_s: float
    rates: ComputeRates
    margin: float = LOAD_MARGIN
    remaining: Tokens = field(init=False, default=Factory(lambda: np.zeros(WORK_CLASSES)))
    """Tokens of the rows of admitted requests that are not computed, by work class."""
    total: Tokens = field(init=False, default=Factory(lambda: np.zeros(WORK_CLASSES)))
    """Tokens of all rows of these requests, by work class."""
    of_client: Tokens = field(init=False, default=Factory(lambda: np.zeros((CLIENTS, WORK_CLASSES))))
    """Tokens of all rows of these requests, by client and work class."""
    sizes: dict[int, dict[tuple[int, int], list[int]]] = field(init=False, default=Factory(lambda: defaultdict(dict)))
    """By client number: requests and their tokens, by priority and size (octave of tokens)."""
    images: Backlog = field(init=False, factory=Backlog)
    """Rows with images that are not rendered."""
    image_tokens: MovingAverage = field(init=False, factory=MovingAverage)
    """Tokens of a rendered row with images."""

    @property
    def tokens(self) -> int:
        """Tokens of admitted requests that are not computed yet."""
        return int(np.add.reduce(self.remaining))  # less than half of the time of ``sum``

    @property
    def clients(self) -> int:
        """Number of clients that have admitted requests."""
        return len(self.sizes)

    @property
    def waiting_s(self) -> float:
        """Seconds that all admitted work will take."""
        seconds = float(self.remaining @ self.rates.shared)
        return 0.0 if math.isnan(seconds) else seconds * self.margin

    def is_full(self) -> bool:
        """Return whether all admitted work takes longer than a request may wait."""
        return self.waiting_s + self.images.total_s > self.max_queue_s

    def is_refusing(self, waited_s: float = 0.0) -> bool:
        """Return whether a request that has waited for ``waited_s`` may be refused: the queue is full or nearly full.

        Since clients take turns, requests are refused before the queue is full.
        """
        return self.waiting_s + self.images.total_s > NEARLY_FULL * max(0.0, self.max_queue_s - waited_s)

    def admit(self, work: EstimatedWork) -> AdmittedRequest:
        """Count a request's work until the end of its context, unless it is background work.

        Raises ``OverloadedError``.
        """
        if work.has_images and self.image_tokens.is_known:  # better than a guess that is the same for all models
            work = evolve(work, tokens=math.ceil(self.image_tokens.value * work.rows))
        self.refuse_late(work)
        return AdmittedRequest(work, self)

    def refuse_late(self, work: EstimatedWork) -> None:
        """Raise ``OverloadedError`` if a request would wait too long."""
        if work.client.is_background:
            return
        left_s = work.deadline - trio.current_time() if work.deadline < math.inf else math.inf
        queue_s = self.max_queue_s - work.waited_s
        limit_s = min(queue_s, left_s)
        rendering_s = self.images.wait_s(work.client.number, work.rows) if work.has_images else 0.0
        all_s = COMES_AGAIN * self.margin * float(self.total @ self.rates.shared)
        if not all_s + rendering_s > limit_s:  # or it is NaN
            return  # fast path, without a look at the clients: this runs for each request
        # The sum, not the maximum: without an accelerator both share the cores.
        wait_s = self.wait_s(work) + rendering_s
        if not wait_s or wait_s <= limit_s:
            return
        limit = (
            f"{self.max_queue_s:g} s (--max-queue-s)" if queue_s < left_s else f"its deadline, {max(0.0, left_s):.1f} s"
        )
        waits_s = wait_s + work.waited_s if queue_s < left_s else wait_s
        raise OverloadedError(
            f"The queue is full: this request would wait for about {waits_s:.1f} s, longer than {limit}.",
            retry_after_s=retry_after_s(wait_s, self.max_queue_s),
        )

    def wait_s(self, work: EstimatedWork) -> float:
        """Return how long a request would wait, in seconds; 0 if that is unknown."""
        rates = self.rates.shared * self.margin
        if math.isnan(rates[0]):
            return 0.0
        seconds = self.of_client @ rates
        own_s = float(seconds[work.client.number % CLIENTS])
        if work.rank > 0:
            return float(seconds.sum())  # all others are computed first
        own_tokens = float(self.of_client[work.client.number % CLIENTS].sum())
        before_s = self._own_before(work) * own_s / own_tokens if own_tokens else 0.0
        if work.rank < 0:
            return before_s
        turn_s = before_s + work.tokens * float(rates[work.row_class])
        return before_s + float(np.minimum(COMES_AGAIN * seconds, turn_s).sum()) - min(COMES_AGAIN * own_s, turn_s)

    def _own_before(self, work: EstimatedWork) -> float:
        """Return how many tokens of its own client are computed before a request.

        More urgent requests, and requests that are not larger, count in full. Each larger request counts as much as
        this one, and meanwhile more of it comes due: an eighth of the tokens computed. If there are ``ALL_DUE`` of
        them, all of them are computed first.
        """
        size, before, larger, larger_tokens = work.tokens.bit_length(), 0, 0, 0
        for (priority, other), (requests, tokens) in self.sizes.get(work.client.number, {}).items():
            if priority < work.priority or (priority == work.priority and other <= size):
                before += tokens
            elif priority == work.priority:
                larger, larger_tokens = larger + requests, larger_tokens + tokens
        if larger >= ALL_DUE:
            return before + larger_tokens
        return before + min(larger_tokens, larger * (max(1, work.tokens) + before / FAIRNESS) / (1 - larger / ALL_DUE))


def retry_after_s(wait_s: float, max_queue_s: float) -> float:
    """Return the seconds until about half of the queue is computed, from 0.1 to ``MAX_RETRY_AFTER_S``.

    This is not the moment when the queue is just short enough: all clients refused meanwhile would return at once.
    """
    return min(MAX_RETRY_AFTER_S, max(0.1, wait_s - max_queue_s / 2))
