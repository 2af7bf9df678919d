"""A causal language model of which a few words are wanted."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.heads.classification import WordScores
from trio_pool_serve.runner.loaded_model import LoadingParams

PROBE_TOKENS = 8
PROBE_WORDS = 64

TOLERANCE = 0.03
"""Relative: bfloat16 rounds by a tenth of that, and a model that scales its logits does so by more."""


def load_word_scores(
    folder: AnyModelFolder, params: LoadingParams, words: Sequence[int]
) -> tuple[Backbone, WordScores]:
    """Return the model without its vocabulary's logits, and what computes those of ``words`` from its states.

    Raises ``ModelLoadError``, also for a model that does more with its logits than softcapping them.
    """
    model: Any = load_checkpoint(folder, params, auto_class="AutoModelForCausalLM", may_lack=())
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelLoadError(f"{folder.model_type} has no language model head that words can be read from.")
    past = [word for word in words if word >= head.out_features]
    if past:
        raise ModelLoadError(f"Token {past[0]} is past the {head.out_features} that the model can say.")
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    _require_plain_logits(model, head, softcap)
    return Backbone(model.base_model), WordScores(head, words, softcap)


@torch.inference_mode()
def _require_plain_logits(model: Any, head: nn.Linear, softcap: float | None) -> None:
    """Compare some words' logits with the model's own."""
    words = range(0, head.out_features, max(1, head.out_features // PROBE_WORDS))
    ids = torch.arange(1, PROBE_TOKENS + 1, device=head.weight.device)[None]
    expected = model(input_ids=ids).logits[..., list(words)].float()
    ours = WordScores(head, words, softcap)(model.base_model(input_ids=ids).last_hidden_state.float())
    if (ours - expected).norm() > TOLERANCE * expected.norm():
        raise ModelLoadError(
            f"{model.config.model_type} changes its logits in a way that is not supported: those of single words "
            "do not follow from its states."
        )
