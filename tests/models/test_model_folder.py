"""What a model's files declare, for each kind of model."""

import string
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.model_folders import BARE, POOLING, write_files
from tests.models.test_refused_folders import (
    CLIP,
    COLQWEN,
    CONFIG,
    LOGIT_SCORE,
    MESSAGES,
    METADATA,
    OWN,
    PYLATE_DENSE,
    QWEN,
    SIGLIP,
    STATES,
    TEXTS,
    TOKENIZER,
    WORDS,
    behind,
    cross_encoder,
    models,
    pooler,
    router,
    saved_from,
    splade,
    vocabulary,
)
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.classification import CrossEncoder, SequenceClassifier, TokenClassifier
from trio_pool_serve.models.dual_encoder import ImageTower, TextPadding
from trio_pool_serve.models.embedding import Embedding
from trio_pool_serve.models.files.known_keys import OLD_NAMES
from trio_pool_serve.models.files.native_configs import NATIVE
from trio_pool_serve.models.folder import read_model_folder
from trio_pool_serve.models.generative_reranker import JUDGE as QUESTION
from trio_pool_serve.models.generative_reranker import OF_FLAG, GenerativeReranker, RerankerTemplate
from trio_pool_serve.models.late_interaction import QueryExpansion
from trio_pool_serve.models.process_reward import ProcessReward
from trio_pool_serve.models.sparse import Sparse
from trio_pool_serve.models.vision_language import ImagePatches
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat
from trio_pool_serve.types import SparseEmbed, SparseLookup

pytestmark = pytest.mark.unit

OF_TOKENIZER = "tokenizer_config.json"
CARD = "README.md"
QWEN3_RERANKER = f"""---
pipeline_tag: text-ranking
---
# A reranker

prefix = "<|im_start|>system\\n{QUESTION} Note that"
"""
GENERATORS = (
    "Qwen3ForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration",
)  # fmt: skip
NO_LIMIT = 1000000000000000019884624838656
"""What tokenizers write for none."""

EVERY_KIND = [
    (
        {CONFIG: {"model_type": "gemma3", "vision_config": {}, "text_config": {
            "model_type": "gemma3_text", "vocab_size": 7, "max_position_embeddings": 9}}},
        {"model_type": "gemma3_text", "vocab_size": 7, "max_model_len": 9},
    ),
    (
        {TEXTS: {"prompts": {"query": "query: ", "document": "", "none": None}, "default_prompt_name": "query"}},
        {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"},
    ),
    *(  # sentence-transformers has these in any case
        ({TEXTS: {"prompts": {"null": None}, "default_prompt_name": name}}, {"default_prompt_name": name})
        for name in ("query", "document", "null")
    ),
    *((files, {"prompts": {}, "default_prompt_name": None}) for files in ({}, {TEXTS: {}}, {TEXTS: {"prompts": None}})),
    *(
        ({name: {"max_seq_length": 64, "do_lower_case": True}}, {"lower_case": True, "max_model_len": 64})
        for name in (OWN, "sentence_xlm-roberta_config.json")
    ),
    *(
        ({OWN: {"max_seq_length": own, "do_lower_case": False}, OF_TOKENIZER: {"model_max_length": of_tokenizer}},
         {"max_model_len": expected, "lower_case": False})
        for own, of_tokenizer, expected in (
            (None, None, 512), (128, None, 128), (None, 256, 256), (128, 256, 128), (256, 128, 256),
            (1024, NO_LIMIT, 512), (None, NO_LIMIT, 512),
        )
    ),
    *(  # they number positions after the padding
        ({CONFIG: {"model_type": family, "vocab_size": 30, "max_position_embeddings": 514, "pad_token_id": 1}},
         {"max_model_len": 512})
        for family in ("roberta", "xlm-roberta", "mpnet", "camembert")
    ),
    ({OWN: {"max_seq_length": 128}}, {"max_model_len": 512}, {"max_model_len": 512}),
    (
        {CONFIG: {"model_type": "xlnet", "vocab_size": 30, "max_position_embeddings": None}},
        {"max_model_len": 9000},
        {"max_model_len": 9000},
    ),
    *(
        ({OWN: {old: given, OLD_NAMES[old]: given, "tokenizer_name_or_path": None}}, {"max_model_len": 512})
        for old in OLD_NAMES
        for given in ({}, None, {"trust_remote_code": True, "revision": "main", "is_causal": None})
    ),
]  # fmt: skip

# -- published files ------------------------------------------------------------------------------------------

LEGACY = {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True} | {
    f"pooling_mode_{name}": False
    for name in ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
}
VERSIONS = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
NOMIC = NATIVE["nomic_bert"].assumed | {
    "model_type": "nomic_bert", "vocab_size": 30528, "n_positions": 8192, "n_layer": 6,
    "auto_map": {"AutoModel": "x--y.Z"}, "rotary_scaling_factor": None,
}  # fmt: skip
OWN_NAMES = {"hidden_size": 768, "num_hidden_layers": 5, "max_position_embeddings": 4096}

NOMIC_AS_NATIVE = {key: value for key, value in NOMIC.items() if key not in ("n_layer", "auto_map")} | {
    "num_hidden_layers": 6, "max_position_embeddings": 2048,
}  # fmt: skip
NEMOTRON = {
    "model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"], "vocab_size": 9, "pooling": "last",
    "max_position_embeddings": 131072, "auto_map": {"AutoModel": "x.Y"},
}  # fmt: skip

