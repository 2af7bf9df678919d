"""Files of a model's folder that cannot be read, or would be misread, are refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.model_folders import BARE, POOLING, TRANSFORMER, modules_json, write_files
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.folder import read_model_folder

pytestmark = pytest.mark.unit

CONFIG, OWN, TEXTS, MODULES, METADATA, TOKENIZER = (
    "config.json", "sentence_bert_config.json", "config_sentence_transformers.json", "modules.json",
    "artifact.metadata", "tokenizer.json",
)  # fmt: skip
Files = dict[str, Any]


def saved_from(*names: str, **config: Any) -> Files:
    """A folder's config.json that names the classes that the weights were saved from."""
    return {CONFIG: BARE | {"architectures": list(names)} | config}


def behind(*modules: tuple[str, str], **own: Any) -> Files:
    """Modules behind a transformer, with the transformer module's settings."""
    return {MODULES: modules_json(TRANSFORMER, *modules), OWN: own}


def models(name: str) -> tuple[str, str]:
    return f"sentence_transformers.models.{name}", "1"


ROUTES_OF_DENSE = {
    "types": {"query_0": "sentence_transformers.models.Dense", "doc_0": "sentence_transformers.models.Dense"},
    "structure": {"query": ["query_0"], "doc": ["doc_0"]},
}
"""Of an Asym of Dense modules behind a transformer that both routes share."""

UNREADABLE = [
    *(
        ({name: text}, f"{name} {said}")
        for name in (CONFIG, OWN, TEXTS)
        for text, said in (("{", "cannot be read"), ("[]", "is not a JSON object"))
    ),
    *(
        ({MODULES: text}, r"modules\.json cannot be read")
        for text in ("{", "3", '[{"type": "sentence_transformers.models.Transformer"}]', '["x"]')
    ),
    *(({name: "[" * 200_000}, rf"{name} cannot be read: .*recursion") for name in (CONFIG, OWN, MODULES)),
    *(
        ({CONFIG: BARE | config}, rf"{name} is \d+ in config\.json; its weights allow {most}\.")
        for config, name, most in (
            ({"num_hidden_layers": 10**7}, "num_hidden_layers", 1000),
            ({"text_config": {"n_layer": 1001}}, "n_layer", 1000),
            ({"vision_config": {"depths": [2, 10**9]}}, "depths", 1000),
            ({"num_local_experts": 10**12}, "num_local_experts", 1000),
            ({"num_labels": 10**9}, "num_labels", 2**20),
        )
    ),
    ({MODULES: modules_json(TRANSFORMER, *[POOLING] * 20_000)}, r"modules\.json has 20001 modules; the limit is 100"),
    (
        {
            MODULES: modules_json(("sentence_transformers.models.Router", "")),
            "router_config.json": {"types": {}, "structure": {"query": ["x"] * 20_000}},
        },
        "has 20000 modules; the limit is 100",
    ),
    ({MODULES: []}, "does not begin with a Transformer module"),
    ({MODULES: modules_json(POOLING)}, "does not begin with a Transformer module"),
    *(
        (behind((name, "1")), f"{name} is not one of sentence-transformers' own")
        for name in ("custom_st.Transformer", "Transformer", "sentence_transformers_x.Pooling")
    ),
    *(
        (behind((POOLING[0], path)), "points outside the model's folder")
        for path in ("../elsewhere", "/etc", "1_Pooling/../../elsewhere")
    ),
]

