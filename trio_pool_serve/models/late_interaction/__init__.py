"""Late-interaction models: one vector per token, two texts compared by MaxSim.

Three layouts: sentence-transformers' MultiVectorEncoder; PyLate's, whose folders omit PyLate's defaults; and the
original ColBERT's ``HF_ColBERT``, with the projection among the transformer's weights and the settings in
``artifact.metadata``. Omitted settings get sentence-transformers' defaults.
"""

import string
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles, read_json
from trio_pool_serve.models.late_interaction.kept_tokens import KeptTokens, ScoringMask, kept_tokens_of, scoring_mask
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.models.token_pooling import read_token_pooling
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds

STANFORD = "HF_ColBERT"
METADATA = "artifact.metadata"

PYLATE_KEYS = (
    "query_prefix", "document_prefix", "query_length", "document_length", "query_expansion", "do_query_expansion",
    "attend_to_expansion_tokens", "attend_to_mask_tokens", "skiplist_words",
)  # fmt: skip
"""Keys that PyLate writes to config_sentence_transformers.json."""

DEFAULT_QUERY_LENGTH = 32
"""Tokens of an expanded query if the files declare none: ColBERT's and PyLate's default."""


@frozen(kw_only=True)
class QueryExpansion:
    """Queries shorter than ``length`` tokens are padded with ``token``; the added tokens have vectors too.

    Khattab and Zaharia, https://arxiv.org/abs/2004.12832, section 3.2. ``attends_to_expansion``: whether the query's
    tokens attend to the added ones. ``token`` is ``None`` for the tokenizer's mask token, or else its end token.
    """

    length: int
    strategy: Literal["fixed", "min"] = "fixed"
    """fixed: every query has exactly ``length`` tokens. min: at least ``length``."""
    attends_to_expansion: bool = False
    token: str | None = None


@frozen(kw_only=True)
class LateInteraction(ModelSpec):
    """One vector per token. Its ``modules`` are Dense and Normalize over tokens; its prompts begin with markers."""

    projection_is_in_checkpoint: bool = False
    """Whether the transformer's checkpoint contains a projection without bias, ``linear.weight``, as first module."""
    mask: ScoringMask | None = None
    """``None``: exactly the tokens that are attended to are kept."""
    expansion: QueryExpansion | None = None
    query_length: int | None = None
    document_length: int | None = None
    text_length: int | None = None
    """Maximum tokens of a text without an input type, or of an input type without a length."""

    tasks = frozenset({"token_embed", "score"})
    scoring = "late_interaction"
    keeps_input_type_prompt = True

    @property
    def max_input_tokens(self) -> int:
        """The longer of queries and documents. PyLate's tokenizer limit is one less, for the marker token."""
        return max(self.query_length or 0, self.document_length or 0, self.expansion.length if self.expansion else 0)

    @property
    def particulars(self) -> Mapping[str, str]:
        """The lengths of queries and documents."""
        lengths = {"queries": self.query_length, "documents": self.document_length}
        padded = {"queries": f"padded to {self.expansion.length} tokens"} if self.expansion else {}
        others = {name: f"up to {length} tokens" for name, length in lengths.items() if length and name not in padded}
        return padded | others


def read_late_interaction(files: FolderFiles, config: ModelConfig) -> LateInteraction | None:
    """Read folders of the three layouts."""
    if files.is_saved_from("ForRetrieval"):
        raise ModelLoadError(
            f"{files.architectures[0]} is not supported; supported page retrievers are ColPali and ColQwen2."
        )
    if not _is_late_interaction(files):
        return None
    require(
        config.trust_remote_code or "AutoModel" not in (files.config.get("auto_map") or {}),
        "The model needs code from its folder, which is run only with --trust-remote-code.",
    )
    files.require_task("feature-extraction")
    files.reject_processing_kwargs()
    spec = _read_modules(files) if files.modules else _read_checkpoint(files)
    length = spec.expansion.length if spec.expansion else 0
    require(
        spec.query_length is None or spec.query_length >= length,
        f"Queries are truncated to {spec.query_length} tokens but expanded to {length}.",
    )
    require(
        not length or files.tokenizer_config.get("padding_side") != "left",
        "Query expansion on the left is not supported.",
    )
    return spec


