"""Embedding models: a transformer, a Pooling module, and the modules after it.

The sentence-transformers layout: ``modules.json`` lists the modules, each in its own subfolder. A folder without it
is a bare transformer, which sentence-transformers pools by MEAN, or by LAST if it is a causal language model.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from attrs import evolve, frozen

from trio_pool_serve.config import ModelConfig, Pooling
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.chat_settings import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles
from trio_pool_serve.models.files.pooled_modules import LAYERS, ignores_layers, read_pooled_modules
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec, Similarity, pooling_modes
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat
from trio_pool_serve.types import PoolingTask

if TYPE_CHECKING:
    from trio_pool_serve.runner.openvino.exported_graph import BuiltHeads


@frozen(kw_only=True)
class Embedding(ModelSpec):
    """One vector per text."""

    scoring = "vectors"
    supports_prompt_embeds = True
    pools_token_states = True

    @property
    def tasks(self) -> frozenset[PoolingTask]:
        """The tasks of vectors; ``score`` only if they are made to be compared."""
        return frozenset({"embed", "token_embed"} if self.no_score else {"embed", "token_embed", "score"})


def read_embedding(files: FolderFiles, config: ModelConfig) -> Embedding:
    """Read any folder as an embedding model's. Raises ``ModelLoadError``."""
    for name in () if files.modules else files.architectures:
        require(
            not re.search(r"For[A-Z]\w*$", name) or name.endswith(IGNORED_HEADS),
            f"{name} is not an embedding model, and is not supported.",
        )
    require_plain_states(files)
    return Embedding(
        modules=modules_after_transformer(files, config),
        similarity=similarity_of(files),
        conversation=read_conversation(files),
        assumption=assumption_of(files, config),
        no_score=why_not_scored(files, config),
    )


def read_conversation(files: FolderFiles) -> ChatFormat | None:
    """Return how inputs are put into the chat template, ``None`` if modules.json declares no conversations."""
    if "message" in files.modality_config:
        return read_chat_format(files)
    files.reject_processing_kwargs()
    return None


STATES = ("forward", "last_hidden_state")
"""The method that computes a transformer's states, and its output that holds them."""


MODULE_POOLING: Mapping[Pooling, str] = {"last": "lasttoken", "mean_sqrt_len": "mean_sqrt_len_tokens"}
"""Pooling types whose names in a Pooling module's config differ from the setting's."""


def modules_after_transformer(
    files: FolderFiles, config: ModelConfig, *, undeclared: tuple[ModuleFiles, ...] = ()
) -> tuple[ModuleFiles, ...]:
    """Return the modules after the transformer, as ``with_settings``.

    A bare transformer gets the modules ``undeclared``, by default the pooling of sentence-transformers. Raises
    ``ModelLoadError`` for modules that ``read_pooled_modules`` does not accept.
    """
    pooling = ModuleFiles(name="Pooling", path=files.path, config={"pooling_mode": _undeclared_pooling(files)})
    bare = (pooling, ModuleFiles(name="Normalize", path=files.path)) if files.own_pooling else (pooling,)
    return with_settings(read_pooled_modules(files) if files.modules else undeclared or bare, config)


def with_settings(declared: Sequence[ModuleFiles], config: ModelConfig) -> tuple[ModuleFiles, ...]:
    """Return the modules as the settings change them.

    Raises ``ModelLoadError`` for ``--pooling`` if there is no Pooling module.
    """
    modules = list(declared)
    if config.pooling is not None:
        place = next((place for place, module in enumerate(modules) if module.name == "Pooling"), None)
        if place is None:
            raise ModelLoadError("--pooling requires a Pooling module after the transformer in modules.json.")
        kept = {name: value for name, value in modules[place].config.items() if not name.startswith("pooling_mode")}
        kept["pooling_mode"] = MODULE_POOLING.get(config.pooling, config.pooling)
        modules[place] = evolve(modules[place], config=kept)
    if config.normalize is not None:
        modules = [module for module in modules if module.name != "Normalize"]
    if config.normalize:
        modules.append(ModuleFiles(name="Normalize", path=Path()))
    return tuple(modules)


def _undeclared_pooling(files: FolderFiles) -> str:
    """Return the pooling type that config.json declares, or that sentence-transformers gives to a bare transformer."""
    if files.own_pooling:
        return files.own_pooling
    is_decoder = bool(files.architectures) and files.architectures[0].endswith("ForCausalLM")
    return "lasttoken" if is_decoder and files.config.get("is_causal", True) else "mean"


