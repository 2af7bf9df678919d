"""What a model's files declare, and what is wrong with them."""

from pathlib import Path

import pytest

from tests.model_folders import BARE, POOLING, TRANSFORMER, modules_json, write_files, write_json
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that can be served."""
    write_json(tmp_path / "model/config.json", BARE)
    return tmp_path / "model"


def write_modules(folder: Path, *entries: tuple[str, str]) -> None:
    write_json(folder / "modules.json", modules_json(*entries))


# -- what is read -------------------------------------------------------------------------------------------


def test_a_bare_transformer_is_pooled_by_mean(folder: Path):
    [head] = read_model_folder(folder).spec.modules
    assert (head.name, head.config) == ("Pooling", {"pooling_mode": "mean"})


def test_family_and_vocabulary_are_those_of_config_json(folder: Path):
    read = read_model_folder(folder)
    assert (read.model_type, read.vocab_size) == ("bert", 30)


def test_of_a_config_with_several_parts_the_text_part_counts(folder: Path):
    text = {"model_type": "gemma3_text", "vocab_size": 7, "max_position_embeddings": 9}
    write_json(folder / "config.json", {"model_type": "gemma3", "text_config": text, "vision_config": {}})
    read = read_model_folder(folder)
    assert (read.model_type, read.vocab_size, read.max_model_len) == ("gemma3_text", 7, 9)


def test_modules_are_read_in_their_order_with_their_configs(folder: Path):
    write_modules(folder, TRANSFORMER, POOLING, ("sentence_transformers.models.Dense", "2_Dense"))
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": "cls"})
    write_json(folder / "2_Dense/config.json", {"in_features": 3})
    heads = read_model_folder(folder).spec.modules
    assert [(head.name, head.path.name, head.config) for head in heads] == [
        ("Pooling", "1_Pooling", {"pooling_mode": "cls"}),
        ("Dense", "2_Dense", {"in_features": 3}),
    ]


def test_the_module_names_of_sentence_transformers_6_are_known(folder: Path):
    write_modules(
        folder,
        ("sentence_transformers.base.modules.transformer.Transformer", ""),
        ("sentence_transformers.sentence_transformer.modules.pooling.Pooling", "1_Pooling"),
        ("sentence_transformers.base.modules.normalize.Normalize", "2_Normalize"),
    )
    assert [head.name for head in read_model_folder(folder).spec.modules] == ["Pooling", "Normalize"]


def test_the_transformer_may_have_a_folder_of_its_own(folder: Path):
    (folder / "0_Transformer").mkdir()
    (folder / "config.json").rename(folder / "0_Transformer/config.json")
    write_json(folder / "0_Transformer/sentence_bert_config.json", {"max_seq_length": 20})
    write_modules(folder, (TRANSFORMER[0], "0_Transformer"), POOLING)
    read = read_model_folder(folder)
    assert (read.transformer_path.name, read.max_model_len) == ("0_Transformer", 20)


def test_prompts_are_read_and_null_ones_dropped(folder: Path):
    prompts = {"query": "query: ", "document": "", "none": None}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    read = read_model_folder(folder)
    assert read.prompts == {"query": "query: ", "document": ""}
    assert read.default_prompt_name == "query"


@pytest.mark.parametrize("name", ["query", "document", "null"])
def test_a_default_prompt_may_be_one_that_sentence_transformers_has_in_any_case(folder: Path, name: str):
    declared = {"prompts": {"null": None}, "default_prompt_name": name}
    write_json(folder / "config_sentence_transformers.json", declared)
    assert read_model_folder(folder).default_prompt_name == name


@pytest.mark.parametrize("document", [None, {}, {"prompts": None}])
def test_there_need_be_no_prompts(folder: Path, document: object):
    if document is not None:
        write_json(folder / "config_sentence_transformers.json", document)
    read = read_model_folder(folder)
    assert read.prompts == {}
    assert read.default_prompt_name is None


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"])
def test_lower_casing_is_read_under_any_name_the_file_has_had(folder: Path, name: str):
    assert not read_model_folder(folder).lower_case
    write_json(folder / name, {"max_seq_length": 64, "do_lower_case": True})
    read = read_model_folder(folder)
    assert (read.lower_case, read.max_model_len) == (True, 64)


@pytest.mark.parametrize(("config", "pooled"), [({}, True), ({"include_prompt": False}, False)])
def test_instructions_are_pooled_unless_the_config_says_not_to(folder: Path, config: object, *, pooled: bool):
    write_modules(folder, TRANSFORMER, POOLING)
    write_json(folder / "1_Pooling/config.json", config)
    assert read_model_folder(folder).spec.pools_instruction == pooled


# -- the longest input --------------------------------------------------------------------------------------

NO_LIMIT = 1000000000000000019884624838656
"""What tokenizers write for none."""


@pytest.mark.parametrize(
    ("own", "of_tokenizer", "expected"),
    [
        (None, None, 512),
        (128, None, 128),
        (None, 256, 256),
        (128, 256, 128),
        (256, 128, 256),
        (1024, NO_LIMIT, 512),
        (None, NO_LIMIT, 512),
    ],
)
def test_the_transformer_s_limit_replaces_the_tokenizer_s(
    folder: Path, own: int | None, of_tokenizer: int | None, expected: int
):
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": own, "do_lower_case": False})
    write_json(folder / "tokenizer_config.json", {"model_max_length": of_tokenizer})
    assert read_model_folder(folder).max_model_len == expected


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "mpnet", "camembert"])
def test_families_that_number_positions_after_the_padding_take_less(folder: Path, family: str):
    config = {"model_type": family, "vocab_size": 30, "max_position_embeddings": 514, "pad_token_id": 1}
    write_json(folder / "config.json", config)
    assert read_model_folder(folder).max_model_len == 512


def test_a_length_can_be_asked_for_up_to_the_positions(folder: Path):
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 128})
    assert read_model_folder(folder, ModelConfig(max_model_len=512)).max_model_len == 512
    with pytest.raises(ModelLoadError, match="--max-model-len 513 exceeds the 512 positions"):
        read_model_folder(folder, ModelConfig(max_model_len=513))


@pytest.mark.parametrize("positions", [None, -1])
def test_without_any_limit_one_must_be_asked_for(folder: Path, positions: int | None):
    write_json(folder / "config.json", {"model_type": "xlnet", "vocab_size": 30, "max_position_embeddings": positions})
    write_json(folder / "tokenizer_config.json", {"model_max_length": NO_LIMIT})
    with pytest.raises(ModelLoadError, match="set it with --max-model-len"):
        read_model_folder(folder)
    assert read_model_folder(folder, ModelConfig(max_model_len=9000)).max_model_len == 9000


# -- what is wrong ------------------------------------------------------------------------------------------


def test_a_path_without_a_model_is_an_error(folder: Path):
    for path, said in (
        (folder / "nowhere", "nowhere is not a folder"),
        (folder / "config.json", r"config\.json is not a folder"),
        (folder.parent, r"holds no config\.json: it is not a transformers model"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            read_model_folder(path)


OWN, TEXTS, MODULES = "sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"

REFUSED = [
    *(
        ({name: text}, f"{name} {said}")
        for name in ("config.json", OWN, TEXTS)
        for text, said in (("{", "cannot be read"), ("[]", "does not hold a JSON object"))
    ),
    *(
        ({MODULES: text}, r"modules\.json cannot be read")
        for text in ("{", "3", '[{"type": "sentence_transformers.models.Transformer"}]', '["x"]')
    ),
    ({MODULES: []}, "does not begin with a Transformer module"),
    ({MODULES: modules_json(POOLING)}, "does not begin with a Transformer module"),
    *(
        ({MODULES: modules_json(TRANSFORMER, (name, "1"))}, f"{name} is not one of sentence-transformers' own")
        for name in ("custom_st.Transformer", "Transformer", "sentence_transformers_x.Pooling")
    ),
    *(
        ({MODULES: modules_json(TRANSFORMER, (POOLING[0], path))}, "points outside the model's folder")
        for path in ("../elsewhere", "/etc", "1_Pooling/../../elsewhere")
    ),
    ({OWN: {"transformer_task": "fill-mask"}}, "task is 'fill-mask'; this kind of model needs feature-extraction"),
    ({OWN: {"query_length": 32}}, "requires query_length"),
    ({OWN: {"query_expansion": {"length": 32}}}, "requires query_expansion"),
    ({OWN: {"processing_kwargs": {"text": {"padding": "max_length"}}}}, "requires processing_kwargs text.padding"),
    ({TEXTS: {"prompts": {"web": "w"}, "default_prompt_name": "x"}}, r"default_prompt_name x: .* document, query, web"),
]


@pytest.mark.parametrize(("files", "said"), REFUSED)
def test_files_that_cannot_be_read_or_would_be_misread_are_errors(folder: Path, files: dict[str, object], said: str):
    write_files(folder, files)
    with pytest.raises(ModelLoadError, match=said):
        read_model_folder(folder)


def test_a_link_out_of_the_folder_is_an_error(folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (folder / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    write_modules(folder, TRANSFORMER, POOLING)
    with pytest.raises(ModelLoadError, match="points outside the model's folder"):
        read_model_folder(folder)
