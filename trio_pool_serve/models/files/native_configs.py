"""Published ``config.json`` files of code outside transformers, for models of which transformers has a class too.

Each entry of ``NATIVE`` is data: the class, the published names of its keys, and the values that it assumes. Names and
computations were compared with the published code of each model type and with transformers 5.24, whose own table
renames the weights (``conversion_mapping.py``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import Factory, evolve, frozen

from trio_pool_serve.errors import ModelLoadError, require


@frozen(kw_only=True)
class Native:
    """How transformers' class of ``model_type`` reads a published config."""

    model_type: str
    names: Mapping[str, str] = Factory(dict)
    """The class's name for each published key that it does not read."""
    assumed: Mapping[str, Any] = Factory(dict)
    """The values with which the class computes, for published keys that have no counterpart."""
    added: Mapping[str, Any] = Factory(dict)
    """Keys that a published file may lack, and their values."""
    fixed: Mapping[str, Any] = Factory(dict)
    """Keys that a published file lacks, and their values."""
    pooling: Mapping[str, str] = Factory(dict)
    """The pooling type for each value of the published key ``pooling``; empty if there is no such key."""
    module: str = ""
    """A class in modules.json whose published code is never run: ``modules`` compute the same."""
    modules: Mapping[str, Mapping[str, str]] = Factory(dict)
    """Names and configs of sentence-transformers' modules in its place."""
    prompts: Mapping[str, str] = Factory(dict)
    """The prompts of the model's card, for folders whose files have none."""
    pair_template: str | None = None
    """The chat template of the card of rerankers."""


GTE = Native(
    model_type="gte",
    assumed={
        "position_embedding_type": "rope", "layer_norm_type": "layer_norm", "hidden_act": "gelu",
        "logn_attention_scale": False, "logn_attention_clip1": False,
    },
    added={"max_position_embeddings": 2048, "rope_theta": 10000.0},
)  # fmt: skip
"""Alibaba's ``new-impl``, whose defaults are not the ones of transformers' class."""

JINA_V5 = Native(
    model_type="qwen3",
    module="custom_st.Transformer",
    modules={"Transformer": {}, "Pooling": {"pooling_mode": "lasttoken"}, "Normalize": {}},
)
"""jina-embeddings-v5-text-small."""

NATIVE: Mapping[str, Native] = {
    "nomic_bert": Native(
        model_type="nomic_bert",
        names={
            "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
            "max_trained_positions": "max_position_embeddings",
        },
        assumed={
            "num_experts": 0, "rotary_emb_fraction": 1, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
            "activation_function": "swiglu", "prenorm": False, "parallel_block": False, "use_rms_norm": False,
            "causal": False, "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        },
        # It was trained on as many; beyond them only its own code scales positions.
        added={"max_position_embeddings": 2048},
    ),
    "new": GTE,
    "jina_embeddings_v5": JINA_V5,
    "llama_bidirec": Native(
        model_type="llama",
        assumed={"temperature": 1},
        fixed={"is_causal": False},
        pooling={"avg": "mean", "cls": "cls", "last": "lasttoken"},
        prompts={"query": "query: ", "document": "passage: "},
        pair_template=(
            "{{ bos_token }}question:{{ (messages | selectattr('role', 'eq', 'query') | first).content }} \n \n "
            "passage:{{ (messages | selectattr('role', 'eq', 'document') | first).content }}"
        ),
    ),
}  # fmt: skip
"""How published configs are read, by published model type."""


def modules_in_place(config: Mapping[str, Any], classes: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
    """Return the ``Native.modules`` of a published config, if they replace the ``classes`` of modules.json."""
    native = NATIVE.get(str(config.get("model_type")))
    return native.modules if native is not None and [*classes] in ([], [native.module]) else {}


GTE_QWEN = "modeling_qwen.Qwen2Model"
"""The class of gte-Qwen2's repositories and of stella's. It has no causal mask, and its tokenizer's code adds a token
after every text."""


def end_token_of(config: Mapping[str, Any]) -> str | None:
    """Return the token after every text that the code of a published config's repository adds; ``None`` if none."""
    return "<|endoftext|>" if (config.get("auto_map") or {}).get("AutoModel") == GTE_QWEN else None


def without_causal_mask(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with ``is_causal``, which transformers' classes obey, if it has no causal mask by other keys.

    Gemma's classes read ``use_bidirectional_attention`` themselves.
    """
    says_so = config.get("use_bidirectional_attention") is True and "gemma" not in str(config.get("model_type"))
    is_gte = end_token_of(config) is not None and config.get("is_causal") is None
    return {**config, "is_causal": False} if says_so or is_gte else config


def native_of(place: str, config: Mapping[str, Any]) -> Native | None:
    """Return how a published config is read, ``None`` for a config that transformers' class reads as it is.

    Raises ``ModelLoadError`` for a config that the class would misread.
    """
    model_type = str(config.get("model_type"))
    require(
        model_type != "xlm-roberta" or config.get("position_embedding_type") != "rotary",
        f"{place}: position_embedding_type is 'rotary', which transformers' own xlm-roberta does not compute. "
        "jinaai/jina-embeddings-v3-hf is jina-embeddings-v3 as transformers' own class; other models need "
        "--trust-remote-code.",
    )
    native = NATIVE.get(model_type)
    if model_type == "gte" and "auto_map" in config:
        native = GTE
    elif native is JINA_V5 and "mask_token_id" in config:
        native = evolve(JINA_V5, model_type="eurobert")  # jina-embeddings-v5-text-nano
    if native is None:
        return None
    for name, value in native.assumed.items():
        wrong = f"{place}: {name} is {config.get(name)!r}, but transformers' own class would compute with {value!r}."
        require(config.get(name, value) in (value, None), wrong)
    pooling, accepted = config.get("pooling", "avg"), [*native.pooling]
    require(not accepted or pooling in accepted, f"{place}: pooling is {pooling!r}; accepted: {', '.join(accepted)}.")
    return native


def native_config(native: Native, place: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a published config with the names of transformers' class. Keys that have these names already win.

    Raises ``ModelLoadError`` for a ``rope_scaling`` that cannot be read.
    """
    renamed = {name: config[key] for key, name in native.names.items() if config.get(key) is not None}
    found = {key: value for key, value in config.items() if key not in (*native.names, "auto_map")}
    whole = {**native.added, **renamed, **found, **native.fixed, "model_type": native.model_type}
    if native is GTE and whole.get("rope_scaling"):
        try:
            whole |= _linear_rope(whole)
        except (TypeError, KeyError, ValueError, ArithmeticError) as error:
            raise ModelLoadError(f"{place}: rope_scaling is {whole['rope_scaling']!r}: {error!r}") from error
    return whole


def _linear_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the frequencies of Alibaba's NTK scaling by s in the form of linear scaling, which transformers has.

    base' = base · s, and all frequencies are divided by s^(2/d), d the width of a head:
    https://kexue.fm/archives/9706, formula 6; vLLM has the same in ``ntk_scaling_rope.py``.
    """
    scaling = config["rope_scaling"]
    is_known = scaling.get("type") == "ntk" and scaling.get("mixed_b") is None
    require(is_known, "only type ntk without mixed_b is supported", ValueError)
    factor, width = float(scaling["factor"]), config["hidden_size"] // config["num_attention_heads"]
    base = config["rope_theta"] * factor
    require(factor > 0 and math.isfinite(base), "factor and rope_theta must be positive numbers", ValueError)
    linear = {"rope_type": "linear", "rope_theta": base, "factor": factor ** (2 / width)}
    return {"rope_scaling": None, "rope_parameters": linear}
