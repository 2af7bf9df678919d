"""Process reward models: they judge each step of a solution, at the token that ends it.

Qwen2.5-Math-PRM brings a head of its own. Any causal language model can be one when ``--step-tag-id`` and
``--returned-token-ids`` say which token ends a step and by which words it is judged (Math-Shepherd,
https://arxiv.org/abs/2312.08935, judges by + and −).
"""

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.classification.spec import label_names
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.files.vocabulary import find_token
from trio_pool_serve.models.model_spec import ModelSpec

STEP_TOKEN = "<extra_0>"  # noqa: S105  (a word of the vocabulary, no secret)
"""What Qwen2.5-Math-PRM's solutions have after each step."""


@frozen(kw_only=True)
class ProcessReward(ModelSpec):
    """One row of label probabilities for each step.

    ``words`` are the tokens whose logits are compared; empty for a model with a head of its own.
    """

    step_token_id: int
    words: tuple[int, ...] = ()
    label_names: tuple[str, ...]

    tasks = frozenset({"token_classify"})

    @property
    def labels(self) -> tuple[str, ...]:
        """Those of the head, or the ids of the words."""
        return self.label_names


def read_process_reward(files: FolderFiles, config: ModelConfig) -> ProcessReward | None:
    """Take process reward models, and language models that the settings make one."""
    if "Qwen2ForProcessRewardModel" in files.architectures:
        step = config.step_tag_id if config.step_tag_id is not None else find_token(files, STEP_TOKEN)
        if step is None:
            raise ModelLoadError(f"The vocabulary has no {STEP_TOKEN}; say with --step-tag-id which token ends a step.")
        if config.returned_token_ids:
            raise ModelLoadError("--returned-token-ids is for language models; this one has a head of its own.")
        return ProcessReward(step_token_id=step, label_names=label_names(files.config))
    if config.step_tag_id is None and not config.returned_token_ids:
        return None
    if files.modules or not any(name.endswith("ForCausalLM") for name in files.architectures):
        raise ModelLoadError("--step-tag-id and --returned-token-ids are for causal language models; this is none.")
    if config.step_tag_id is None or not config.returned_token_ids:
        raise ModelLoadError("A language model judges steps only with both --step-tag-id and --returned-token-ids.")
    outside = [i for i in (config.step_tag_id, *config.returned_token_ids) if i >= files.text_config["vocab_size"]]
    if outside:
        raise ModelLoadError(f"Token {outside[0]} is past the vocabulary's {files.text_config['vocab_size']}.")
    return ProcessReward(
        step_token_id=config.step_tag_id,
        words=config.returned_token_ids,
        label_names=tuple(map(str, config.returned_token_ids)),
    )
