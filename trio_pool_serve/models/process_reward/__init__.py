"""Process reward models: one score per step of a solution."""

from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.process_reward.spec import read_process_reward

PROCESS_REWARD = ModelKind(
    read=read_process_reward,
    load="trio_pool_serve.models.process_reward.loading:load_process_reward",
)
