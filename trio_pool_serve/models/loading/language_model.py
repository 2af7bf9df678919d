"""Loading a causal language model that computes the logits of a few tokens only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.classification import SelectedLogits
from trio_pool_serve.runner.loaded_model import LoadingParams

PROBE_TOKENS = 8
PROBE_LOGITS = 64

TOLERANCE = 0.03
"""Relative. bfloat16 rounding errors are a tenth of that; models that scale their logits deviate by more."""


def load_selected_logits(
    folder: AnyModelFolder, params: LoadingParams, token_ids: Sequence[int]
) -> tuple[Backbone, SelectedLogits]:
    """Return the model without its language model head, and a module that maps its states to ``token_ids``' logits.

    Raises ``ModelLoadError``, also for a model that transforms its logits other than by softcapping.
    """
    model: Any = load_checkpoint(folder, params, auto_class="AutoModelForCausalLM", optional_weights=())
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelLoadError(f"{folder.model_type} has no linear language model head.")
    outside = [token_id for token_id in token_ids if token_id >= head.out_features]
    if outside:
        raise ModelLoadError(f"Token {outside[0]} is outside the {head.out_features} logits of the model.")
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    _require_plain_logits(model, head, softcap)
    return Backbone(model.base_model), SelectedLogits(head, token_ids, softcap)


@torch.inference_mode()
def _require_plain_logits(model: Any, head: nn.Linear, softcap: float | None) -> None:
    """Raise ``ModelLoadError`` unless some tokens' logits equal the model's own."""
    token_ids = range(0, head.out_features, max(1, head.out_features // PROBE_LOGITS))
    ids = torch.arange(1, PROBE_TOKENS + 1, device=head.weight.device)[None]
    expected = model(input_ids=ids).logits[..., list(token_ids)].float()
    ours = SelectedLogits(head, token_ids, softcap)(model.base_model(input_ids=ids).last_hidden_state.float())
    if (ours - expected).norm() > TOLERANCE * expected.norm():
        raise ModelLoadError(
            f"{model.config.model_type} changes its logits in a way that is not supported: those of single tokens "
            "cannot be computed from its states."
        )
