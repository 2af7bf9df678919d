"""Rows of lost devices: computed again by another device, one at a time and alone, or refused.

One of the rows that a lost device was computing may have killed it. A row that has seen ``MAX_LOSSES`` is refused, and
so are equal rows for a while.
"""

from collections import deque
from collections.abc import Callable, Sequence

import trio
from attrs import define, field

from trio_pool_serve.engine.device import Device, InFlightBatch
from trio_pool_serve.engine.queue_entry import QueueEntry, row_digest
from trio_pool_serve.errors import DeadlineExceededError, EngineProcessDiedError

MAX_LOSSES = 2
"""The first device had other rows, which may be to blame; the second one computed only this row."""

REFUSED_S = 300.0
"""How long a refused row is remembered."""

MAX_REFUSED = 1000
"""Maximum refused rows remembered."""

REFUSAL = "The engine process died twice while it computed this input."


@define(eq=False)
class LostRows:
    """The rows of lost devices that wait to be computed again, and the rows refused because two devices were lost.

    ``requeue`` queues rows that were not sent to a device before it was lost.
    """

    requeue: Callable[..., None] = lambda *_: None
    suspects: deque[QueueEntry] = field(init=False, factory=deque)
    """Rows that wait to be computed again, the next in turn first."""
    _refused: dict[int, tuple[bytes, float]] = field(init=False, factory=dict)
    """Maps the hash of a refused row's token ids to the digest of the row, and the time until which it is refused."""

    def lose(self, batch: InFlightBatch, lost: EngineProcessDiedError, *, has_devices: bool) -> None:
        """Keep the rows of a lost device for another one, if there is one; refuse rows that were lost twice."""
        for entry in batch.waited_for:
            entry.losses += 1
            if entry.losses >= MAX_LOSSES:
                self.refuse(entry)
            # A planned batch is computed whole or not at all; its run reads the rows again.
            elif batch.is_planned or not has_devices:
                entry.fail(lost)
            else:
                self.suspects.append(entry)

    def refuse(self, entry: QueueEntry) -> None:
        """Fail a row, and remember it for ``REFUSED_S``."""
        if len(self._refused) >= MAX_REFUSED:  # a client may send any number of them: the oldest is forgotten
            del self._refused[next(iter(self._refused))]
        ids = hash(entry.request.prompt.token_ids.tobytes())
        self._refused[ids] = row_digest(entry.request), trio.current_time() + REFUSED_S
        entry.fail(EngineProcessDiedError(REFUSAL))

    def fail_refused(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that are equal to a refused one; return the others."""
        if not self._refused:
            return entries
        now = trio.current_time()
        self._refused = {ids: known for ids, known in self._refused.items() if known[1] > now}
        for entry in entries:
            # By token ids first: the digest of a row with images takes a millisecond, and few are like a refused one.
            known = self._refused.get(hash(entry.request.prompt.token_ids.tobytes()))
            if known is not None and known[0] == row_digest(entry.request):
                entry.fail(EngineProcessDiedError(REFUSAL))
        return [entry for entry in entries if not entry.is_settled]

    def give_back(self, batch: InFlightBatch) -> None:
        """Queue rows again that were not yet sent to a device when it was lost: they did not cause the loss."""
        if batch.is_suspect:  # of an earlier loss: it is still computed alone
            self.suspects += batch.waited_for
        elif waited_for := batch.waited_for:
            self.requeue(*(batch.entries if batch.is_planned else waited_for))  # a planned batch is computed whole

    def device_for(self, devices: Sequence[Device]) -> Device | None:
        """Return the device that computes a suspect or will; it gets no other batch until the suspect is done."""
        # A suspect is launched only on a device without other batches, so it is the first there.
        held = [each for each in devices if each.in_flight and each.in_flight[0].is_suspect]
        if not held and devices and self.suspects and self._first() is not None:
            # The other batches of the device end first: they must not be lost with the suspect.
            held = [min(devices, key=lambda each: len(each.in_flight))]
        return held[0] if held else None

    def _first(self) -> QueueEntry | None:
        """Return the first suspect; drop suspects before it that need not be computed any more."""
        while self.suspects:
            entry = self.suspects[0]
            if entry.request.deadline < trio.current_time():
                entry.fail(DeadlineExceededError("The deadline passed while this input was computed."))
            elif not entry.is_abandoned:
                return entry
            self.suspects.popleft()
        return None
