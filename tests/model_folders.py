"""Model folders that tests build: real tokenizer and config files, random weights."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

WORDS = [f"w{n}" for n in range(200)] + ["hello", "world", "query", "passage", ":"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}


def write_json(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_files(folder: Path, files: Mapping[str, object]) -> None:
    """Write files by their paths in the folder: a string as it is, anything else as JSON."""
    for name, content in files.items():
        if isinstance(content, str):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        else:
            write_json(folder / name, content)


BARE = {"model_type": "bert", "vocab_size": 30, "max_position_embeddings": 512}
"""A config.json of a model that can be served."""

TRANSFORMER = ("sentence_transformers.base.modules.transformer.Transformer", "")
POOLING = ("sentence_transformers.models.Pooling", "1_Pooling")


def ids_of(text: str) -> list[int]:
    return [VOCABULARY[word] for word in text.split()]


def numpy_file(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def modules_json(*entries: tuple[str, str]) -> list[dict[str, object]]:
    """The content of modules.json: a type and a path for each module."""
    numbered = enumerate(entries)
    return [{"idx": idx, "name": str(idx), "path": path, "type": dotted} for idx, (dotted, path) in numbered]


def write_word_tokenizer(folder: Path, *, max_length: int = 64) -> None:
    """A fast tokenizer with one token per word, [CLS] before and [SEP] after."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", VOCABULARY["[CLS]"]), ("[SEP]", VOCABULARY["[SEP]"])],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "mask_token": "[MASK]",
        },
    )


def write_scripted_folder(folder: Path, *, max_length: int = 64) -> Path:
    """A folder that a ``ScriptedRunner`` stands in for: everything but weights."""
    write_word_tokenizer(folder, max_length=max_length)
    write_json(
        folder / "config.json",
        {"model_type": "bert", "vocab_size": len(VOCABULARY), "max_position_embeddings": 512, "pad_token_id": 0},
    )
    write_json(
        folder / "config_sentence_transformers.json",
        {"prompts": {"query": "query : ", "passage": "passage : "}, "default_prompt_name": None},
    )
    return folder


def write_late_interaction_folder(
    folder: Path, mask: object = None, *, max_length: int = 64, **settings: object
) -> Path:
    """The same as a late-interaction model, with settings of the transformer and of the mask."""
    write_scripted_folder(folder, max_length=max_length)
    write_json(folder / "sentence_bert_config.json", settings)
    modules = "sentence_transformers.multi_vector_encoder.modules"
    write_json(folder / "1_MultiVectorMask" / "config.json", {} if mask is None else mask)
    mask_module = f"{modules}.multi_vector_mask.MultiVectorMask", "1_MultiVectorMask"
    write_json(folder / "modules.json", modules_json(TRANSFORMER, mask_module))
    write_json(folder / "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder"})
    return folder


def write_lookup_folder(folder: Path, *, max_length: int = 64, table_length: int) -> Path:
    """The same as an inference-free SPLADE."""
    write_scripted_folder(folder, max_length=max_length)
    write_scripted_folder(folder / "table", max_length=table_length)
    (folder / "table" / "config.json").unlink()
    models = "sentence_transformers.sparse_encoder.models"
    write_json(folder / "modules.json", [{"type": "sentence_transformers.models.Router", "path": ""}])
    write_json(
        folder / "router_config.json",
        {
            "types": {
                "table": f"{models}.SparseStaticEmbedding",
                "": f"{models}.MLMTransformer",
                "1": f"{models}.SpladePooling",
            },
            "structure": {"query": ["table"], "document": ["", "1"]},
            "parameters": {"default_route": "document"},
        },
    )
    return folder
