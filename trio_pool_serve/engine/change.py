"""A wait for the next change of something that several tasks look at."""

import trio
from attrs import define, field


@define(eq=False)
class Change:
    """Wakes those that wait whenever there was a change; what happened before they began to wait is forgotten."""

    _event: trio.Event = field(init=False, factory=trio.Event)

    async def wait(self) -> None:
        """Wait until ``note`` is called. Cancellation: at once."""
        if self._event.is_set():  # else others wait for it already
            self._event = trio.Event()
        await self._event.wait()

    def note(self) -> None:
        """Wake those that wait."""
        self._event.set()
