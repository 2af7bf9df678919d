"""Weights of a checkpoint that the loaded model does not use: of parts that it does not need, or a reason to refuse."""

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.folder_files import MAX_LAYERS
from trio_pool_serve.runner.adapter_store import shown

logger = logging.getLogger(__name__)

PARTS = (
    # heads of pretraining and of other tasks
    "cls", "lm_head", "lm_loss", "mlm_head", "nsp_head", "seq_relationship", "predictions", "sop_classifier",
    "lm_predictions", "mask_predictions", "entity_predictions", "generator_predictions", "generator_lm_head",
    "discriminator_predictions", "vocab_transform", "vocab_layer_norm", "vocab_projector", "pred_layer", "embed_out",
    "classification_head", "final_logits_bias", "qa_outputs", "qa_classifier", "classifier", "pre_classifier", "score",
    "head", "v_head", "value_head", "multiple_choice_head", "fit_dense", "fit_denses", "loss_fct",
    "sequence_summary", "logits_proj", "pooler", "splinter_qass",
    # decoders, and layers that only draft tokens
    "decoder", "mtp", "mtp_layers", "mtp_block",
    # towers of other modalities
    "visual", "vision_tower", "vision_model", "visual_projection", "embed_vision", "embed_audio",
    "audio_tower", "audio_model", "audio_projection", "multi_modal_projector", "mm_projector", "logit_scale",
    "logit_bias",
    # buffers that are computed
    "position_ids", "token_type_ids", "inv_freq", "cos_cached", "sin_cached",
    "masked_bias", "causal_mask", "k_scale", "v_scale",
    "relative_position_index", "num_batches_tracked", "_extra_state",
)  # fmt: skip
"""Names of known parts, at any place of a weight's name."""

KNOWN = re.compile(rf"(^|\.)({'|'.join(PARTS)})(\.|$)|(^|\.)(attn|attention)\.bias$|word_embeddings\._weight$")
"""The second: the causal mask of GPT-2 and its relatives."""

LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")


def require_used(unused: Iterable[str], folder: Path, model: Any) -> None:
    """Log the weights in a folder that a model of transformers does not use.

    Raises ``ModelLoadError`` unless all are of ``PARTS``, or of further layers: the authors' code would use them.
    """
    names, layers = sorted(unused), getattr(model.config.get_text_config(), "num_hidden_layers", MAX_LAYERS)
    unknown = [
        name for name in names if not KNOWN.search(name) and all(int(number) < layers for number in LAYER.findall(name))
    ]
    require(
        not unknown,
        f"{folder}: transformers' {type(model).__name__} does not use these weights of the checkpoint: "
        f"{shown(unknown)}. Without them it would compute something else than its authors' code.",
    )
    if names:
        logger.info("%s: some weights are not used: %s", folder.name, shown(names))
