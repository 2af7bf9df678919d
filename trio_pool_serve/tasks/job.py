"""What is asked about prompts, and what a task is."""

from collections.abc import Callable, Sequence

from attrs import Factory, frozen

from trio_pool_serve.prompts import Prompt
from trio_pool_serve.tasks.input_params import InputParams
from trio_pool_serve.tasks.model import Model
from trio_pool_serve.types import Activation, PooledValue, PoolingParams, PoolingTask


@frozen(eq=False, kw_only=True)
class PoolJob:
    """What a client asks about its prompts, in nobody's dialect.

    ``tasks`` are names of tasks, perhaps several: all of them are answered by one forward pass. ``dimensions``
    and ``normalize`` are for vectors, ``activation`` is for labels.
    """

    prompts: Sequence[Prompt]
    tasks: tuple[str, ...] = ("embed",)
    input_params: InputParams = Factory(InputParams)
    dimensions: int | None = None
    normalize: bool | None = None
    activation: Activation = "probabilities"
    priority: int = 0


def unchanged(value: PooledValue) -> PooledValue:
    """Return what the engine gave."""
    return value


@frozen(eq=False)
class Task:
    """Something to ask about a prompt: what of the engine, and what to make of its answer.

    ``needs`` is what the model must be able to do. ``params`` raises ``InvalidRequestError`` if a model cannot be
    asked what a job asks. ``finish`` runs on the loop for every prompt, so it must not take long.
    """

    needs: PoolingTask
    params: Callable[[Model, PoolJob], PoolingParams]
    finish: Callable[[PooledValue], PooledValue] = unchanged