KEYS = [
    ({OWN: document}, f"{OWN}: {said}")
    for document, said in (
        ({"tokenizer_name_or_path": "x"}, "tokenizer_name_or_path is 'x'.*own tokenizer"),
        ({"tokenizer_args": {"do_lower_case": False}}, "tokenizer_args: do_lower_case is False.*be tokenised"),
        ({"processor_kwargs": {"model_max_length": 9}}, "processor_kwargs: model_max_length is 9"),
        ({"config_args": {"is_causal": False}}, "config_args: is_causal is False.*would compute"),
        ({"config_kwargs": {"rope_scaling": {"factor": 2}}}, "config_kwargs: rope_scaling is"),
        ({"model_args": {"variant": "fp16"}}, "model_args: variant is 'fp16'.*would be loaded"),
        ({"model_kwargs": "x"}, "model_kwargs is 'x'"),
        ({"telepathy": True}, "telepathy is True"),
    )
] + [
    (
        behind(POOLING) | {"1_Pooling/config.json": {"pooling_mode_telepathy": True}},
        r"1_Pooling/config\.json: pooling_mode_telepathy is True",
    ),
    ({"adapter_config.json": {"peft_type": "LORA", "r": 4}}, r"adapter_config\.json: .* at the top of the served"),
    *(
        ({CONFIG: {"model_type": model_type, name: value}}, rf"config\.json: {name} is {value!r}, but transformers'")
        for model_type, name, value in (
            ("nomic_bert", "num_experts", 8), ("nomic_bert", "qkv_proj_bias", True), ("nomic_bert", "prenorm", True),
            ("nomic_bert", "rotary_emb_fraction", 0.5), ("nomic_bert", "activation_function", "gelu"),
            ("new", "logn_attention_scale", True), ("new", "layer_norm_type", "rms_norm"),
            ("new", "position_embedding_type", "absolute"), ("llama_bidirec", "temperature", 0.5),
        )
    ),
    ({CONFIG: {"model_type": "llama_bidirec", "pooling": "weighted_avg"}}, "pooling is 'weighted_avg'.*avg, cls, last"),
    *(
        ({CONFIG: {"model_type": "new", "rope_scaling": scaling, "hidden_size": 64} | sizes}, "rope_scaling is .*Error")
        for sizes, scaling in (
            ({"num_attention_heads": 2}, {"type": "ntk", "factor": 2, "mixed_b": 1}),
            ({"num_attention_heads": 2}, {"type": "yarn", "factor": 2}),
            ({"num_attention_heads": 2}, {"type": "ntk", "factor": 1e999}),
            ({"num_attention_heads": 0}, {"type": "ntk", "factor": 2}),
            ({}, {"type": "ntk", "factor": 2}),
        )
    ),
    (
        {CONFIG: {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}},
        "position_embedding_type is 'rotary'.*jina-embeddings-v3-hf",
    ),
    (
        {CONFIG: {"model_type": "xlnet", "vocab_size": 30, "max_position_embeddings": -1},
         "tokenizer_config.json": {"model_max_length": 10**30}},
        "set it with --max-model-len",
    ),
    *(
        (behind(*modules), said)
        for modules, said in (
            ((), r"modules\.json: the transformer is followed by no module; accepted: optionally WeightedLayerPool"),
            *(
                ((models(name), POOLING), f"is followed by {name}, Pooling; accepted: optionally")
                for name in ("CNN", "LSTM", "WordWeights", "Normalize")
            ),
            *(
                ((POOLING, models(name)), f"requires {name}, which cannot be loaded; accepted: Dense")
                for name in ("CNN", "WordWeights", "WeightedLayerPooling", "Pooling", "Telepathy")
            ),
        )
    ),
    *(
        (
            behind(POOLING, models(name)) | {f"1/{file}": ROUTES_OF_DENSE},
            r"requires Router, .* The routes of the Router or Asym are query: Dense; doc: Dense; accepted: Transformer",
        )
        for name, file in (("Asym", "config.json"), ("Router", "router_config.json"))
    ),
    *(
        ({MODULES: modules_json(models(name), POOLING)}, f"does not begin with a Transformer module, but with {name}")
        for name in ("BoW", "WordEmbeddings", "Dropout")
    ),
    *(
        (behind(POOLING, models(name)) | {"1/config.json": {key: value}}, said)
        for name, key, value, said in (
            ("Normalize", "module_input_name", "token_embeddings", "Normalize maps 'token_embeddings' to"),
            ("Dense", "module_output_name", "scores", "Dense maps 'sentence_embedding' to 'scores'"),
            ("LayerNorm", "eps", 1e-3, r"1/config\.json: eps is 0\.001"),
            ("Dropout", "p", 0.5, r"1/config\.json: p is 0\.5"),
        )
    ),
    (
        behind(models("WeightedLayerPooling"), POOLING) | {CONFIG: BARE | {"output_hidden_states": [1, 2]}},
        r"config\.json: output_hidden_states is \[1, 2\]; with WeightedLayerPooling it may be true or false",
    ),
    ({}, "--max-model-len 513 exceeds the 512 positions", {"max_model_len": 513}),
    ({OWN: {"transformer_task": "fill-mask"}}, "task is 'fill-mask'; this kind of model needs feature-extraction"),
    ({OWN: {"query_length": 32}}, "requires query_length"),
    ({OWN: {"query_expansion": {"length": 32}}}, "requires query_expansion"),
    ({OWN: {"processing_kwargs": {"text": {"padding": "max_length"}}}}, "requires processing_kwargs text.padding"),
    ({TEXTS: {"prompts": {"web": "w"}, "default_prompt_name": "x"}}, "default_prompt_name is .x.; .* document, query"),
]  # fmt: skip