PUBLISHED = [
    *(
        (behind(POOLING) | {OWN: own, "1_Pooling/config.json": pooling, TEXTS: whole}, {"spec.pooling": expected})
        for own, pooling, whole, expected in (
            ({"max_seq_length": 256, "do_lower_case": False}, LEGACY, {"__version__": VERSIONS}, "mean"),  # MiniLM
            ({"max_seq_length": 512}, LEGACY | {"include_prompt": True}, {"prompts": {}}, "mean"),  # bge
            (  # jina v2
                {"max_seq_length": 8192, "do_lower_case": False, "model_args": {"trust_remote_code": True}},
                LEGACY, {}, "mean",
            ),
            (  # arctic
                {"max_seq_length": 512, "model_args": {"add_pooling_layer": False, "torch_dtype": "bfloat16"}},
                LEGACY,
                {"prompts": {"query": "Represent: "}, "default_prompt_name": None, "similarity_fn_name": "cosine"},
                "mean",
            ),
            (  # sentence-transformers 6
                {
                    "transformer_task": "feature-extraction",
                    "module_output_name": "token_embeddings",
                    "modality_config": {"text": STATES},
                    "processing_kwargs": {},
                    "unpad_inputs": None,
                },
                {"embedding_dimension": 8, "pooling_mode": "lasttoken", "include_prompt": True},
                {"model_type": "SentenceTransformer", "requirements": {}, "truncate_dim": None, "a_later_key": 1},
                "lasttoken",
            ),
        )
    ),
    # up to the length of its training, unless its own code or transformers' names are believed
    ({CONFIG: NOMIC, OWN: {"max_seq_length": 8192}}, {"max_model_len": 2048, "native_config": NOMIC_AS_NATIVE}),
    ({CONFIG: NOMIC | {"max_trained_positions": 1024}}, {"max_model_len": 1024}),
    ({CONFIG: NOMIC}, {"max_model_len": 8192, "native_config": None}, {"trust_remote_code": True}),
    (
        {CONFIG: NOMIC | OWN_NAMES},
        {"max_model_len": 4096, "native_config": NOMIC_AS_NATIVE | OWN_NAMES},
    ),
    (
        {CONFIG: NEMOTRON, OF_TOKENIZER: {"model_max_length": 512}},
        {"model_type": "llama", "max_model_len": 512, "prompts": {"query": "query: ", "document": "passage: "},
         "spec.pooling": "lasttoken", "spec.normalizes": True, "spec.assumption": ""},
    ),
    ({CONFIG: NEMOTRON, TEXTS: {"prompts": {"query": "q: "}}}, {"prompts": {"query": "q: "}}),
    *(
        (
            {CONFIG: NEMOTRON | {"architectures": ["LlamaBidirectionalForSequenceClassification"], "num_labels": 1}}
            | {OF_TOKENIZER: {"chat_template": given}},
            {"chat_template": expected, "spec.pooled": "lasttoken"},
        )
        for given, expected in (
            ("{{ messages }}", NATIVE["llama_bidirec"].pair_template),
            ("{{ messages | selectattr('role', 'eq', 'query') }}'document'", None),
        )
    ),
]  # fmt: skip

