"""Embedding models: a transformer, a Pooling module, and the modules after it.

The sentence-transformers layout: ``modules.json`` lists the modules, each in its own subfolder. A folder without it
is a bare transformer, which sentence-transformers pools by MEAN.
"""

import re
from collections.abc import Mapping
from typing import Any, get_args

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.chat_template import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles
from trio_pool_serve.models.files.modalities import (
    modality_config,
    reject_input_type_lengths,
    reject_processing_kwargs,
    require_methods,
)
from trio_pool_serve.models.model_spec import ModelSpec, Similarity
from trio_pool_serve.rendering.chat.chat_format import ChatFormat


@frozen(kw_only=True)
class Embedding(ModelSpec):
    """One vector per text."""

    modules: tuple[ModuleFiles, ...]
    """Those after the transformer, in order."""
    similarity: Similarity = "cosine"
    """``similarity_fn_name`` of config_sentence_transformers.json."""
    conversation: ChatFormat | None = None
    """How inputs are put into the chat template, if they are."""

    tasks = frozenset({"embed", "token_embed", "score"})
    scoring = "vectors"
    supports_prompt_embeds = True

    @property
    def uses_chat_template(self) -> bool:
        """Whether the files have a chat template and declare its use."""
        return self.conversation is not None

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """``chat_template`` options of processing_kwargs."""
        return {} if self.conversation is None else self.conversation.options

    @property
    def pooling(self) -> str:
        """The modes of the Pooling module, in either spelling of its config, joined by ``+``."""
        config = self.modules[0].config
        modes = config.get("pooling_mode") or [
            name[1]
            for key, on in config.items()
            if on and (name := re.fullmatch(r"pooling_mode_(.+?)(_tokens?)?", key))
        ]
        return modes if isinstance(modes, str) else "+".join(modes) or "mean"

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler includes the instruction's tokens, as nearly every model's does.

        In a conversation they cannot be distinguished from the others.
        """
        return self.uses_chat_template or all(
            module.config.get("include_prompt", True) for module in self.modules if module.name == "Pooling"
        )


def read_embedding(files: FolderFiles, config: ModelConfig) -> Embedding:
    """Read any folder as an embedding model's. Raises ``ModelLoadError``."""
    del config
    _refuse_unsupported(files)
    found = modality_config(files)
    require_methods(found, dict.fromkeys(("text", "message") & found.keys(), STATES))
    if "message" not in found:
        reject_processing_kwargs(files, {})
    conversation = read_chat_format(files) if "message" in found else None
    return Embedding(
        modules=modules_after_transformer(files), similarity=similarity_of(files), conversation=conversation
    )


STATES = ("forward", "last_hidden_state")
"""The method that computes a transformer's states, and its output that holds them."""


def modules_after_transformer(files: FolderFiles) -> tuple[ModuleFiles, ...]:
    """Return the modules after the transformer; a bare transformer gets mean pooling."""
    mean_pooling = (ModuleFiles(name="Pooling", path=files.path, config={"pooling_mode": "mean"}),)
    return files.modules[1:] if files.modules else mean_pooling


def similarity_of(files: FolderFiles) -> Similarity:
    """Return ``similarity_fn_name`` of config_sentence_transformers.json, by default cosine."""
    name = files.sentence_transformers_config.get("similarity_fn_name") or "cosine"
    known: Mapping[str, Similarity] = {value: value for value in get_args(Similarity)} | {"dot_product": "dot"}
    if name not in known:
        raise ModelLoadError(f"similarity_fn_name is {name!r}; known are {', '.join(known)}.")
    return known[name]


IGNORED_HEADS = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForTextEncoding",
)
"""Class suffixes that a bare transformer may be saved with: sentence-transformers pools the states below the head."""


def _refuse_unsupported(files: FolderFiles) -> None:
    for name in () if files.modules else files.architectures:
        if re.search(r"For[A-Z]\w*$", name) and not name.endswith(IGNORED_HEADS):
            raise ModelLoadError(f"{name} is not an embedding model, and is not supported.")
    task = files.module_config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelLoadError(f"The transformer's task is {task!r}, which is not supported for an embedding model.")
    reject_input_type_lengths(files)
