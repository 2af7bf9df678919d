"""Rendering in processes of its own."""

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from attrs import frozen

from trio_pool_serve.processes.worker_processes import WorkerProcesses
from trio_pool_serve.rendering.backend import RenderKind

T = TypeVar("T")
Args = TypeVarTuple("Args")


@frozen(eq=False)
class ProcessBackend:
    """Renders in processes, which somebody else runs: texts in some, images in others.

    As with threads, the kinds never wait for each other: a short text behind somebody's image would be late by as much
    as an image takes. The second kind is started for models that read images only; one of the first has 230 MB of its
    own, with MiniLM's tokenizer: most is what transformers imports. ``benchmarks/renderer_backend.py`` says what
    either gains.
    """

    render: WorkerProcesses
    media: WorkerProcesses

    @property
    def workers(self) -> int:
        """As many as there are processes for texts."""
        return self.render.workers

    async def run(self, kind: RenderKind, function: Callable[[*Args], T], *args: *Args) -> T:
        """Return what ``function(*args)`` returns.

        Raises ``WorkerDiedError`` if its process dies, and ``UnavailableError`` if none run. Cancellation: at once; the
        process keeps its place until it is done.
        """
        return await getattr(self, kind).call(function, *args)  # type: ignore[no-any-return]
