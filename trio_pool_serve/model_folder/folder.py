"""A model's folder, as a whole.

The sentence-transformers layout: ``modules.json`` lists the modules, each with a folder of its own; a
folder without it is a bare transformer, which sentence-transformers pools by MEAN.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from attrs import Factory, frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder.architecture import Architecture, Embedding, Similarity
from trio_pool_serve.model_folder.files import ModuleFiles, read_json, read_modules

UNLIMITED = 10**6
"""tokenizer_config.json writes "no limit" as numbers far above any real one."""

TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""The names that sentence-transformers has given to the transformer module's own config."""

POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "mpnet",
        "roberta-prelayernorm",
        "longformer",
        "ibert",
        "mra",
        "data2vec-text",
        "xmod",
        "esm",
    }
)
"""Model types that number positions from ``pad_token_id + 1``, and so take that many tokens less."""


RELATIVE_POSITIONS = frozenset({"t5", "mt5", "umt5"})
"""Model types whose ``n_positions`` is what they were trained on, not what they can take."""


@frozen(kw_only=True)
class ModelFolder:
    """A local folder with a model, and what its files say about serving it."""

    path: Path
    transformer_path: Path
    transformer_config: Mapping[str, Any]
    """``config.json`` of the transformer; its text part, where it has several."""
    architecture: Architecture
    max_model_len: int
    """Longest input, tokens, special tokens included."""
    lower_case: bool = False
    prompts: Mapping[str, str] = Factory(dict)
    default_prompt_name: str | None = None

    @property
    def model_type(self) -> str:
        """The architecture family, as transformers names it."""
        return str(self.transformer_config.get("model_type", "unknown"))

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: an id past it cannot be computed."""
        return int(self.transformer_config["vocab_size"])


def read_model_folder(path: Path, *, max_model_len: int | None = None) -> ModelFolder:
    """Read a model's folder.

    ``max_model_len`` overrides the length that the files declare. Raises ``ModelLoadError`` when the
    folder holds no model, asks for something that is not supported, or cannot take that length.
    """
    if not path.is_dir():
        raise ModelLoadError(f"{path} is not a folder.")
    modules = read_modules(path)
    transformer_path = modules[0].path if modules else path
    config = read_json(transformer_path / "config.json")
    if not config:
        raise ModelLoadError(f"{transformer_path} holds no config.json: it is not a transformers model.")
    config = config.get("text_config") or config
    own = next(filter(None, (read_json(transformer_path / name) for name in TRANSFORMER_CONFIGS)), {})
    _refuse_unsupported(own)
    texts = read_json(path / "config_sentence_transformers.json")
    default_heads = (ModuleFiles(name="Pooling", path=path, config={"pooling_mode": "mean"}),)
    return ModelFolder(
        path=path,
        transformer_path=transformer_path,
        transformer_config=config,
        architecture=Embedding(modules=modules[1:] if modules else default_heads, vector_similarity=_similarity(texts)),
        max_model_len=_length_limit(transformer_path, config, own, max_model_len),
        lower_case=bool(own.get("do_lower_case")),
        prompts={name: text for name, text in (texts.get("prompts") or {}).items() if text is not None},
        default_prompt_name=texts.get("default_prompt_name"),
    )


def _similarity(texts: Mapping[str, Any]) -> Similarity:
    asked = texts.get("similarity_fn_name") or "cosine"
    known: Mapping[str, Similarity] = {name: name for name in get_args(Similarity)} | {"dot_product": "dot"}
    if asked not in known:
        raise ModelLoadError(f"similarity_fn_name is {asked!r}; known are {', '.join(known)}.")
    return known[asked]


def _refuse_unsupported(own: Mapping[str, Any]) -> None:
    task = own.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelLoadError(f"The transformer's task is {task!r}; only embedding models are supported.")
    for name in ("query_length", "document_length", "query_expansion", "processing_kwargs"):
        if own.get(name):
            raise ModelLoadError(f"The transformer's config asks for {name}, which is not supported.")


def _length_limit(path: Path, config: Mapping[str, Any], own: Mapping[str, Any], asked: int | None) -> int:
    positions = config.get("max_position_embeddings") or config.get("n_positions") or UNLIMITED
    if positions < 0 or config.get("model_type") in RELATIVE_POSITIONS:  # XLNet says "no limit" by −1
        positions = UNLIMITED
    if config.get("model_type") in POSITIONS_AFTER_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
    if asked is not None:
        if asked > positions:
            raise ModelLoadError(f"--max-model-len {asked} is more than the {positions} positions the model has.")
        return asked
    of_tokenizer = read_json(path / "tokenizer_config.json").get("model_max_length") or UNLIMITED
    limit = min(own.get("max_seq_length") or UNLIMITED, of_tokenizer, positions)
    if limit >= UNLIMITED:
        raise ModelLoadError("The model's files name no longest input; say one with --max-model-len.")
    return int(limit)