# -- classifiers and rerankers --------------------------------------------------------------------------------

ROLES = "{{ messages | selectattr('role', 'eq', 'query') }}{{ messages | selectattr('role', 'eq', 'document') }}"
IDS = {**WORDS, "<extra_0>": 7}
VOCABULARIES: list[dict[str, Any]] = [
    vocabulary(IDS),
    {TOKENIZER: {"added_tokens": [{"id": number, "content": word} for word, number in IDS.items()]}},
    vocabulary([["?", 0], ["?", 0], ["?", 0], *([word, -1.0] for word in IDS)]),
    {"vocab.json": IDS},
    {"added_tokens.json": IDS},
    {OF_TOKENIZER: {"added_tokens_decoder": {str(number): {"content": word} for word, number in IDS.items()}}},
]
JUDGE = {"true_token_id": 3, "false_token_id": 4, "score_activation": "torch.nn.Sigmoid"}
TEMPLATED = {"chat_template": ROLES}
FLAT = ChatFormat(structured=False, options={}, required=False)
PRM = saved_from("Qwen2ForProcessRewardModel", num_labels=2) | vocabulary(IDS)

CLASSIFIERS = [
    (
        saved_from("BertForSequenceClassification", id2label={"0": "LABEL_0"}),
        {"spec.__class__": CrossEncoder, "spec.tasks": {"classify", "token_classify", "score"},
         "spec.scoring": "pairs", "spec.labels": ("LABEL_0",)},
    ),
    (
        saved_from("BertForSequenceClassification", id2label={str(index): f"n{index}" for index in range(11, -1, -1)}),
        {"spec.__class__": SequenceClassifier, "spec.tasks": {"classify", "token_classify"}, "spec.scoring": None,
         "spec.labels": tuple(f"n{index}" for index in range(12))},
    ),
    *(
        (
            saved_from("XForSequenceClassification", model_type=model_type, num_labels=3),
            {"spec.tasks": {"classify", *also}, "spec.labels": ("LABEL_0", "LABEL_1", "LABEL_2")},
        )
        for model_type, also in (
            ("roberta", ["token_classify"]), ("xlm-roberta", ["token_classify"]), ("camembert", ["token_classify"]),
            ("modernbert", ["token_classify"]), ("qwen3", ["token_classify"]), ("distilbert", []), ("deberta-v2", []),
        )
    ),
    (
        saved_from("RobertaForTokenClassification"),
        {"spec.__class__": TokenClassifier, "spec.tasks": {"token_classify"}, "spec.scoring": None,
         "spec.labels": ("LABEL_0", "LABEL_1")},
    ),
    (
        cross_encoder("sequence-classification") | saved_from("SomeModel", num_labels=1),
        {"spec.__class__": CrossEncoder},
    ),
    (saved_from("BertForSequenceClassification") | behind(models("Pooling")), {"spec.__class__": Embedding}),
    *(
        (saved_from(name), {"spec.__class__": Embedding})
        for name in ("BertModel", "RoFormerModel", "BertForMaskedLM", "ElectraForPreTraining", "Qwen3ForCausalLM",
                     "GPT2Model")
    ),
    *(
        (
            saved_from("Qwen3ForCausalLM") | words,
            {"spec": GenerativeReranker(template=RerankerTemplate(), **JUDGE, assumption=OF_FLAG),
             "spec.tasks": {"score"}, "spec.scoring": "pairs"},
            {"task": "score"},
        )
        for words in VOCABULARIES
    ),
    *(  # Qwen3-Reranker's card, whatever the folder is called
        (saved_from("Qwen3ForCausalLM", model_type="qwen3") | vocabulary(IDS) | {CARD: of_card},
         {"spec.__class__": kind, "spec.tasks": tasks}, settings)
        for of_card, kind, tasks, settings in (
            (QWEN3_RERANKER, GenerativeReranker, {"score"}, {}),
            (QWEN3_RERANKER, Embedding, {"embed", "token_embed", "score"}, {"task": "embed"}),
            (QWEN3_RERANKER, Embedding, {"embed", "token_embed"}, {"task": "token_embed"}),
            (QWEN3_RERANKER.replace("text-ranking", "text-generation"), Embedding, {"embed", "token_embed"}, {}),
            (QWEN3_RERANKER.replace("Judge whether", "Say whether"), Embedding, {"embed", "token_embed"}, {}),
        )
    ),
    *(  # models that generate text may be rerankers: their vectors are compared if something says so
        (saved_from(name, **config) | more, {"spec.tasks": {"embed", "token_embed"} | scored}, settings)
        for name, config, more, settings, scored in (
            *((name, {}, {}, {}, set()) for name in GENERATORS),
            *((name, {}, {}, {"task": "embed"}, {"score"}) for name in GENERATORS),
            *((name, {}, behind(models("Pooling")), {}, {"score"}) for name in GENERATORS),
            ("Qwen2ForCausalLM", {"is_causal": False}, {}, {}, {"score"}),
            ("Qwen2ForCausalLM", {"use_bidirectional_attention": True}, {}, {}, {"score"}),
            ("T5EncoderModel", {}, {}, {}, {"score"}),
            ("Qwen3Model", {"model_type": "qwen3"}, {}, {}, {"score"}),
        )
    ),
    (
        {CONFIG: QWEN | {"architectures": ["Qwen2VLForConditionalGeneration"]}},
        {"spec.tasks": {"embed", "token_embed"}},
    ),
    *(  # a template with a place for both texts; a processor's comes first
        (saved_from("Qwen3ForCausalLM") | vocabulary(IDS) | template, {"spec.template": FLAT})
        for template in (
            {"chat_template.jinja": ROLES},
            {OF_TOKENIZER: TEMPLATED},
            {"chat_template.json": TEMPLATED, "chat_template.jinja": "{{ messages[0].content[0].text }}"},
            {"processor_config.json": TEMPLATED, "chat_template.jinja": "{{ messages[0].content[0].text }}"},
        )
    ),
    (
        cross_encoder("text-generation", LOGIT_SCORE, config={"true_token_id": 9}),
        {"spec": GenerativeReranker(**JUDGE | {"true_token_id": 9, "false_token_id": None}, template=None)},
    ),
    (
        cross_encoder(
            "text-generation",
            LOGIT_SCORE,
            config={"true_token_id": 9},
            modality_config={"message": {"method": "forward", "format": "structured"}},
            processing_kwargs={"chat_template": {"add_generation_prompt": True}},
        ),
        {"spec.template": ChatFormat(structured=True, options={"add_generation_prompt": True})},
    ),
    (PRM, {"spec": ProcessReward(step_token_id=7, labels=("LABEL_0", "LABEL_1"))}),
    (PRM, {"spec.step_token_id": 11}, pooler(step_tag_id=11)),
    (
        saved_from("MistralForCausalLM"),
        {"spec": ProcessReward(step_token_id=9, returned_token_ids=(3, 4), labels=("3", "4")),
         "spec.tasks": {"token_classify"}},
        pooler(step_tag_id=9, returned_token_ids=(3, 4)),
    ),
]  # fmt: skip

