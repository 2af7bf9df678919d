"""Process reward models: they score each step of a solution, at the token that ends it.

Qwen2.5-Math-PRM has a classification head. Any causal language model can be served as one if ``--pooler-config`` names
the token that ends a step (``step_tag_id``) and the tokens whose logits are compared there (``returned_token_ids``).
Math-Shepherd, https://arxiv.org/abs/2312.08935, compares + and −.
"""

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.config.pooler_config import pooler_config_of
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.classification import read_labels
from trio_pool_serve.models.files.folder_files import FolderFiles, find_token_id
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec

STEP_TOKEN = "<extra_0>"  # noqa: S105  (a token of the vocabulary, no secret)
"""The token after each step in Qwen2.5-Math-PRM's inputs."""


@frozen(kw_only=True)
class ProcessReward(ModelSpec):
    """One row of probabilities for each step: of the head's labels, or of ``returned_token_ids``."""

    step_token_id: int
    returned_token_ids: tuple[int, ...] = ()
    """Tokens whose logits are compared; empty for a model with a classification head."""

    tasks = frozenset({"token_classify"})


def read_process_reward(files: FolderFiles, config: ModelConfig) -> ProcessReward | None:
    """Read process reward models, and causal language models that ``config`` makes one."""
    pooler = pooler_config_of(config)
    if "Qwen2ForProcessRewardModel" in files.architectures:
        step = pooler.step_tag_id if pooler.step_tag_id is not None else find_token_id(files, STEP_TOKEN)
        if step is None:
            raise ModelLoadError(
                f"The vocabulary lacks {STEP_TOKEN}; set step_tag_id in --pooler-config to the token that ends a step."
            )
        require(
            not pooler.returned_token_ids,
            "returned_token_ids in --pooler-config requires a causal language model; this model has a classifier.",
        )
        return ProcessReward(step_token_id=step, labels=read_labels(files.config))
    if pooler.step_tag_id is None and not pooler.returned_token_ids:
        return None
    require(
        not files.modules and files.is_saved_from("ForCausalLM"),
        "step_tag_id and returned_token_ids in --pooler-config require a causal language model.",
    )
    if pooler.step_tag_id is None or not pooler.returned_token_ids:
        raise ModelLoadError("To score steps, set both step_tag_id and returned_token_ids in --pooler-config.")
    if outside := [i for i in (pooler.step_tag_id, *pooler.returned_token_ids) if i >= files.text_config["vocab_size"]]:
        raise ModelLoadError(f"Token {outside[0]} is outside the vocabulary of {files.text_config['vocab_size']}.")
    return ProcessReward(
        step_token_id=pooler.step_tag_id,
        returned_token_ids=pooler.returned_token_ids,
        labels=tuple(map(str, pooler.returned_token_ids)),
    )


PROCESS_REWARD = ModelKind(
    read=read_process_reward,
    load="trio_pool_serve.models.process_reward.loading:load_process_reward",
)
