"""Embedding models: a transformer, a Pooling module, and the modules behind it.

The sentence-transformers layout: ``modules.json`` lists the modules, each with a folder of its own; a
folder without it is a bare transformer, which sentence-transformers pools by MEAN.
"""

import re
from collections.abc import Mapping
from typing import Any, get_args

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.chat_template import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles
from trio_pool_serve.models.files.modalities import modality_config, refuse_lengths, refuse_options, require_methods
from trio_pool_serve.models.model_spec import ModelSpec, Similarity
from trio_pool_serve.rendering.chat.chat_format import ChatFormat


@frozen(kw_only=True)
class Embedding(ModelSpec):
    """One vector per text."""

    modules: tuple[ModuleFiles, ...]
    """Those after the transformer, in order."""
    vector_similarity: Similarity = "cosine"
    conversation: ChatFormat | None = None
    """How inputs are put to the chat template, where they are."""

    tasks = frozenset({"embed", "token_embed", "score"})
    scoring = "vectors"
    takes_embeds = True

    @property
    def similarity(self) -> Similarity:
        """``similarity_fn_name`` of config_sentence_transformers.json."""
        return self.vector_similarity

    @property
    def in_conversation(self) -> bool:
        """Whether there is a chat template, and the files say that it is used."""
        return self.conversation is not None

    @property
    def template_options(self) -> Mapping[str, Any]:
        """What the chat template is rendered with, where inputs go through it."""
        return {} if self.conversation is None else self.conversation.options

    @property
    def pooling(self) -> str:
        """The modes of the Pooling module, in either spelling of its config, joined by ``+``."""
        config = self.modules[0].config
        asked = config.get("pooling_mode") or [
            name[1]
            for key, on in config.items()
            if on and (name := re.fullmatch(r"pooling_mode_(.+?)(_tokens?)?", key))
        ]
        return asked if isinstance(asked, str) else "+".join(asked) or "mean"

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler looks at the instruction's tokens too, as nearly every model's does.

        In a conversation they cannot be told from the others.
        """
        return self.in_conversation or all(
            module.config.get("include_prompt", True) for module in self.modules if module.name == "Pooling"
        )


def read_embedding(files: FolderFiles, config: ModelConfig) -> Embedding:
    """Take any folder for an embedding model's."""
    del config
    _refuse_unsupported(files)
    found = modality_config(files)
    require_methods(found, dict.fromkeys(("text", "message") & found.keys(), STATES))
    if "message" not in found:
        refuse_options(files, {})
    conversation = read_chat_format(files) if "message" in found else None
    return Embedding(
        modules=modules_after_transformer(files), vector_similarity=similarity_of(files), conversation=conversation
    )


STATES = ("forward", "last_hidden_state")
"""The method and its output by which a transformer's states are computed."""


def modules_after_transformer(files: FolderFiles) -> tuple[ModuleFiles, ...]:
    """Return the modules behind the transformer; a bare one is pooled by mean."""
    by_mean = (ModuleFiles(name="Pooling", path=files.path, config={"pooling_mode": "mean"}),)
    return files.modules[1:] if files.modules else by_mean


def similarity_of(files: FolderFiles) -> Similarity:
    """Return how config_sentence_transformers.json compares two vectors, by default their cosine."""
    asked = files.texts.get("similarity_fn_name") or "cosine"
    known: Mapping[str, Similarity] = {name: name for name in get_args(Similarity)} | {"dot_product": "dot"}
    if asked not in known:
        raise ModelLoadError(f"similarity_fn_name is {asked!r}; known are {', '.join(known)}.")
    return known[asked]


HEADS_LEFT_ASIDE = (
    "ForMaskedLM",
    "ForPreTraining",
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForTextEncoding",
)
"""What a bare transformer may have been saved from: sentence-transformers pools the states below these."""


def _refuse_unsupported(files: FolderFiles) -> None:
    for name in () if files.modules else files.architectures:
        if re.search(r"For[A-Z]\w*$", name) and not name.endswith(HEADS_LEFT_ASIDE):
            raise ModelLoadError(f"{name} is not an embedding model, and what it does is not supported.")
    task = files.module_config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelLoadError(f"The transformer's task is {task!r}, which its modules give no use for.")
    refuse_lengths(files)
