"""Rows that are refused because two devices were lost while they computed them."""

from collections.abc import Sequence

import trio
from attrs import define, field

from trio_pool_serve.engine.queue_entry import QueueEntry, row_digest
from trio_pool_serve.errors import EngineProcessDiedError

REFUSED_S = 300.0
"""How long a row is remembered."""

MAX_REFUSED = 1000
"""Maximum rows remembered."""

REFUSAL = "The engine process died twice while it computed this input."


@define(eq=False)
class RefusedRows:
    """Digests of rows that were refused within ``REFUSED_S``: equal rows are refused, too."""

    _known: dict[int, tuple[bytes, float]] = field(init=False, factory=dict)
    """By the hash of a row's ids: the digest of the whole row, and the time until which it is refused."""

    def refuse(self, entry: QueueEntry) -> None:
        """Fail a row, and remember it."""
        if len(self._known) >= MAX_REFUSED:
            del self._known[next(iter(self._known))]
        request = entry.request
        ids = hash(request.prompt.token_ids.tobytes())
        self._known[ids] = row_digest(request), trio.current_time() + REFUSED_S
        entry.fail(EngineProcessDiedError(REFUSAL))

    def fail_equal(self, entries: Sequence[QueueEntry]) -> Sequence[QueueEntry]:
        """Fail rows that are equal to a refused one; return the others."""
        if not self._known:
            return entries
        now = trio.current_time()
        self._known = {ids: known for ids, known in self._known.items() if known[1] > now}
        for entry in entries:
            known = self._known.get(hash(entry.request.prompt.token_ids.tobytes()))
            if known is not None and known[0] == row_digest(entry.request):
                entry.fail(EngineProcessDiedError(REFUSAL))
        return [entry for entry in entries if not entry.is_settled]
