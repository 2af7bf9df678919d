"""Uses of models by requests: a model in use is not unloaded for others, or because it was idle."""

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager

import trio
from attrs import define, evolve, field

from trio_pool_serve.errors import EngineLoadingError
from trio_pool_serve.serving.served_adapter import ServedAdapter
from trio_pool_serve.serving.served_model import ServedModel
from trio_pool_serve.tasks.model import Model


def idle_models(models: Iterable[ServedModel]) -> list[ServedModel]:
    """Return the loaded models that no request uses: others may be loaded in their place."""
    return [each for each in models if each.state == "loaded" and not each.users and not each.is_leaving]


@define(eq=False)
class ModelUse(AbstractContextManager["ModelUse"]):
    """One request's use of a model, which keeps it loaded; a context manager for the duration of the request.

    With ``outlives_context`` only ``end`` ends it, for responses that are streamed.
    """

    served: ServedModel
    adapter: ServedAdapter | None = None
    outlives_context: bool = field(init=False, default=False)
    _has_ended: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self.served.users += 1
        self.served.last_used = time.time()
        if self.adapter is not None:
            self.adapter.last_used = self.served.last_used

    def adapted(self, model: Model) -> Model:
        """Return the loaded model as the request uses it. Raises ``EngineLoadingError`` for an unchecked adapter."""
        if self.adapter is None:
            return model
        if self.adapter.adapter is None:
            raise EngineLoadingError(f"The adapter `{self.adapter.name}` is being loaded.")
        return evolve(model, name=self.adapter.name, adapter=self.adapter.adapter)

    def end(self) -> None:
        """End the use. Idempotent."""
        if self._has_ended:
            return
        self._has_ended = True
        self.served.users -= 1
        if not self.served.users:
            self.served.idle_since = trio.current_time()
            self.served.unused.unpark_all()

    def __exit__(self, *_: object) -> None:
        if not self.outlives_context:
            self.end()