def _is_late_interaction(files: FolderFiles) -> bool:
    return (
        files.encoder_class in ("MultiVectorEncoder", "ColBERT")
        or any("colbert" in name.lower() for name in files.architectures)
        or (files.path / METADATA).is_file()
        or "query_prefix" in files.sentence_transformers_config
        or "document_prefix" in files.sentence_transformers_config
        or any(module.name == "MultiVectorMask" for module in files.modules)
    )


def _read_checkpoint(files: FolderFiles) -> LateInteraction:
    """Read an ``HF_ColBERT`` folder: its ``artifact.metadata``, which may be missing or incomplete."""
    require(
        STANFORD in files.architectures,
        "This late-interaction model has no projection: modules.json and HF_ColBERT weights are missing.",
    )
    metadata = read_json(files.path / METADATA)
    markers = {
        "query": (metadata.get("query_token_id") or "[unused0]") + " ",
        "document": (metadata.get("doc_token_id") or "[unused1]") + " ",
    }
    return LateInteraction(
        projection_is_in_checkpoint=True,
        modules=(ModuleFiles(name="Normalize", path=files.path),),
        mask=ScoringMask(skipped_words=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else ()),
        expansion=QueryExpansion(
            length=metadata.get("query_maxlen") or DEFAULT_QUERY_LENGTH,
            attends_to_expansion=bool(metadata.get("attend_to_mask_tokens")),
        ),
        document_length=metadata.get("doc_maxlen"),
        text_length=files.tokenizer_config.get("model_max_length"),
        marker_tokens=tuple(markers.values()),
        extra_prompts=markers | dict(files.prompts),
    )


def _read_modules(files: FolderFiles) -> LateInteraction:
    """Read a folder with modules.json, with the defaults that PyLate's folders omit."""
    saved = files.encoder_class
    is_whole = saved == "MultiVectorEncoder" or (saved is None and STANFORD in files.architectures)
    prefixes = {
        input_type: files.sentence_transformers_config[key] or ""
        for input_type, key in (("query", "query_prefix"), ("document", "document_prefix"))
        if key in files.sentence_transformers_config
    }
    settings = _pylate_settings(files.sentence_transformers_config) | dict(files.module_config)
    listed, token_pooling = files.modules[1:], None
    if is_whole and listed and listed[-1].name == "HierarchicalTokenPooling":
        listed, token_pooling = listed[:-1], read_token_pooling(listed[-1])
    modules, mask = _token_modules(listed, is_converted=not is_whole and saved != "ColBERT")
    if not is_whole:
        words = files.sentence_transformers_config.get("skiplist_words")
        if words is None and (saved == "ColBERT" or prefixes):
            words = string.punctuation
        modules += (ModuleFiles(name="Normalize", path=files.path),)
        mask = ScoringMask(skipped_words=tuple(words or ()))
    return LateInteraction(
        modules=modules,
        mask=mask,
        expansion=_expansion(settings.get("query_expansion")),
        query_length=settings.get("query_length"),
        document_length=settings.get("document_length"),
        text_length=settings.get("max_seq_length") or files.tokenizer_config.get("model_max_length"),
        marker_tokens=tuple(prefixes.values()),
        extra_prompts={
            input_type: prefix + files.prompts.get(input_type, "").removeprefix(prefix)
            for input_type, prefix in prefixes.items()
        },
        mean_scores=files.sentence_transformers_config.get("similarity_fn_name") == "meanmaxsim",
        token_pooling=token_pooling,
    )


