"""Late-interaction models: one vector per token, compared by MaxSim."""

from trio_pool_serve.models.late_interaction.spec import read_late_interaction
from trio_pool_serve.models.late_interaction.text_format import late_interaction_format
from trio_pool_serve.models.model_kind import ModelKind

LATE_INTERACTION = ModelKind(
    read=read_late_interaction,
    load="trio_pool_serve.models.late_interaction.loading:load_late_interaction",
    text_format=late_interaction_format,
)
