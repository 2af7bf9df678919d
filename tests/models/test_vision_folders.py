"""What the files of models that see say, and which of them are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import write_json, write_word_tokenizer
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder import DualEncoder, ImageTower, TextPadding
from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.page_retrieval import PageRetrieval
from trio_pool_serve.models.vision_language import ImagePatches, VisionLanguage

pytestmark = pytest.mark.unit

TOWERS = {
    "text": {"method": "get_text_features", "method_output_name": "pooler_output"},
    "image": {"method": "get_image_features", "method_output_name": "pooler_output"},
}
STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
TEMPLATE = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"


def write(
    folder: Path,
    config: dict[str, Any],
    *,
    transformer: dict[str, Any] | None = None,
    modules: tuple[str, ...] = (),
    **tokenizer: Any,
) -> Path:
    """A folder of a config and a tokenizer; with ``transformer``, the module's config, one of modules."""
    write_word_tokenizer(folder)
    write_json(folder / "config.json", config)
    written = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**written, **tokenizer})
    if transformer is not None:
        write_json(folder / "sentence_bert_config.json", transformer)
        entries = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
        for name in modules:
            entries.append({"idx": 1, "name": name, "path": name, "type": f"sentence_transformers.models.{name}"})
            write_json(folder / name / "config.json", {})
        write_json(folder / "modules.json", entries)
    return folder


def refuse(folder: Path, said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_model_folder(folder)


# -- dual encoders ----------------------------------------------------------------------------------------

CLIP = {"model_type": "clip", "architectures": ["CLIPModel"]}
SIGLIP = {
    "model_type": "siglip",
    "architectures": ["SiglipModel"],
    "text_config": {"model_type": "siglip_text_model"},
    "vision_config": {"model_type": "siglip_vision_model"},
}
"""Google's config.json says no more than this."""


def test_a_siglip_that_says_next_to_nothing_has_the_usual_sizes(tmp_path: Path):
    folder = read_model_folder(write(tmp_path, SIGLIP, model_input_names=["input_ids"]))
    assert isinstance(folder.spec, DualEncoder)
    assert folder.spec.images == ImageTower(image_size=224, patch_size=16, has_class_token=False)
    assert folder.spec.padding == TextPadding(length=64, attends_to_padding=True)
    assert (folder.model_type, folder.vocab_size, folder.max_model_len) == ("siglip", 32000, 64)


def test_a_clip_that_says_nothing_has_the_usual_sizes(tmp_path: Path):
    folder = read_model_folder(write(tmp_path, CLIP, model_max_length=10**30))
    assert isinstance(folder.spec, DualEncoder)
    assert folder.spec.images == ImageTower(image_size=224, patch_size=32, has_class_token=True)
    assert folder.spec.padding is None
    assert folder.spec.tasks == {"embed", "score"}
    assert not folder.spec.uses_chat_template
    assert (folder.model_type, folder.vocab_size, folder.max_model_len) == ("clip", 49408, 77)


@pytest.mark.parametrize(
    ("config", "written", "said"),
    [
        *(
            ({"model_type": kind, "architectures": [f"{kind}ForImageClassification"]}, {}, "Classification is not supp")
            for kind in ("clip", "siglip", "siglip2")
        ),
        *(
            (CLIP, {"transformer": transformer}, said)
            for transformer, said in (
                ({}, "computes text by None and takes its None"),
                ({"modality_config": {**TOWERS, "text": STATES}}, "computes text by forward and takes its last_hidden"),
                ({"modality_config": {"text": TOWERS["text"]}}, "computes image by None"),
                ({"modality_config": TOWERS, "module_output_name": "token_embeddings"}, "outputs 'token_embeddings'"),
                ({"modality_config": TOWERS, "processing_kwargs": {"image": {"do_resize": False}}}, "image.do_resize"),
                ({"modality_config": TOWERS, "processing_kwargs": {"text": {"padding": False}}}, "'padding': False"),
                ({"modality_config": TOWERS, "query_length": 8}, "requires query_length"),
            )
        ),
        ({**CLIP, "vision_config": {"image_size": [224, 448]}}, {}, "must be squares"),
        (
            SIGLIP,
            {"padding_side": "left", "model_input_names": ["input_ids", "attention_mask"]},
            "pads texts on the left and masks the padding",
        ),
    ],
)
def test_a_dual_encoder_that_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], written: dict[str, Any], said: str
):
    refuse(write(tmp_path, config, **written), said)


# -- vision-language models -------------------------------------------------------------------------------

QWEN = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "image_token_id": 151655,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
"""Flat, as Qwen published it."""


def test_the_published_config_is_read(tmp_path: Path):
    folder = read_model_folder(write(tmp_path, QWEN, model_max_length=32768, chat_template=TEMPLATE))
    assert isinstance(folder.spec, VisionLanguage)
    assert folder.spec.patches == ImagePatches(token_id=151655, patch_size=14, temporal_patch_size=2, merge_size=2)
    assert folder.spec.uses_chat_template
    assert (folder.model_type, folder.vocab_size, folder.max_model_len) == ("qwen2_vl", 151936, 32768)


def test_a_bare_folder_without_a_template_has_no_conversations(tmp_path: Path):
    assert not read_model_folder(write(tmp_path, QWEN)).spec.uses_chat_template