# -- retrieval ------------------------------------------------------------------------------------------------


def pylate(own: Any = None, **texts: Any) -> dict[str, Any]:
    texts = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] "} | texts
    return behind(PYLATE_DENSE) | {OWN: own or {}, TEXTS: texts}


RETRIEVAL = [
    (
        saved_from("HF_ColBERT") | {METADATA: {
            "query_token_id": "[unused5]", "doc_token_id": "[unused6]", "query_maxlen": 20, "doc_maxlen": 90}},
        {"prompts": {"query": "[unused5] ", "document": "[unused6] "}, "spec.expansion": QueryExpansion(length=20),
         "spec.document_length": 90, "spec.mask.skipped_words": tuple(string.punctuation)},
    ),
    (
        saved_from("HF_ColBERT"),
        {"spec.expansion": QueryExpansion(length=32), "spec.tasks": {"token_embed", "score"},
         "spec.scoring": "late_interaction", "prompts": {"query": "[unused0] ", "document": "[unused1] "}},
    ),
    (saved_from("HF_ColBERT") | {METADATA: {"doc_maxlen": 9000}}, {"max_model_len": 512}),
    (
        saved_from("HF_ColBERT", auto_map={"AutoModel": "jinaai/xlm-roberta-flash--modeling.XLMRobertaModel"}),
        {"max_model_len": 512},
        {"trust_remote_code": True},
    ),
    (  # an instruction comes behind the marker
        pylate(prompts={"query": "find: ", "document": "[D] text: ", "other": "else"}),
        {"prompts": {"query": "[Q] find: ", "document": "[D] text: ", "other": "else"}},
    ),
    (pylate({"max_seq_length": 299}, document_length=300), {"max_model_len": 300}),  # 299: room for the marker
    (
        pylate(query_length=24, attend_to_expansion_tokens=True),
        {"spec.expansion": QueryExpansion(length=24, attends_to_expansion=True)},
    ),
    (pylate(query_length=24, do_query_expansion=False), {"spec.expansion": None, "spec.query_length": 24}),
    (
        splade({"pooling_strategy": "sum", "activation_function": "log1p_relu"}),
        {"spec.splade_pooling": "sum", "spec.log1p_twice": True, "spec.tasks": {"sparse_embed"}},
    ),
    (saved_from("BertForMaskedLM"), {"spec": Sparse()}, {"task": "sparse_embed"}),
    (
        router() | {"table/tokenizer_config.json": {"model_max_length": 77}},
        {"spec.lookup_input_types": {"query"}, "spec.table.name": "table", "spec.lookup_length": 77},
    ),
    (router(default_route=None), {"spec.lookup_input_types": {"query", None}}),  # the first route
    (router(route_mappings={"(None, None)": "document", "('query', 'text')": "query"}),
     {"spec.lookup_input_types": {"query"}}),
    (router(route_mappings={"('document', None)": "query"}), {"spec.lookup_input_types": {"query", "document"}}),
    (
        router() | {
            TOKENIZER: {"model": {"vocab": {"a": 0}}, "truncation": {"max_length": 3}},
            "table/tokenizer.json": {"model": {"vocab": {"a": 0}}, "truncation": None}},
        {"spec.table.name": "table"},
    ),
    ({"sparse_linear.pt": ""}, {"spec.__class__": Embedding}),
]  # fmt: skip

