"""Every text architecture of transformers that has a base model, as a tiny model with random weights."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.models.model_families import MAX_LENGTH, bert_tokenizer

AGREEING = [
    "afmoe", "albert", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba",
    "beam", "bert", "bert-generation", "big_bird", "biogpt", "bitnet", "bloom", "camembert", "canine",
    "clip_text_model", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "convbert",
    "cosmos3_edge_text", "cpmant", "ctrl", "cwm", "data2vec-text", "dbrx", "deberta", "deberta-v2", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "diffllama", "distilbert", "doge", "dory", "dots1",
    "dots3_note_text", "electra", "embedding_gemma2_text", "ernie", "ernie4_5", "ernie4_5_moe", "esm", "esmc",
    "eurobert", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flaubert", "flex_olmo",
    "flint", "fnet", "funnel", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text",
    "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_image_text", "glm_moe_dsa",
    "glm_ocr_text", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj",
    "granite", "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "gte", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3",
    "hy_v4", "hyperclovax", "ibert", "imagegpt", "inkling2_loop_text", "inkling2_text", "inkling_text", "internlm3",
    "iquestcoder", "jais2", "jamba", "jetmoe", "jina_embeddings_v3", "kimi_linear", "kolibri1", "laguna", "lara_mini",
    "layoutlm", "layoutlmv3", "lfm2", "lfm2_moe", "lfm3", "lilt", "llama", "llama4_text", "longcat_flash",
    "longformer", "luke", "mamba", "mamba2", "markuplm", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3",
    "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral4",
    "mistral_large4_text", "mixtral", "mobilebert", "modernbert", "modernbert-decoder", "molmo2_text", "mpnet", "mpt",
    "mra", "mt5", "muse_glimmer_text", "muse_spark_text", "nanochat", "nemotron", "nemotron_h", "neomme", "nomic_bert",
    "nystromformer", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "openai-gpt", "openai_privacy_filter", "opt",
    "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text",
    "recurrent_gemma", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "sarvam_mla",
    "sarvam_moe", "seed_oss", "smollm3", "solar_open", "splinter", "squeezebert", "stablelm", "starcoder2", "t5",
    "tapas", "tipsv2_text_model", "ultrabert", "umt5", "vaultgemma", "visual_bert", "xglm", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xlstm", "yoso", "youtu", "zamba", "zamba2", "zaya",
]  # fmt: skip
"""Model types that are served, with the states of transformers."""

ENCODER_DECODERS = [
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "fastspeech2_conformer", "led", "longt5",
    "m2m_100", "marian", "mbart", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "seamless_m4t",
    "seamless_m4t_v2", "switch_transformers", "t5gemma", "udop",
]  # fmt: skip

REFUSED: Mapping[str, str] = {
    **dict.fromkeys(ENCODER_DECODERS, "is an encoder–decoder, which is not supported"),
    "blip_2_qformer": "cannot compute its first batch: .*'query_embeds'",
    "bros": "cannot compute its first batch: You have to specify bbox",
    "dpr": "cannot compute its first batch: .*has no attribute 'last_hidden_state'",
    "higgs_audio_v2": "cannot compute its first batch: .*has no attribute 'last_hidden_state'",
    "lxmert": "cannot compute its first batch: `visual_feats` cannot be `None`",
    "reformer": "reformer hashes tokens at random, so a text would get another vector each time",
    "vilt": "cannot compute its first batch: You have to specify either pixel_values or image_embeds",
    "xmod": "cannot compute its first batch: Input language unknown",
}
"""Model types that are refused, and a part of the message."""

UNTRIED = {
    "blt": "reads bytes in patches, by a second model",
    "glm5_next_text": "has sizes that fit no tiny model",
    "hy_v4_vl_text": "has sizes that fit no tiny model",
    "layoutlmv2": "requires detectron2",
    "qwen4_exp_text": "has sizes that fit no tiny model",
    "vits": "speaks texts",
}

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"], 32),
    **dict.fromkeys(
        ["intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size", "dim_ff"], 48
    ),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], 2),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads"], 2),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"], 16),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    **dict.fromkeys(["n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "num_key_value_heads"], 1),
    **dict.fromkeys(["num_experts_per_tok", "num_experts_per_token", "moe_topk", "type_vocab_size"], 2),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "model_max_length"], 64),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"], 8),
    **dict.fromkeys(["head_dim", "v_head_dim", "dim_head", "d_head", "mamba_d_head"], 16),
    **dict.fromkeys(["initializer_range", "init_std"], 0.3),
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
"""Of a config's fields, as far as it has them. A wide initializer: else layers would add next to nothing."""

