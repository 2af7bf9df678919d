"""Keys of a model's files are obeyed, without effect, or refused by name."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import BARE, POOLING, TRANSFORMER, modules_json, write_files, write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.known_keys import KNOWN_KEYS, NOMIC_NAMES, OLD_NAMES
from trio_pool_serve.models.folder import read_model_folder

pytestmark = pytest.mark.unit

PAGE = Path(__file__).parents[2] / "docs" / "model-files.md"
KINDS = {"`sentence_bert_config.json`": "Transformer", "`config_sentence_transformers.json`": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(tmp_path / "model", {"config.json": BARE, "modules.json": modules_json(TRANSFORMER, POOLING)})
    return tmp_path / "model"


def rows_of_the_page() -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the key and the treatment of the keys in the tables that the server checks."""
    kind = None
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            kind = KINDS.get(line.removeprefix("## "), "module" if line == "## Modules" else None)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if kind is None or not line.startswith("| ") or cells[0] in ("key", "module", "---"):
            continue
        of, keys, treatment = (kind, *cells[:2]) if kind == "Transformer" else cells[:3]
        for key in re.findall(r"`([^`]+)`", keys):
            section, dot, inner = key.partition(".")
            yield (section, inner, treatment) if dot else (of, key, treatment)


def test_the_page_lists_exactly_the_keys_that_are_known():
    listed: dict[str, set[str]] = {}
    for kind, key, treatment in rows_of_the_page():
        if treatment in ("obeyed", "no effect"):
            listed.setdefault(kind, set()).add(key)
        else:
            assert treatment == "refused"
            assert key not in KNOWN_KEYS[kind].split()
    assert listed.keys() - KNOWN_KEYS.keys() == {"Dense", "Normalize"}
    assert {kind: set(keys.split()) for kind, keys in KNOWN_KEYS.items()} == {
        kind: keys for kind, keys in listed.items() if kind in KNOWN_KEYS
    }


OWN = "sentence_bert_config.json"


@pytest.mark.parametrize(
    ("name", "document", "said"),
    [
        (OWN, {"tokenizer_name_or_path": "x"}, "tokenizer_name_or_path is 'x'.*own tokenizer"),
        (OWN, {"tokenizer_args": {"do_lower_case": False}}, "tokenizer_args: do_lower_case is False.*be tokenised"),
        (OWN, {"processor_kwargs": {"model_max_length": 9}}, "processor_kwargs: model_max_length is 9"),
        (OWN, {"config_args": {"is_causal": False}}, "config_args: is_causal is False.*would compute"),
        (OWN, {"config_kwargs": {"rope_scaling": {"factor": 2}}}, "config_kwargs: rope_scaling is"),
        (OWN, {"model_args": {"variant": "fp16"}}, "model_args: variant is 'fp16'.*would be loaded"),
        (OWN, {"model_kwargs": "x"}, "model_kwargs is 'x'"),
        (OWN, {"telepathy": True}, "telepathy is True"),
        ("1_Pooling/config.json", {"pooling_mode_telepathy": True}, "pooling_mode_telepathy is True"),
    ],
)
def test_a_key_that_is_not_obeyed_is_refused_by_file_and_name(
    folder: Path, name: str, document: dict[str, Any], said: str
):
    write_json(folder / name, document)
    with pytest.raises(ModelLoadError, match=rf"{re.escape(name)}: {said}"):
        read_model_folder(folder)


@pytest.mark.parametrize("old", OLD_NAMES)
def test_empty_values_and_what_sentence_transformers_replaces_are_accepted(folder: Path, old: str):
    for arguments in ({}, None, {"trust_remote_code": True, "revision": "main", "is_causal": None}):
        write_json(folder / OWN, {old: arguments, OLD_NAMES[old]: arguments, "tokenizer_name_or_path": None})
        assert read_model_folder(folder).max_model_len == 512


SWITCHES = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
LEGACY = {
    "word_embedding_dimension": 8,
    "pooling_mode_mean_tokens": True,
    **{f"pooling_mode_{name}": False for name in SWITCHES},
}
VERSIONS = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}


@pytest.mark.parametrize(
    ("own", "pooling", "whole"),
    [
        pytest.param({"max_seq_length": 256, "do_lower_case": False}, LEGACY, {"__version__": VERSIONS}, id="MiniLM"),
        pytest.param({"max_seq_length": 512}, LEGACY | {"include_prompt": True}, {"prompts": {}}, id="bge"),
        pytest.param(
            {"max_seq_length": 8192, "do_lower_case": False, "model_args": {"trust_remote_code": True}},
            LEGACY,
            {},
            id="jina v2",
        ),
        pytest.param(
            {"max_seq_length": 512, "model_args": {"add_pooling_layer": False, "torch_dtype": "bfloat16"}},
            LEGACY,
            {"prompts": {"query": "Represent: "}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
            id="arctic",
        ),
        pytest.param(
            {
                "transformer_task": "feature-extraction",
                "module_output_name": "token_embeddings",
                "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
                "processing_kwargs": {},
                "unpad_inputs": None,
            },
            {"embedding_dimension": 8, "pooling_mode": "lasttoken", "include_prompt": True},
            {"model_type": "SentenceTransformer", "requirements": {}, "truncate_dim": None, "a_later_key": 1},
            id="sentence-transformers 6",
        ),
    ],
)
def test_the_files_of_published_models_are_accepted(folder: Path, own: Any, pooling: Any, whole: Any):
    write_files(folder, {OWN: own, "1_Pooling/config.json": pooling, "config_sentence_transformers.json": whole})
    assert read_model_folder(folder).spec.pooling in ("mean", "lasttoken")


def test_an_adapter_beside_the_weights_is_refused(folder: Path):
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "r": 4, "target_modules": ["query"]})
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json: adapters are not applied; merge it into the w"):
        read_model_folder(folder)


# -- nomic_bert, as published ---------------------------------------------------------------------------------

PUBLISHED = NOMIC_NAMES | {
    "model_type": "nomic_bert",
    "vocab_size": 30528,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "auto_map": {"AutoModel": "x--y.Z"},
    "rotary_scaling_factor": None,
}


def test_a_published_nomic_config_with_the_values_of_transformers_is_served_up_to_the_length_of_its_training(
    folder: Path,
):
    write_json(folder / "config.json", PUBLISHED)
    write_json(folder / OWN, {"max_seq_length": 8192})
    assert read_model_folder(folder).max_model_len == 2048
    with pytest.raises(ModelLoadError, match="--max-model-len 4096 exceeds the 2048 positions"):
        read_model_folder(folder, ModelConfig(max_model_len=4096))


@pytest.mark.parametrize(
    ("name", "value"), [("n_embd", 1024), ("n_layer", 6), ("qkv_proj_bias", True), ("rotary_emb_base", 10000)]
)
def test_a_published_nomic_config_with_other_values_is_refused(folder: Path, name: str, value: object):
    write_json(folder / "config.json", PUBLISHED | {name: value})
    with pytest.raises(ModelLoadError, match=rf"config\.json: {name} is {value}, but transformers' own class"):
        read_model_folder(folder)


def test_its_own_code_and_transformers_names_are_believed(folder: Path):
    write_json(folder / "config.json", PUBLISHED | {"n_layer": 6})
    assert read_model_folder(folder, ModelConfig(trust_remote_code=True)).max_model_len == 8192
    native = {"hidden_size": 768, "num_hidden_layers": 6, "max_position_embeddings": 4096}
    write_json(folder / "config.json", PUBLISHED | {"n_layer": 6} | native)
    assert read_model_folder(folder).max_model_len == 4096
