"""Loading process reward models: a classification head or the logits of a few tokens, at the end of each step."""

import torch
from attrs import evolve
from torch import nn

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, load_selected_logits, read_weights
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.process_reward import ProcessReward
from trio_pool_serve.runner.heads.classification import (
    ActivationFunctions,
    TokenClassificationHead,
    identity,
    softmax,
)
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import TokenClassify

HEAD = ("score.0.weight", "score.0.bias", "score.2.weight", "score.2.bias")


def load_process_reward(folder: ModelFolder[ProcessReward], params: LoadingParams) -> LoadedModel:
    """Load a ``ProcessReward`` model."""
    spec = folder.spec
    score: nn.Module
    if spec.returned_token_ids:
        backbone, score = load_selected_logits(folder, params, spec.returned_token_ids)
    else:
        # The class in the folder's code is this transformer with this head, so its code is not run.
        backbone = Backbone(load_checkpoint(folder, evolve(params, trust_remote_code=False), others=HEAD))
        score = _load_score(folder).to(params.device).eval()
    return LoadedModel(
        backbone=backbone,
        heads={TokenClassify: TokenClassificationHead(score, STEP_ACTIVATIONS, spec.step_token_id)},
        description=f"{len(spec.labels)} labels for each step",
    )


STEP_ACTIVATIONS: ActivationFunctions = {"probabilities": softmax, "score": softmax, "raw": identity}
"""A step's score is the softmax over its labels, even if there is only one."""


def _load_score(folder: ModelFolder[ProcessReward]) -> nn.Module:
    """Return Qwen2.5-Math-PRM's head: two linear layers with a ReLU between them, in float32."""
    hidden, labels = int(folder.transformer_config["hidden_size"]), len(folder.spec.labels)
    score = nn.Sequential(
        nn.Linear(hidden, hidden, dtype=torch.float32), nn.ReLU(), nn.Linear(hidden, labels, dtype=torch.float32)
    )
    try:
        score.load_state_dict(read_weights(folder.transformer_path, "score."))
    except RuntimeError as error:
        raise ModelLoadError(f"The head's weights do not fit: {error}") from error
    return score.requires_grad_(requires_grad=False)
