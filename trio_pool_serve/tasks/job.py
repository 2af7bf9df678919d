"""Pooling jobs, and the record of a pooling task."""

from collections.abc import Callable, Sequence

from attrs import Factory, frozen

from trio_pool_serve.prompts import ChunkedPrompt, Prompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import Activation, PooledValue, PoolingParams, PoolingTask


@frozen(eq=False, kw_only=True)
class PoolJob:
    """Prompts and the tasks to compute for each of them, as a request of any dialect is decoded to.

    One forward pass computes all ``tasks``. ``dimensions`` and ``normalize`` are for vectors, ``activation`` is for
    labels.
    """

    prompts: Sequence[Prompt]
    tasks: tuple[str, ...] = ("embed",)
    input_params: InputParams = Factory(InputParams)
    dimensions: int | None = None
    normalize: bool | None = None
    activation: Activation = "probabilities"
    priority: int = 0

    @property
    def document(self) -> ChunkedPrompt | None:
        """The prompt of a job for the vectors of a document's chunks, which has no others; else ``None``."""
        first = self.prompts[0] if len(self.prompts) == 1 else None
        return first if isinstance(first, ChunkedPrompt) else None

    @property
    def vectors(self) -> int:
        """Number of vectors that the task ``embed`` makes."""
        return len(self.prompts) if self.document is None else len(self.document.chunks)


@frozen(eq=False)
class Task:
    """A pooling task: the params that the engine gets, and ``finish``, which postprocesses the output.

    ``needs`` is the task that the model must support. ``params`` raises ``InvalidRequestError`` if the model cannot
    compute the job. ``finish`` runs on the loop for every prompt, so it must not take long.
    """

    needs: PoolingTask
    params: Callable[[Model, PoolJob], PoolingParams]
    finish: Callable[[PooledValue], PooledValue] = lambda value: value