# -- classifiers and rerankers --------------------------------------------------------------------------------

LOGIT_SCORE = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "1"
WORDS = {"yes": 3, "no": 4, "<|im_start|>": 5, "<|im_end|>": 6}


def cross_encoder(task: str, *modules: tuple[str, str], config: Any = None, **own: Any) -> Files:
    whole = {TEXTS: {"model_type": "CrossEncoder"}, "1/config.json": config or {}}
    return saved_from("X") | whole | behind(*modules, transformer_task=task, **own)


SCORES = {"out_features": 1, "module_output_name": "scores"}
TOWER = {"method": "get_text_features", "method_output_name": "pooler_output"}
DENSE = models("Dense")


def scoring_modules(**own: Any) -> Files:
    return cross_encoder("feature-extraction", POOLING, DENSE, config=SCORES, **own)


def vocabulary(words: Any) -> Files:
    return {TOKENIZER: {"model": {"vocab": words}}}


def pooler(**tokens: Any) -> dict[str, str]:
    return {"pooler_config": json.dumps(tokens)}


STEPS = {"step_tag_id": 9, "returned_token_ids": (3,)}

CLASSIFIERS = [
    *(
        (saved_from("BertForSequenceClassification", **config), said)
        for config, said in (
            ({"id2label": {"0": "a", "2": "b"}}, r"id2label of config\.json has the indices 0, 2"),
            ({"problem_type": "ranking"}, r"problem_type of config\.json is 'ranking'"),
            ({"sentence_transformers": {"activation_fn": "os.system"}}, r"os\.system is not a module of torch\.nn"),
        )
    ),
    *(
        (saved_from("BertForSequenceClassification"), "apply only to embedding models", settings)
        for settings in ({"pooling": "cls"}, {"normalize": True}, {"normalize": False})
    ),
    *(
        (cross_encoder(task, models("Pooling")), f"does {task}, followed by Pooling")
        for task in ("sequence-classification", "any-to-any")
    ),
    *(
        (cross_encoder("feature-extraction", *modules, config=config), said)
        for modules, config, said in (
            ((), None, r"modules\.json: the transformer is followed by no module; accepted"),
            ((models("Dense"),), SCORES, "is followed by Dense"),
            ((POOLING,), None, "Pooling has out_features None; the last module .* must be a Dense"),
            ((POOLING, models("Normalize")), {"module_output_name": "scores"}, "Normalize has out_features None"),
            *(
                ((POOLING, DENSE), SCORES | {"out_features": size}, f"Dense has out_features {size!r}")
                for size in (0, 2**20 + 1, "1", True)
            ),
            ((POOLING, DENSE), {"out_features": 1}, "maps 'sentence_embedding' to 'sentence_embedding'; accepted"),
            ((POOLING, DENSE), SCORES | {"module_input_name": "x"}, "maps 'x' to 'scores'; accepted"),
            ((POOLING, DENSE, models("Normalize")), SCORES, "Dense maps 'sentence_embedding' to 'scores'"),
        )
    ),
    *(
        (scoring_modules(**own) | files, said, *settings)
        for own, files, said, *settings in (
            ({"modality_config": {"text": TOWER}}, {}, "computes text by get_text_features"),
            ({"processing_kwargs": {"text": {"max_length": 3}}}, {}, "requires text"),
            ({"query_length": 8}, {}, "requires query_length"),
            ({}, {CONFIG: BARE | {"vision_config": {}}}, r"modules\.json: .* that reads images \(vision_config"),
            ({}, {CONFIG: BARE | {"problem_type": "ranking"}}, "problem_type"),
            ({}, {"1_Pooling/config.json": {"include_prompt": False}}, "config.json: include_prompt is false"),
            ({}, {}, "apply only to embedding models", {"pooling": "cls"}),
            ({}, {}, "apply only to embedding models", {"normalize": True}),
        )
    ),
    *(
        (saved_from(name), f"{name} is not (an embedding model|supported; supported page)")
        for name in (
            "BertForQuestionAnswering", "BertForMultipleChoice", "BertForNextSentencePrediction",
            "ViTForImageClassification", "Wav2Vec2ForCTC", "ColModernVBertForRetrieval", "ColQwen3ForRetrieval",
            "Qwen2ForRewardModel",
        )
    ),
    (saved_from("BertModel"), r"--task classify: .* support only embed, score, token_embed", {"task": "classify"}),
    *(
        (
            saved_from("Qwen3ForCausalLM") | vocabulary({k: v for k, v in WORDS.items() if k != word}),
            "vocabulary has no ",
            {"task": "score"},
        )
        for word in WORDS
    ),
    *(
        (
            saved_from(name) | vocabulary(WORDS),
            rf"score: the prompt of a {name} is not known.* not mxbai-rerank-v2, bge-reranker-v2-gemma or monoT5",
            {"task": "score"},
        )
        for name in ("Qwen2ForCausalLM", "GemmaForCausalLM", "T5ForConditionalGeneration", "GPT2LMHeadModel")
    ),
    *(
        (cross_encoder("text-generation", *modules, config=config), said)
        for modules, config, said in (
            ((), None, "requires one LogitScore module, not none"),
            ((models("Pooling"),), None, "module, not \\['Pooling'\\]"),
            ((LOGIT_SCORE,), None, "has no true_token_id"),
            ((LOGIT_SCORE,), {"true_token_id": 1, "module_input_name": "logits"}, "works on 'logits'"),
        )
    ),
    *(
        (cross_encoder("sequence-classification", processing_kwargs=options), f"processing_kwargs requires {said}")
        for options, said in (
            ({"text": {"max_length": 3}}, "text"),
            ({"chat_template": {"truncation": False}}, "truncation"),
        )
    ),
    (saved_from("Qwen2ForProcessRewardModel") | vocabulary(WORDS), "set step_tag_id in --pooler-config"),
    *(
        (saved_from(name), said, pooler(**tokens))
        for name, tokens, said in (
            ("Qwen2ForProcessRewardModel", STEPS, "has a classifier"),
            ("MistralForCausalLM", {"step_tag_id": 9}, "set both"),
            ("MistralForCausalLM", {"returned_token_ids": (3,)}, "set both"),
            ("MistralForCausalLM", {"step_tag_id": 9, "returned_token_ids": (3, 30)}, "Token 30 is outside"),
            ("BertModel", STEPS, "require a causal language model"),
        )
    ),
]  # fmt: skip

