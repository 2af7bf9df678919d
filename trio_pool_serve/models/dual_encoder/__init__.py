"""Dual encoders: texts and images in one vector space."""

from trio_pool_serve.models.dual_encoder.image_format import tower_image_format
from trio_pool_serve.models.dual_encoder.spec import read_dual_encoder
from trio_pool_serve.models.dual_encoder.text_format import dual_encoder_text_format
from trio_pool_serve.models.model_kind import ModelKind

DUAL_ENCODER = ModelKind(
    read=read_dual_encoder,
    load="trio_pool_serve.models.dual_encoder.loading:load_dual_encoder",
    text_format=dual_encoder_text_format,
    image_format=tower_image_format,
)
