"""Tiny static embeddings with random tables, as sentence-transformers and model2vec lay out the folders."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.kept_folders import built_once, by_name
from tests.model_folders import modules_json, write_json
from tests.models.model_families import (
    NEW_NORMALIZE,
    NORMALIZE,
    Module,
    bert_tokenizer,
    dense,
    edit_json,
    layer_norm,
    reference,
    write_modules,
    xlm_roberta_tokenizer,
)

WIDTH = 24
NEW_STATIC = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
OLD_STATIC = "sentence_transformers.models.StaticEmbedding"
PROMPTS = {"query": "A nursery: ", "document": "passage: "}

UNIT_LENGTH = Module(type=NEW_NORMALIZE)


def random_table(rows: int, width: int = WIDTH, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(rows).normal(size=(rows, width)) * 8).astype(dtype)


def write_tokenizer(folder: Path, tokenizer: Any = None, **settings: Any) -> int:
    """Write tokenizer.json, with other settings of the file if given; return its number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = (tokenizer or bert_tokenizer()).backend_tokenizer
    backend.no_truncation()
    backend.save(f"{folder}/tokenizer.json")
    edit_json(folder / "tokenizer.json", lambda document: document.update(settings))
    return backend.get_vocab_size()


def write_static(
    folder: Path,
    *modules: Module,
    path: str = "",
    dotted: str = NEW_STATIC,
    dtype: Any = np.float32,
    more_rows: int = 3,
    tokenizer: Any = None,
    tokenizer_settings: Mapping[str, Any] | None = None,
    **texts: Any,
) -> Path:
    """Write sentence-transformers' layout. The table has more rows than the tokenizer has tokens."""
    tokens = write_tokenizer(folder / path, tokenizer, **tokenizer_settings or {})
    save_file({"embedding.weight": random_table(tokens + more_rows, dtype=dtype)}, folder / path / "model.safetensors")
    write_modules(folder, modules)
    edit_json(folder / "modules.json", lambda entries: entries[0].update(type=dotted, path=path))
    write_json(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, **texts})
    return folder


def write_model2vec(folder: Path, *listed: tuple[str, str], dtype: Any = np.float32, **config: Any) -> Path:
    """Write model2vec's layout, whose rows several tokens share; without ``listed`` there is no modules.json."""
    tokens = write_tokenizer(folder)
    random = np.random.default_rng(tokens)
    tensors = {
        "embeddings": random_table(tokens // 2, dtype=dtype),
        "mapping": random.integers(tokens // 2, size=tokens),
        "weights": random.random(tokens) * 2,
    }
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "model2vec", "architectures": ["StaticModel"], **config})
    if listed:
        write_json(folder / "modules.json", modules_json(*listed))
    return folder


POTION: Sequence[tuple[str, str]] = ((OLD_STATIC, "."), (NORMALIZE, "1_Normalize"))


@built_once
def static(folder: Path) -> Path:
    """As static-retrieval-mrl-en-v1: the vectors are not of unit length, and are cut."""
    return write_static(folder, truncate_dim=WIDTH - 8)


@built_once
def static_of_old(folder: Path) -> Path:
    modules = (dense(WIDTH, 16, use_residual=True), dense(16, 16, use_residual=True), layer_norm(16), UNIT_LENGTH)
    return write_static(folder, *modules, path="0_StaticEmbedding", dotted=OLD_STATIC)


@built_once
def static_of_unigrams(folder: Path) -> Path:
    """Normalize first, then a Dense without an activation."""
    layer = dense(WIDTH, 16, bias=False, activation="torch.nn.modules.linear.Identity")
    return write_static(folder, UNIT_LENGTH, layer, tokenizer=xlm_roberta_tokenizer())


@built_once
def static_float64(folder: Path) -> Path:
    return write_static(folder, dtype=np.float64, similarity_fn_name="dot")


@built_once
def potion(folder: Path) -> Path:
    return write_model2vec(folder, *POTION, normalize=True)


@built_once
def model2vec_of_old(folder: Path) -> Path:
    return write_model2vec(folder, normalize=True)


STATIC = by_name(static, static_of_old, static_of_unigrams, static_float64, potion, model2vec_of_old)


def static_reference(path: Path) -> Any:
    """The oracle: sentence-transformers; it needs to be told what is in a folder without modules.json."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

    if (path / "modules.json").is_file():
        return reference(path)
    return SentenceTransformer(modules=[StaticEmbedding.load(str(path)), Normalize()], device="cpu")
