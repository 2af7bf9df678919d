"""Where blocking rendering is done."""

from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol, TypeAlias, TypeVar, TypeVarTuple

from attrs import frozen

from trio_pool_serve.threads.offload import Offload

T = TypeVar("T")
Args = TypeVarTuple("Args")

RenderKind: TypeAlias = Literal["render", "media"]
"""render: texts to token ids. media: bytes to what an image processor makes of them."""


class RenderBackend(Protocol):
    """Runs blocking rendering off the loop."""

    @property
    def workers(self) -> int:
        """How many texts are rendered at once."""

    async def run(self, kind: RenderKind, function: Callable[[*Args], T], *args: *Args) -> T:
        """Return what ``function(*args)`` returns; function, arguments and result can be pickled.

        Cancellation: at once; work that runs keeps its place until it is done.
        """


@frozen(eq=False)
class ThreadBackend:
    """Renders in threads, under the limiter of the kind."""

    offload: Offload

    @property
    def workers(self) -> int:
        """As many as the ``render`` limiter has tokens."""
        return self.offload.render

    async def run(self, kind: RenderKind, function: Callable[[*Args], T], *args: *Args) -> T:
        """Return what ``function(*args)`` returns. Cancellation: at once; the thread keeps its token until it ends."""
        return await self.offload.run(kind, partial(function, *args), abandon_on_cancel=True)