def test_modules_that_read_plain_text_have_no_conversations(tmp_path: Path):
    transformer = {"modality_config": {"text": STATES}, "module_output_name": "token_embeddings"}
    folder = write(tmp_path, QWEN, transformer=transformer, modules=("Pooling",), chat_template=TEMPLATE)
    assert not read_model_folder(folder).spec.uses_chat_template


def test_options_of_the_template_are_kept(tmp_path: Path):
    transformer = {
        "modality_config": MESSAGES,
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
    }
    folder = write(tmp_path, QWEN, transformer=transformer, modules=("Pooling",), chat_template=TEMPLATE)
    spec = read_model_folder(folder).spec
    assert isinstance(spec, Embedding)
    assert spec.conversation is not None
    assert dict(spec.conversation.options) == {"add_generation_prompt": True}
    assert spec.pools_instruction


MESSAGES = {"message": {**STATES, "format": "structured"}}


@pytest.mark.parametrize(
    ("config", "transformer", "said"),
    [
        ({}, {"modality_config": MESSAGES, "processing_kwargs": {"image": {"max_pixels": 9}}}, "kwargs requires image"),
        ({}, {"modality_config": MESSAGES, "processing_kwargs": {"chat_template": {"padding": True}}}, "padding"),
        ({"architectures": ["Qwen2VLForImageClassification"]}, None, "is not an embedding model"),
        ({}, {"transformer_task": "any-to-any"}, "task is 'any-to-any'"),
        ({}, {"modality_config": {"message": {**STATES, "method": "generate"}}}, "computes message by generate"),
    ],
)
def test_a_vision_language_model_that_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], transformer: dict[str, Any] | None, said: str
):
    folder = write(tmp_path, {**QWEN, **config}, transformer=transformer, modules=("Pooling",), chat_template=TEMPLATE)
    refuse(folder, said)


def test_a_text_model_can_read_conversations_too(tmp_path: Path):
    config = {"model_type": "qwen3", "architectures": ["Qwen3Model"], "vocab_size": 300, "max_position_embeddings": 64}
    transformer = {"modality_config": {"text": STATES, "message": {**STATES, "format": "flat"}}}
    folder = write(tmp_path, config, transformer=transformer, modules=("Pooling",), chat_template=TEMPLATE)
    spec = read_model_folder(folder).spec
    assert isinstance(spec, Embedding)
    assert spec.uses_chat_template
    assert spec.conversation is not None
    assert not spec.conversation.structured


# -- page retrievers --------------------------------------------------------------------------------------

COLQWEN = {"model_type": "colqwen2", "architectures": ["ColQwen2ForRetrieval"], "vlm_config": QWEN}
COLPALI = {
    "model_type": "colpali",
    "architectures": ["ColPaliForRetrieval"],
    "vlm_config": {
        "model_type": "paligemma",
        "image_token_index": 257152,
        "text_config": {"model_type": "gemma", "vocab_size": 257216},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 448, "patch_size": 14},
    },
}


def test_the_published_page_retrievers_are_read(tmp_path: Path):
    folder = read_model_folder(write(tmp_path / "colqwen2", COLQWEN, model_max_length=32768))
    assert isinstance(folder.spec, PageRetrieval)
    assert folder.spec.images == ImagePatches(token_id=151655, patch_size=14, temporal_patch_size=2, merge_size=2)
    assert folder.spec.scoring == "late_interaction"
    assert (folder.model_type, folder.vocab_size, folder.max_model_len) == ("colqwen2", 151936, 32768)

    folder = read_model_folder(write(tmp_path / "colpali", COLPALI, model_max_length=10**30))
    assert isinstance(folder.spec, PageRetrieval)
    assert folder.spec.images == ImageTower(image_size=448, patch_size=14, has_class_token=False)
    assert folder.spec.placeholder_id == 257152
    assert (folder.model_type, folder.vocab_size, folder.max_model_len) == ("colpali", 257216, 8192)


def test_the_processors_own_words_are_used(tmp_path: Path):
    write(tmp_path, COLQWEN)
    write_json(
        tmp_path / "processor_config.json", {"query_prefix": "Question: ", "visual_prompt_prefix": "<|image_pad|>"}
    )
    spec = read_model_folder(tmp_path).spec
    assert isinstance(spec, PageRetrieval)
    assert (spec.text_prefix, spec.page_text) == ("Question: ", "<|image_pad|>")


@pytest.mark.parametrize(
    ("config", "transformer", "modules", "said"),
    [
        ({"vlm_config": {**QWEN, "model_type": "qwen3_vl"}}, None, (), "A ColQwen2 of qwen3_vl"),
        ({}, {"transformer_task": "feature-extraction"}, (), "does feature-extraction"),
        ({}, {"transformer_task": "retrieval"}, ("Dense",), "followed by .*Dense"),
        ({}, {"transformer_task": "retrieval", "modality_config": {"text": STATES}}, (), "takes its last_hidden_state"),
        ({}, {"transformer_task": "retrieval", "query_length": 8}, (), "requires query_length"),
    ],
)
def test_other_page_retrievers_are_refused(
    tmp_path: Path, config: dict[str, Any], transformer: dict[str, Any] | None, modules: tuple[str, ...], said: str
):
    refuse(write(tmp_path, {**COLQWEN, **config}, transformer=transformer, modules=modules), said)
