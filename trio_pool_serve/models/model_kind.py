"""A kind of model, and a folder with a model of that kind."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from attrs import Factory, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.rendering.media.image_protocols import ImageFormat
from trio_pool_serve.rendering.text.pairs import JoinedPair, PairFormat
from trio_pool_serve.rendering.text.plain_text import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer

Spec = TypeVar("Spec", bound=ModelSpec)


@frozen(kw_only=True)
class ModelFolder(Generic[Spec]):
    """A local folder with a model, and what its files say about serving it."""

    path: Path
    transformer_path: Path
    transformer_config: Mapping[str, Any]
    """``config.json`` of the transformer; its text part, where it has several."""
    kind: "ModelKind[Spec]"
    spec: Spec
    max_model_len: int
    """Longest input, tokens, special tokens included."""
    lower_case: bool = False
    prompts: Mapping[str, str] = Factory(dict)
    default_prompt_name: str | None = None
    messages_in_parts: bool | None = None
    """How its chat template wants texts; ``None`` where the template is to tell."""

    @property
    def model_type(self) -> str:
        """The spec family, as transformers names it."""
        return str(self.transformer_config.get("model_type", "unknown"))

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: an id past it cannot be computed."""
        return int(self.transformer_config["vocab_size"])


AnyModelFolder: TypeAlias = ModelFolder[Any]
"""A folder with a model of any kind."""


def plain_text(spec: ModelSpec, tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of most models."""
    del spec, tokenizer
    return TextFormat()


def joined_pair(spec: ModelSpec, tokenizer: Tokenizer) -> PairFormat:
    """Return the pair format of most models: as the tokenizer joins two texts."""
    del spec, tokenizer
    return JoinedPair()


def no_images(folder: AnyModelFolder) -> ImageFormat | None:
    """Return ``None``: the model reads no images."""
    del folder
    return None


@frozen(kw_only=True, eq=False)
class ModelKind(Generic[Spec]):
    """One kind of model: how its folders are recognised, how its inputs are rendered and how it is loaded.

    ``read`` returns what a folder's files declare, ``None`` for a folder of another kind; it raises ``ModelLoadError``
    for a folder of its kind that needs something unsupported. ``load`` names the function (``module:function``) that
    makes a ``LoadedModel`` of a ``ModelFolder`` and ``LoadingParams``, blocking for seconds; a name, because an API
    process imports no torch.

    ``text_format``, ``pair_format`` and ``image_format`` return how the model reads a text, two texts together, and
    images (``None``: it reads none); each raises ``ModelLoadError`` where the folder's files do not fit together.
    """

    read: Callable[[FolderFiles, ModelConfig], Spec | None]
    load: str
    text_format: Callable[[Spec, Tokenizer], TextFormat] = plain_text
    pair_format: Callable[[Spec, Tokenizer], PairFormat] = joined_pair
    image_format: Callable[[ModelFolder[Spec]], ImageFormat | None] = no_images

    def loader(self) -> Any:
        """Import and return the function that ``load`` names."""
        module, _, function = self.load.partition(":")
        return getattr(importlib.import_module(module), function)
