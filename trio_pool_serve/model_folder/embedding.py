"""Embedding models: a transformer, a Pooling module, and the modules behind it.

The sentence-transformers layout: ``modules.json`` lists the modules, each with a folder of its own; a
folder without it is a bare transformer, which sentence-transformers pools by MEAN.
"""

import re
from collections.abc import Mapping
from typing import get_args

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder.architecture import Architecture, Similarity
from trio_pool_serve.model_folder.files import FolderFiles, ModuleFiles


@frozen(kw_only=True)
class Embedding(Architecture):
    """One vector per text."""

    modules: tuple[ModuleFiles, ...]
    """Those after the transformer, in order."""
    vector_similarity: Similarity = "cosine"

    tasks = frozenset({"embed", "token_embed", "score"})
    scoring = "vectors"
    takes_embeds = True

    @property
    def similarity(self) -> Similarity:
        """``similarity_fn_name`` of config_sentence_transformers.json."""
        return self.vector_similarity

    @property
    def pools_instruction(self) -> bool:
        """Whether the pooler looks at the instruction's tokens too, as nearly every model's does."""
        return all(module.config.get("include_prompt", True) for module in self.modules if module.name == "Pooling")


def read_embedding(files: FolderFiles, config: ModelConfig) -> Embedding:
    """Take any folder for an embedding model's."""
    del config
    _refuse_unsupported(files)
    by_mean = (ModuleFiles(name="Pooling", path=files.path, config={"pooling_mode": "mean"}),)
    return Embedding(modules=files.modules[1:] if files.modules else by_mean, vector_similarity=similarity_of(files))


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
    for name in ("query_length", "document_length", "query_expansion", "processing_kwargs"):
        if files.module_config.get(name):
            raise ModelLoadError(f"The transformer's config asks for {name}, which is not supported.")