# -- retrieval ------------------------------------------------------------------------------------------------

PYLATE_DENSE = ("pylate.models.Dense.Dense", "1")
MASK = ("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", "2_MultiVectorMask")
EXPANSION = {"strategy": "min", "length": 8}
MULTI_VECTOR = {TEXTS: {"model_type": "MultiVectorEncoder"}}


def multi_vector(module: tuple[str, str], config: object = None) -> Files:
    return MULTI_VECTOR | behind(module, MASK) | {f"{module[1]}/config.json": config or {}}


TOKEN_POOLING = "sentence_transformers.multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling"

LATE_INTERACTION = [
    *(
        (MULTI_VECTOR | behind(MASK, (TOKEN_POOLING, "2")) | {"2/config.json": {key: value}}, f"{key} is {said}")
        for key, value, said in (
            ("pool_factor", 0, "0; it must be a number of at least 1"),
            ("pool_factor", True, "True"),
            ("pool_factor", "2", "'2'"),
            ("pool_factor", 1e400, "inf"),
            ("num_protected_tokens", -1, "-1; it must be an integer of at least 0"),
            ("num_protected_tokens", 1.5, "1.5"),
            ("normalize_embeddings", 1, "1; it must be true or false"),
            ("tasks", ["document", "passage"], ".*; it must be a list of query and document"),
            ("tasks", "passage", "'passage'"),
            ("tasks", 3, "3"),
            ("linkage", "single", "'single', which is not supported"),
        )
    ),
    (
        behind((TOKEN_POOLING, "1")) | {TEXTS: {"query_prefix": "[Q] "}},
        "with a HierarchicalTokenPooling module is not supported",
    ),
    # not served as embedding models
    *((saved_from(name), "has no projection") for name in ("ColBERT", "ColBERTModernBertModel")),
    ({METADATA: {"doc_maxlen": 90}}, "has no projection"),
    (
        saved_from("HF_ColBERT", auto_map={"AutoModel": "jinaai/xlm-roberta-flash--modeling.XLMRobertaModel"}),
        "only with --trust-remote-code",
    ),
    *(
        (multi_vector(module), f"with a {name} module")
        for module, name in (
            ((TOKEN_POOLING, "1"), "HierarchicalTokenPooling"),  # not the last
            (models("LayerNorm"), "LayerNorm"),
            (POOLING, "Pooling"),
        )
    ),
    (multi_vector(PYLATE_DENSE, {"module_input_name": "sentence_embedding"}), "Dense maps 'sentence_emb"),
    (multi_vector(PYLATE_DENSE, {"module_output_name": "elsewhere"}), "to 'elsewhere'"),
    (multi_vector(("someone.elses.Dense", "1")), "someone.elses.Dense is not one of"),
    *(
        (MULTI_VECTOR | behind(MASK, **own), said)
        for own, said in (
            *(
                ({"query_expansion": expansion}, "query_expansion .* is not supported")
                for expansion in ({"strategy": "double", "length": 8}, {"strategy": "fixed"}, EXPANSION | {"side": 1})
            ),
            ({"query_expansion": EXPANSION, "query_length": 7}, "truncated to 7 tokens but expanded"),
            ({"processing_kwargs": {"text": {"padding": False}}}, "processing_kwargs"),
            ({"transformer_task": "fill-mask"}, "task is 'fill-mask'"),
        )
    ),
    (saved_from("HF_ColBERT") | {"tokenizer_config.json": {"padding_side": "left"}}, "expansion on the left"),
    (behind() | {TEXTS: {"query_prefix": "[Q] "}}, "no projection of the tokens"),
]

