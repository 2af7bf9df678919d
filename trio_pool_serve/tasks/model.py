"""A model as the tasks see it."""

from attrs import frozen

from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.errors import TaskNotSupportedError
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.types import PoolingTask


@frozen(eq=False)
class Model:
    """One model, ready to be asked: what its files say, who renders for it, who computes it.

    ``splits_long_texts`` has texts that are too long embedded in windows, instead of refusing them.
    """

    name: str
    folder: ModelFolder[ModelSpec]
    renderer: Renderer
    engine: Engine
    splits_long_texts: bool = False

    def label(self, index: int) -> str:
        """Return the name of a label; transformers' own names where the model has none."""
        labels = self.folder.spec.labels
        return labels[index] if index < len(labels) else f"LABEL_{index}"

    def require(self, task: PoolingTask) -> None:
        """Raise ``TaskNotSupportedError`` unless the model can do a task."""
        able = self.folder.spec.tasks
        if task not in able:
            raise TaskNotSupportedError(f"The model {self.name!r} cannot {task}; it can: {', '.join(sorted(able))}.")