def _pylate_settings(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transformer module's settings that PyLate writes to config_sentence_transformers.json."""
    settings = {key: texts[key] for key in ("query_length", "document_length") if texts.get(key) is not None}
    if "query_expansion" in texts:
        settings["query_expansion"] = texts["query_expansion"]
    elif texts.get("do_query_expansion") is False:
        settings["query_expansion"] = None
    elif any(key in texts for key in PYLATE_KEYS):
        settings["query_expansion"] = {
            "strategy": "fixed",
            "attend": bool(texts.get("attend_to_expansion_tokens", texts.get("attend_to_mask_tokens"))),
            "length": settings.pop("query_length", DEFAULT_QUERY_LENGTH),
        }
    return settings


def _expansion(settings: Mapping[str, Any] | None) -> QueryExpansion | None:
    if settings is None:
        return None
    length, strategy = settings.get("length"), settings.get("strategy")
    others = settings.keys() - {"strategy", "attend", "token", "length"}
    if others or strategy not in ("fixed", "min") or not isinstance(length, int) or length < 1:
        raise ModelLoadError(f"The query_expansion {dict(settings)} is not supported.")
    return QueryExpansion(
        length=length,
        strategy=strategy,
        attends_to_expansion=bool(settings.get("attend")),
        token=settings.get("token"),
    )


def _token_modules(
    modules: Sequence[ModuleFiles], *, is_converted: bool
) -> tuple[tuple[ModuleFiles, ...], ScoringMask | None]:
    """Return the modules over tokens, and the mask.

    ``is_converted``: the folder is a converted text embedding model. Its modules over the text's vector are dropped,
    its projections are applied to the tokens.
    """
    kept: list[ModuleFiles] = []
    mask = None
    for module in modules:
        if module.name == "MultiVectorMask":
            mask = scoring_mask(module)
        elif module.name == "Normalize":
            # Without a config it normalises a text's vector, which does not exist here.
            if module.config.get("module_input_name") == "token_embeddings":
                kept.append(_over_tokens(module))
        elif module.name == "Dense":
            over_tokens = {"module_input_name": "token_embeddings"} if is_converted else {}
            kept.append(_over_tokens(evolve(module, config={**module.config, **over_tokens})))
        else:
            require(
                module.name == "Pooling" and is_converted,
                f"A late-interaction model with a {module.name} module is not supported.",
            )
    require(bool(kept) or not is_converted, "modules.json lists no projection of the tokens' vectors.")
    return tuple(kept), mask


def _over_tokens(module: ModuleFiles) -> ModuleFiles:
    """Return a module without its input and output names. Raises ``ModelLoadError`` unless both are the tokens'."""
    config = dict(module.config)
    source = config.pop("module_input_name", "token_embeddings")
    target = config.pop("module_output_name", None) or source
    require(
        (source, target) == ("token_embeddings", "token_embeddings"),
        f"{module.name} maps {source!r} to {target!r}, which is not supported.",
    )
    return evolve(module, config=config)


@frozen(kw_only=True)
class LateInteractionFormat(TextFormat):
    """Queries are padded to their length with ``expansion_id``.

    If ``kept_tokens`` is ``None``, exactly the tokens that are attended to are kept.
    """

    expansion: QueryExpansion | None
    expansion_id: int
    kept_tokens: KeptTokens | None

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Expand a query, and mark the kept tokens."""
        tokens = len(token_ids)
        attended = None
        if input_type == "query" and self.expansion is not None and tokens < self.expansion.length:
            added = np.full(self.expansion.length - tokens, self.expansion_id, dtype=np.int32)
            token_ids = np.concatenate([token_ids, added])
            attended = None if self.expansion.attends_to_expansion else tokens
        kept = None
        if self.kept_tokens is not None:
            kept = self.kept_tokens.mask(token_ids, input_type)
        elif attended is not None:
            kept = np.arange(len(token_ids)) < attended
        return RenderedPrompt(token_ids, attended=attended, kept=kept)


def late_interaction_format(spec: LateInteraction, tokenizer: Tokenizer) -> LateInteractionFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer lacks the expansion token."""
    expansion, mask = spec.expansion, spec.mask
    query_length = expansion.length if expansion and expansion.strategy == "fixed" else spec.query_length
    lengths: dict[InputType | None, int | None] = {
        None: spec.text_length,
        "query": query_length or spec.text_length,
        "document": spec.document_length or spec.text_length,
    }
    return LateInteractionFormat(
        limits={input_type: length for input_type, length in lengths.items() if length is not None},
        expansion=expansion,
        expansion_id=_expansion_id(expansion, tokenizer) if expansion else 0,
        kept_tokens=None if mask is None else kept_tokens_of(mask, tokenizer),
    )


def _expansion_id(expansion: QueryExpansion, tokenizer: Tokenizer) -> int:
    if expansion.token is not None:
        token_id = tokenizer.id_of(expansion.token)
    elif (token_id := tokenizer.id_named("mask_token")) is None:
        token_id = tokenizer.id_named("eos_token")
    if token_id is None:
        raise ModelLoadError(f"The tokenizer lacks the query expansion token ({expansion.token}).")
    return token_id


LATE_INTERACTION = ModelKind(
    read=read_late_interaction,
    load="trio_pool_serve.models.late_interaction.loading:load_late_interaction",
    text_format=late_interaction_format,
)