SPARSE = "sentence_transformers.sparse_encoder.models"
TYPES = {
    "table": "SparseStaticEmbedding", "table2": "SparseStaticEmbedding", "../elsewhere": "SparseStaticEmbedding",
    "": "MLMTransformer", "mlm2": "MLMTransformer", "splade": "SpladePooling",
}  # fmt: skip
FREE = {"query": ["table"], "document": ["", "splade"]}


def router(routes: Any = FREE, **parameters: object) -> Files:
    """A Router whose transformer lies in the root."""
    types = {name: f"{SPARSE}.{TYPES[name]}" for names in routes.values() for name in names if name in TYPES}
    config = {"types": types, "structure": routes, "parameters": {"default_route": "document"} | parameters}
    return {
        MODULES: modules_json(("sentence_transformers.models.Router", "")),
        "router_config.json": config,
    }


def splade(pooling: object = None, task: str = "fill-mask", **own: object) -> Files:
    modules = behind((f"{SPARSE}.SpladePooling", "1"), transformer_task=task, **own)
    return modules | {"1/config.json": pooling or {}}


def autoencoder(config: Files, **own: object) -> Files:
    modules = behind(POOLING, (f"{SPARSE}.SparseAutoEncoder", "2"), **own)
    return modules | {"2/config.json": {"input_dim": 32, "hidden_dim": 64, "k": 8} | config}