LATENT = {"num_key_value_heads": 2, "head_dim": 8}
"""Of attention with latent keys and values."""


def axes(*sections: int) -> Mapping[str, Any]:
    """Rotary positions of several axes, as models that also read images have them."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}}


MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8}

OTHER_SIZES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(["glm4v_text", "glm_ocr_text", "glm_image_text", "cosmos3_edge_text"], axes(2, 3, 3)),
    **dict.fromkeys(["qwen2_vl_text", "qwen2_5_vl_text", "hunyuan_vl_text"], axes(2, 3, 3)),
    "diffllama": {"num_key_value_heads": 2},
    "esmc": {"num_key_value_heads": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "canine": {"num_hash_buckets": 64},
    "codegen": {"n_head": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "glm4v_moe_text": axes(2, 1, 1),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**MAMBA, "shared_intermediate_size": 48},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 2},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 8},
    "mamba2": {"num_heads": 4, "n_groups": 1, "state_size": 8},
    "markuplm": {"max_depth": 4},
    "mistral4": {"head_dim": 16},
    "muse_spark_text": {"moe_hidden_size": 32},
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
        "moe_shared_expert_intermediate_size": 16,
    },
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 16, "feed_forward_size": 48,
        "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 2,
    },
    "roc_bert": {
        "shape_vocab_size": 16, "pronunciation_vocab_size": 16, "pronunciation_embed_dim": 8, "shape_embed_dim": 8,
    },
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What some architectures need besides ``SIZES``: sizes that fit each other."""


def text_architectures() -> Iterator[str]:
    """Yield the model types that have a base model which reads ids of a vocabulary, and no other inputs."""
    for name in MODEL_MAPPING_NAMES:
        config_class = transformers.CONFIG_MAPPING[name]
        towers = [part for part in config_class.sub_configs if part not in OF_TEXT]
        if towers or not ("vocab_size" in fields_of(config_class) or name == "canine"):
            continue
        try:
            if model_class(config_class).main_input_name == "input_ids":
                yield name
        except (ImportError, ValueError):  # of audio, or broken in this version
            continue


def fields_of(config_class: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def model_class(config_class: Any) -> Any:
    found: Any = transformers.MODEL_MAPPING[config_class]
    return found[0] if isinstance(found, tuple | list) else found


OF_TEXT = [
    "attn_config", "ffn_config", "patcher_config", "encoder_config", "decoder_config", "global_config",
    "esmfold_config", "encoder", "decoder",
]  # fmt: skip
"""Configs within that of a text model."""


def tiny_config(name: str, vocab_size: int) -> Any:
    config_class = transformers.CONFIG_MAPPING[name]
    known = fields_of(config_class)
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if "kv_lora_rank" in known:
        sizes |= LATENT
    default = config_class()
    if "layer_types" in known and default.layer_types:
        sizes["layer_types"] = [default.layer_types[0], default.layer_types[-1]]
    sizes |= {key: vocab_size for key in ("vocab_size", "vocab_size_per_layer_input") if key in known}
    return config_class(**sizes | OTHER_SIZES.get(name, {}))


def write_architecture(folder: Path, name: str) -> Path:
    """Write a model; of an encoder–decoder its config alone."""
    of_canine = partial(transformers.CanineTokenizer, model_max_length=MAX_LENGTH)
    tokenizer = of_canine() if name == "canine" else bert_tokenizer()
    tokenizer.save_pretrained(folder)
    if name in ENCODER_DECODERS:
        transformers.CONFIG_MAPPING[name]().save_pretrained(folder)
        return folder
    config = tiny_config(name, len(tokenizer))
    model = model_class(type(config))
    with torch.device("meta"):
        parameters = sum(each.numel() for each in model(config).parameters())
    assert parameters < 1e6, f"{name} has {parameters} parameters"
    torch.manual_seed(0)
    model(config).save_pretrained(folder)
    return folder
