"""Model folders that tests build: real tokenizer and config files, random weights."""

import json
from pathlib import Path

WORDS = [f"w{n}" for n in range(200)] + ["hello", "world", "query", "passage", ":"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}


def write_json(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


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