SPARSE_MODELS = [
    (splade({"pooling_strategy": "mean"}), "SpladePooling by mean of relu"),
    (splade({"activation_function": "gelu"}), "SpladePooling by max of gelu"),
    (splade(task="feature-extraction"), "this kind of model needs fill-mask"),
    (splade(query_length=7), "requires query_length"),
    (
        behind((f"{SPARSE}.SparseAutoEncoder", "2"), POOLING) | {TEXTS: {"model_type": "SparseEncoder"}},
        "Transformer, SparseAutoEncoder, Pooling is not supported",
    ),
    (behind((f"{SPARSE}.SparseAutoEncoder", "2")), "a SparseAutoEncoder follows Transformer and Pooling"),
    (autoencoder({}, transformer_task="fill-mask"), "this kind of model needs feature-extraction"),
    (autoencoder({}, modality_config={"text": TOWER}), "computes text by get_text_features"),
    *(
        (autoencoder(config), said)
        for config, said in (
            ({"k": 65}, "at most hidden_dim latents can be active, not 65"),
            ({"k": 0}, r"k are \[32, 64, 0\]"),
            ({"k": True}, r"k are \[32, 64, True\]"),
            ({"hidden_dim": None}, r"k are \[32, None, 8\]"),
            ({"input_dim": "32"}, "input_dim, hidden_dim and k are"),
            ({"activation": "gelu"}, "activation is 'gelu', which is not supported"),
        )
    ),
    *(
        (autoencoder({}) | {TEXTS: {"max_active_dims": wrong}}, said)
        for wrong, said in (
            (0, "max_active_dims is 0; it must be an integer of at least 1"),
            ("9", "max_active_dims is '9'"),
            (65, "not 65"),
        )
    ),
    (splade() | {TEXTS: {"max_active_dims": -3}}, "max_active_dims is -3; it must be an integer of at least 1"),
    *(
        (router(routes), said)
        for routes, said in (
            ({"query": ["table"], "document": ["table2"]}, "0 transformers"),
            ({"query": ["", "splade"], "document": ["mlm2", "splade"]}, "and one a SPLADE"),
            ({"query": ["", "splade"], "document": ["", "splade"]}, "one route is a SparseStaticEmbedding"),
            ({"query": ["table"], "passage": ["", "splade"]}, "has no route 'document'"),
            ({"query": ["table"], "document": ["splade", ""]}, "SpladePooling, MLMTransformer is not supported"),
            ({"query": ["nothing"]}, "Router of .* cannot be read"),
            ({"query": ["../elsewhere"]}, "outside the model's folder"),
        )
    ),
    (
        router({"query": ["table"], "passage": ["", "splade"]}, default_route="passage"),
        "routes other than query and doc",
    ),
    (router(route_mappings={"(None, 'text')": "else"}), "has no route 'else'"),
    (router() | {"table/config.json": {"path": "idf.json"}}, "path is 'idf.json', which is not supported"),
    (router() | vocabulary({"a": 0}) | {"table/tokenizer.json": {"model": {"vocab": {"b": 0}}}}, "another tokenizer"),
    (
        {"sparse_linear.pt": "", "colbert_linear.pt": "", TOKENIZER: {"added_tokens": [{"id": 0, "content": "<s>"}]}},
        "special tokens </s>, <pad>, <unk>",
    ),
]

# -- images ---------------------------------------------------------------------------------------------------

TOWERS = {side: {"method": f"get_{side}_features", "method_output_name": "pooler_output"} for side in ("text", "image")}
STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
MESSAGES = {"message": {**STATES, "format": "structured"}}
CLIP = {CONFIG: {"model_type": "clip", "architectures": ["CLIPModel"]}}
SIGLIP = {CONFIG: {"model_type": "siglip", "architectures": ["SiglipModel"]}}
QWEN = {"model_type": "qwen2_vl", "architectures": ["Qwen2VLForConditionalGeneration"], "vocab_size": 151936,
        "max_position_embeddings": 32768}  # fmt: skip
COLQWEN = {"model_type": "colqwen2", "architectures": ["ColQwen2ForRetrieval"], "vlm_config": QWEN}

IMAGES = [
    *(
        ({CONFIG: {"model_type": kind, "architectures": [f"{kind}ForImageClassification"]}}, "Classification is not s")
        for kind in ("clip", "siglip", "siglip2")
    ),
    *(
        (CLIP | behind(**own), said)
        for own, said in (
            ({}, "computes text by None and takes its None"),
            ({"modality_config": {**TOWERS, "text": STATES}}, "computes text by forward and takes its last_hidden"),
            ({"modality_config": {"text": TOWERS["text"]}}, "computes image by None"),
            ({"modality_config": TOWERS, "module_output_name": "token_embeddings"}, "outputs 'token_embeddings'"),
            ({"modality_config": TOWERS, "processing_kwargs": {"image": {"do_resize": False}}}, "image.do_resize"),
            ({"modality_config": TOWERS, "processing_kwargs": {"text": {"padding": False}}}, "'padding': False"),
            ({"modality_config": TOWERS, "query_length": 8}, "requires query_length"),
        )
    ),
    ({CONFIG: CLIP[CONFIG] | {"vision_config": {"image_size": [224, 448]}}}, "must be squares"),
    (
        SIGLIP | {"tokenizer_config.json": {"padding_side": "left"}},
        "pads texts on the left and masks the padding",
    ),
    ({CONFIG: QWEN | {"architectures": ["Qwen2VLForImageClassification"]}}, "is not an embedding model"),
    *(
        ({CONFIG: QWEN} | behind(models("Pooling"), **own), said)
        for own, said in (
            ({"modality_config": MESSAGES, "processing_kwargs": {"image": {"max_pixels": 9}}}, "kwargs requires image"),
            ({"modality_config": MESSAGES, "processing_kwargs": {"chat_template": {"padding": True}}}, "padding"),
            ({"transformer_task": "any-to-any"}, "task is 'any-to-any'"),
            ({"modality_config": {"message": {**STATES, "method": "generate"}}}, "computes message by generate"),
            ({"modality_config": {**MESSAGES, "text": TOWER}}, "computes text by get_text_features"),
        )
    ),
    ({CONFIG: COLQWEN | {"vlm_config": QWEN | {"model_type": "qwen3_vl"}}}, "A ColQwen2 of qwen3_vl"),
    *(
        ({CONFIG: COLQWEN} | behind(*modules, transformer_task=task, **own), said)
        for task, modules, own, said in (
            ("feature-extraction", (), {}, "does feature-extraction"),
            ("retrieval", (models("Dense"),), {}, "followed by .*Dense"),
            ("retrieval", (), {"modality_config": {"text": STATES}}, "takes its last_hidden_state"),
            ("retrieval", (), {"query_length": 8}, "requires query_length"),
        )
    ),
]

