"""The record of one kind of model, and of one folder with a model of that kind."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from attrs import Factory, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.rendering.media.image_processor import ImageFormat
from trio_pool_serve.rendering.text.formats import JoinedPair, PairFormat, TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import PoolingTask

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads

Spec = TypeVar("Spec", bound=ModelSpec)


@frozen(kw_only=True)
class ModelFolder(Generic[Spec]):
    """A local folder with a model, and what its files declare."""

    path: Path
    transformer_path: Path
    transformer_config: Mapping[str, Any]
    """``config.json`` of the transformer, or its text part where it has several."""
    kind: "ModelKind[Spec]"
    spec: Spec
    max_model_len: int
    """Maximum input length in tokens, special tokens included."""
    lower_case: bool = False
    prompts: Mapping[str, str] = Factory(dict)
    default_prompt_name: str | None = None
    default_prompt: str | None = None
    """``--default-prompt``, which replaces the prompt of that name."""
    structured_messages: bool | None = None
    """Whether message content is a list of parts; ``None`` if the chat template's text decides."""
    task: PoolingTask | None = None
    """``--task``: the task of requests that name none."""
    tokenizer_config: Mapping[str, Any] = Factory(dict)
    """``tokenizer_config.json``."""
    chat_template: str | None = None
    """``--chat-template``, in place of the tokenizer's."""

    @property
    def reads_images(self) -> bool:
        """Whether the model accepts images: known without loading its image processor."""
        return self.kind.image_format is not None

    def image_format(self) -> ImageFormat | None:
        """Return the format of its images, ``None`` if it accepts none. Imports transformers, which blocks for seconds.

        Raises ``ModelLoadError`` if its image processor does not match the model.
        """
        return None if self.kind.image_format is None else self.kind.image_format(self)

    @property
    def model_type(self) -> str:
        """``model_type`` of config.json."""
        return str(self.transformer_config.get("model_type", "unknown"))

    @property
    def vocab_size(self) -> int:
        """Number of rows of the token embedding; token ids are smaller."""
        return int(self.transformer_config["vocab_size"])


AnyModelFolder: TypeAlias = ModelFolder[Any]
"""A folder with a model of any kind."""


@frozen(kw_only=True, eq=False)
class ModelKind(Generic[Spec]):
    """One kind of model: how its folders are recognised, how its inputs are rendered and how it is loaded.

    ``read`` returns what a folder's files declare, ``None`` for a folder of another kind; it raises ``ModelLoadError``
    for a folder of its kind that requires something unsupported. ``load`` names the function (``module:function``)
    that makes a ``LoadedModel`` of a ``ModelFolder`` and ``LoadingParams``, blocking for seconds. It is a name
    because an API process imports no torch. ``exported_heads`` returns the heads of a spec, for folders whose weights
    torch cannot load; it raises ``UnusableGraphError``.

    ``text_format``, ``pair_format`` and ``image_format`` return how a text, a pair of texts and an image are rendered
    (``None``: the model accepts no images); by default as most models do. They raise ``ModelLoadError`` if the
    folder's files contradict each other.
    """

    read: Callable[[FolderFiles, ModelConfig], Spec | None]
    load: str
    exported_heads: "Callable[[Spec], BuiltHeads] | None" = None
    text_format: Callable[[Spec, Tokenizer], TextFormat] = lambda spec, tokenizer: TextFormat()  # noqa: ARG005
    pair_format: Callable[[Spec, Tokenizer], PairFormat] = lambda spec, tokenizer: JoinedPair()  # noqa: ARG005
    image_format: Callable[[ModelFolder[Spec]], ImageFormat] | None = None