# -- images ---------------------------------------------------------------------------------------------------

TEMPLATE = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
WITH_TEMPLATE = {OF_TOKENIZER: {"chat_template": TEMPLATE}}
QWEN_PATCHES = ImagePatches(token_id=151655, patch_size=14, temporal_patch_size=2, merge_size=2)
COLPALI = {"model_type": "colpali", "architectures": ["ColPaliForRetrieval"], "vlm_config": {
    "model_type": "paligemma", "image_token_index": 257152,
    "text_config": {"model_type": "gemma", "vocab_size": 257216},
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 448, "patch_size": 14},
}}  # fmt: skip


def sizes(model_type: str, vocab_size: int, max_model_len: int) -> dict[str, Any]:
    return {"model_type": model_type, "vocab_size": vocab_size, "max_model_len": max_model_len}


IMAGES = [
    (
        SIGLIP | {OF_TOKENIZER: {"model_input_names": ["input_ids"]}},
        {"spec.images": ImageTower(image_size=224, patch_size=16, has_class_token=False),
         "spec.padding": TextPadding(length=64, attends_to_padding=True)} | sizes("siglip", 32000, 64),
    ),
    (
        CLIP | {OF_TOKENIZER: {"model_max_length": 10**30}},
        {"spec.images": ImageTower(image_size=224, patch_size=32, has_class_token=True), "spec.padding": None,
         "spec.tasks": {"embed", "score"}, "spec.uses_chat_template": False} | sizes("clip", 49408, 77),
    ),
    (
        {CONFIG: QWEN} | WITH_TEMPLATE,
        {"spec.patches": QWEN_PATCHES, "spec.uses_chat_template": True} | sizes("qwen2_vl", 151936, 32768),
    ),
    ({CONFIG: QWEN}, {"spec.uses_chat_template": False}),
    (
        {CONFIG: QWEN} | WITH_TEMPLATE | behind(models("Pooling"), modality_config={"text": STATES}),
        {"spec.uses_chat_template": False},
    ),
    (
        {CONFIG: QWEN} | WITH_TEMPLATE | behind(
            models("Pooling"),
            modality_config=MESSAGES,
            processing_kwargs={"chat_template": {"add_generation_prompt": True}},
        ),
        {"spec.conversation.options": {"add_generation_prompt": True}, "spec.pools_instruction": True},
    ),
    (
        saved_from("Qwen3Model", model_type="qwen3") | WITH_TEMPLATE | behind(
            models("Pooling"), modality_config={"text": STATES, "message": {**STATES, "format": "flat"}}
        ),
        {"spec.uses_chat_template": True, "spec.conversation.structured": False},
    ),
    (
        {CONFIG: COLQWEN},
        {"spec.images": QWEN_PATCHES, "spec.scoring": "late_interaction"} | sizes("colqwen2", 151936, 32768),
    ),
    (
        {CONFIG: COLPALI, OF_TOKENIZER: {"model_max_length": 10**30}},
        {"spec.images": ImageTower(image_size=448, patch_size=14, has_class_token=False),
         "spec.placeholder_id": 257152} | sizes("colpali", 257216, 8192),
    ),
    (
        {CONFIG: COLQWEN, "processor_config.json": {
            "query_prefix": "Question: ", "visual_prompt_prefix": "<|image_pad|>"}},
        {"spec.text_prefix": "Question: ", "spec.page_text": "<|image_pad|>"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", [*EVERY_KIND, *PUBLISHED, *CLASSIFIERS, *RETRIEVAL, *IMAGES])
def test_files_declare_a_kind_of_model_and_its_settings(row: Any, tmp_path: Path):
    files, expected, *settings = row
    write_files(tmp_path / "model", {CONFIG: BARE} | files)
    read = read_model_folder(tmp_path / "model", ModelConfig(**(settings[0] if settings else {})))
    assert {name: attrgetter(name)(read) for name in expected} == expected


def test_inference_free_splade_looks_queries_up(tmp_path: Path):
    write_files(tmp_path, {CONFIG: BARE} | router())
    spec = read_model_folder(tmp_path).spec
    assert [spec.sparse_params(each) for each in ("query", "document", None)] == [
        SparseLookup(), SparseEmbed(), SparseEmbed(),
    ]  # fmt: skip
