"""Vision-language embedding models: images among the tokens of a text."""

from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.models.vision_language.image_format import placeholder_image_format
from trio_pool_serve.models.vision_language.spec import read_vision_language

VISION_LANGUAGE = ModelKind(
    read=read_vision_language,
    load="trio_pool_serve.models.vision_language.loading:load_vision_language",
    image_format=placeholder_image_format,
)