ENCODERS = re.compile("bert|mpnet|nomic|gte|siglip|electra", re.IGNORECASE)
"""A part of the names of classes that vLLM pools by CLS; it pools decoders by LAST."""


IGNORED_LAYERS = (
    f"{LAYERS} has no effect, as in sentence-transformers: config.json does not set output_hidden_states to true."
)


def assumption_of(files: FolderFiles, config: ModelConfig) -> str:
    """Return the pooling that this and other servers assume without modules.json, or the module that has no effect.

    Empty if there is neither.
    """
    if files.modules and ignores_layers(files):
        return IGNORED_LAYERS
    if files.modules or files.own_pooling or (config.pooling is not None and config.normalize is not None):
        return ""
    name, pooling = next(iter(files.architectures), ""), _undeclared_pooling(files)
    vllm = "CLS" if ENCODERS.search(name) else "LAST"
    # text-embeddings-inference takes any model type with these four letters for a variant of BERT.
    is_bert = "bert" in str(files.config.get("model_type")).lower()
    return (
        "The files declare no pooling: modules.json is missing. This server "
        f"assumes {config.pooling or pooling} pooling "
        f"and {'' if config.normalize else 'no '}normalisation; sentence-transformers assumes {pooling} pooling and no "
        f"normalisation, vLLM {vllm} pooling and normalisation, and text-embeddings-inference "
        f"{'CLS pooling and normalisation' if is_bert else 'refuses the model'}. "
        f"To choose, set --pooling and --normalize or --no-normalize.{OTHER_USES.get(name.rpartition('For')[2], '')}"
        f"{f' {no_score}' if (no_score := why_not_scored(files, config)) else ''}"
    )


OTHER_USES = {"MaskedLM": " For SPLADE: --task sparse_embed."}
"""Another use of a bare folder, by the end of its class's name."""


GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Class suffixes of models that generate text. Rerankers are saved from them, too."""


def why_not_scored(files: FolderFiles, config: ModelConfig) -> str:
    """Return why the vectors of a model that generates text are not compared; empty if they are.

    They are if its files or ``--task embed`` say that it is an embedding model: a reranker's would order at random.
    """
    is_embedding = files.modules or files.own_pooling or files.config.get("is_causal") is False
    if is_embedding or config.task == "embed" or not files.is_saved_from(GENERATORS):
        return ""
    may_be_reranker = files.config.get("model_type") == "qwen3" and "rerank" in str(files.path).lower()
    return (
        f"{files.architectures[0]} generates text, and no modules.json says that it is an embedding model. If it is, "
        "set --task embed to score by its vectors."
        f"{' If it is Qwen3-Reranker, set --task score.' if may_be_reranker else ''}"
    )


def similarity_of(files: FolderFiles) -> Similarity:
    """Return ``similarity_fn_name`` of config_sentence_transformers.json, by default cosine."""
    name = files.sentence_transformers_config.get("similarity_fn_name") or "cosine"
    known: Mapping[str, Similarity] = {value: value for value in get_args(Similarity)} | {"dot_product": "dot"}
    require(name in known, f"similarity_fn_name is {name!r}; accepted: {', '.join(known)}.")
    return known[name]


IGNORED_HEADS = ("ForMaskedLM", "ForPreTraining", "ForCausalLM", "ForConditionalGeneration", "ForTextEncoding")
"""Class suffixes that a bare transformer may be saved with: sentence-transformers pools the states below the head."""


def require_plain_states(files: FolderFiles) -> None:
    """Raise ``ModelLoadError`` unless the transformer makes the states of an embedding model, of any text alike."""
    files.require_task("feature-extraction")
    files.reject_input_type_lengths()
    files.require_methods(dict.fromkeys(("text", "message") & files.modality_config.keys(), STATES))


def embedding_heads(spec: Embedding) -> "BuiltHeads":
    """Return the heads. Raises ``UnusableGraphError`` if there are other modules than Pooling and Normalize."""
    # Imported here: an optional dependency.
    from trio_pool_serve.runner.openvino.converted_model import UnusableGraphError
    from trio_pool_serve.runner.openvino.exported_graph import pooling_heads

    if (names := [module.name for module in spec.modules]) not in (["Pooling"], ["Pooling", "Normalize"]):
        raise UnusableGraphError(
            f"{' + '.join(names)} requires torch; without it, only Pooling and Normalize are supported"
        )
    return pooling_heads(pooling_modes(spec.modules[0].config), normalizes=spec.normalizes)


EMBEDDING = ModelKind(
    read=read_embedding,
    load="trio_pool_serve.models.embedding.loading:load_embedding",
    exported_heads=embedding_heads,
)