REFUSED = [*UNREADABLE, *KEYS, *CLASSIFIERS, *LATE_INTERACTION, *SPARSE_MODELS, *IMAGES]


@pytest.mark.parametrize("row", REFUSED, ids=[row[1] for row in REFUSED])
def test_files_that_cannot_be_read_or_would_be_misread_are_refused_by_name(row: Any, tmp_path: Path):
    files, said, *settings = row
    write_files(tmp_path / "model", {CONFIG: BARE} | files)
    with pytest.raises(ModelLoadError, match=said):
        read_model_folder(tmp_path / "model", ModelConfig(**(settings[0] if settings else {})))


@pytest.mark.parametrize("is_split", [False, True])
def test_a_model_may_have_as_many_layers_as_its_weights_are_tensors(is_split: bool, tmp_path: Path):
    names = [f"layer.{number}" for number in range(1200)]
    write_files(
        tmp_path, {CONFIG: BARE | {"num_hidden_layers": 1200}, "tokenizer_config.json": {"model_max_length": 9}}
    )
    if is_split:
        write_files(tmp_path, {"model.safetensors.index.json": {"weight_map": dict.fromkeys(names, "part")}})
    else:
        save_file(dict.fromkeys(names, np.zeros(1)), tmp_path / "model.safetensors")
    assert read_model_folder(tmp_path).transformer_config["num_hidden_layers"] == 1200


@pytest.mark.parametrize(
    "change",
    [
        {"text_config": "x"},
        {"architectures": [1]},
        {"architectures": ["BertForSequenceClassification"], "id2label": 5},
        {"quantization_config": "fp8"},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}},
        {"max_position_embeddings": "many"},
    ],
    ids=str,
)
def test_values_of_another_type_than_expected_are_refused(change: dict[str, Any], tmp_path: Path):
    write_files(tmp_path / "model", {CONFIG: BARE | change})
    with pytest.raises(ModelLoadError, match=r"model contains a value of an unexpected type: \w+Error"):
        read_model_folder(tmp_path / "model")


def test_a_path_without_a_model_is_an_error(tmp_path: Path):
    write_files(tmp_path / "model", {CONFIG: BARE})
    for path, said in (
        (tmp_path / "nowhere", "nowhere is not a folder"),
        (tmp_path / "model" / "config.json", r"config\.json is not a folder"),
        (tmp_path, r"holds no config\.json: it is not a transformers model"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            read_model_folder(path)


def test_a_path_that_is_not_utf_8_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / os.fsdecode(b"m\xff")
    write_files(folder, {CONFIG: BARE})
    monkeypatch.chdir(folder)
    for path in (folder, Path()):
        with pytest.raises(ModelLoadError, match=r"m\\udcff' is not UTF-8\.$"):
            read_model_folder(path)


def test_a_link_out_of_the_folder_is_an_error(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    write_files(tmp_path / "model", {CONFIG: BARE} | behind(POOLING))
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match="points outside the model's folder"):
        read_model_folder(tmp_path / "model")
