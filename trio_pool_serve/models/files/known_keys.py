"""The keys of a model's files that are honoured, or that do not change sentence-transformers' outputs.

Any other key is rejected; docs/model-files.md lists them. From the loaders of sentence-transformers 6.2 and
transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

from trio_pool_serve.errors import ModelLoadError

HUB = "cache_dir local_files_only revision subfolder token trust_remote_code"
"""sentence-transformers replaces these by its own arguments."""

KNOWN_KEYS: Mapping[str, str] = {
    "Transformer": (
        "max_seq_length do_lower_case transformer_task modality_config module_output_name processing_kwargs "
        "query_length document_length query_expansion unpad_inputs backend"
    ),
    "model_kwargs": (
        f"{HUB} dtype torch_dtype add_pooling_layer attn_implementation device_map low_cpu_mem_usage use_safetensors"
    ),
    "processor_kwargs": f"{HUB} use_fast padding padding_side",
    "config_kwargs": f"{HUB} use_cache",
    "Pooling": (
        "pooling_mode pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens pooling_mode_lasttoken "
        "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens include_prompt embedding_dimension "
        "word_embedding_dimension"
    ),
    "WeightedLayerPooling": "layer_start num_hidden_layers embedding_dimension word_embedding_dimension",
    "LayerNorm": "dimension",
    "Dropout": "dropout",
    "SpladePooling": "pooling_strategy activation_function embedding_dimension word_embedding_dimension chunk_size",
    "SparseStaticEmbedding": "frozen",
    **dict.fromkeys(("SparseAutoEncoder", "CSRSparsity"), "input_dim hidden_dim k k_aux normalize dead_threshold"),
    "LogitScore": "true_token_id false_token_id module_input_name",
    "MultiVectorMask": "skiplist_words skiplist_tasks keep_only_token_ids",
    "HierarchicalTokenPooling": "pool_factor num_protected_tokens normalize_embeddings tasks",
    "Router": "default_route allow_empty_key route_mappings",
    "LoRA": (
        "peft_type base_model_name_or_path revision r lora_alpha use_rslora rank_pattern alpha_pattern modules_to_save "
        "bias init_lora_weights fan_in_fan_out target_modules exclude_modules layers_to_transform layers_pattern "
        "lora_dropout inference_mode task_type auto_mapping peft_version megatron_config megatron_core eva_config "
        "qalora_group_size"
    ),
}
"""Accepted keys, by class of module and by mapping within a Transformer's config. sentence-transformers passes all keys
of these to a constructor; it ignores unknown keys of other classes."""

OLD_NAMES = {"model_args": "model_kwargs", "tokenizer_args": "processor_kwargs", "config_args": "config_kwargs"}

IF_IGNORED = {
    "model_kwargs": "the transformer would be loaded without it",
    "processor_kwargs": "texts would be tokenised without it",
    "config_kwargs": "the transformer would compute without it",
    "LoRA": "the adapter would be applied without it",
    "tokenizer_name_or_path": "texts would be tokenised by the folder's own tokenizer instead",
}
"""The mistake that would follow if a rejected key, or a key in such a mapping, were ignored."""


def require_known(kind: str, place: str, config: Mapping[str, Any]) -> None:
    """Raise ``ModelLoadError`` for a key that is not among ``KNOWN_KEYS`` of a kind, unless its value is empty."""
    known = KNOWN_KEYS[kind].split() if kind in KNOWN_KEYS else config
    for key, value in config.items():
        section = OLD_NAMES.get(key, key)
        if value in (None, {}, []) or key in known:
            continue
        if kind == "Transformer" and section in IF_IGNORED and isinstance(value, Mapping):
            require_known(section, f"{place}: {key}", value)
            continue
        wrong = IF_IGNORED.get(key) or IF_IGNORED.get(kind, "sentence-transformers would not ignore it")
        raise ModelLoadError(f"{place}: {key} is {value!r}, which is not supported: {wrong}.")
