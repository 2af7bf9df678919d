"""Dual encoders: texts and images in one vector space."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, ImageTower, TextPadding, read_dual_encoder
from trio_pool_serve.models.loading.renderer_loading import probe_image_processor, read_image_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder, ModelKind
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.rendering.text.formats import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

DEFAULT_PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip2": "Siglip2ImageProcessor",
}
"""Image processor class by model type, for folders that do not name one."""


@frozen(kw_only=True)
class PaddedFormat(TextFormat):
    """Every text is padded with ``pad_id``."""

    padding: TextPadding
    pad_id: int

    def finish(self, token_ids: TokenIds, _: InputType | None) -> RenderedPrompt:
        """Pad a text."""
        tokens = len(token_ids)
        padded = np.full(max(self.padding.length, tokens), self.pad_id, dtype=np.int32)
        start = len(padded) - tokens if self.padding.pad_left else 0
        padded[start : start + tokens] = token_ids
        return RenderedPrompt(padded, attended=None if self.padding.attends_to_padding else tokens)


def dual_encoder_text_format(spec: DualEncoder, tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    if spec.padding is None:
        return TextFormat()
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token.")
    return PaddedFormat(padding=spec.padding, pad_id=pad_id)


@frozen
class TowerFormat:
    """An image is one input, which the image tower computes; texts contain none."""

    processor: FolderProcessor

    def alone(self, image: ImageFeatures) -> RenderedPrompt:
        """Return an image as an input, with token id 0 for each position of the image tower."""
        return RenderedPrompt(np.zeros(sum(image.tokens), dtype=np.int32), images=image)

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return a text unchanged. Raises ``InvalidRequestError`` if it contains images."""
        if images:
            raise InvalidRequestError(
                "This model takes a text or an image: an input cannot have both.", field="prompts"
            )
        return RenderedPrompt(token_ids)


def tower_image_format(folder: ModelFolder[DualEncoder]) -> TowerFormat:
    """Return the image format. Raises ``ModelLoadError`` if the image processor does not match the tower."""
    return TowerFormat(tower_processor(folder, folder.spec.images, DEFAULT_PROCESSORS[folder.model_type]))


def tower_processor(folder: AnyModelFolder, tower: ImageTower, default_class: str) -> FolderProcessor:
    """Return the image processor of an image tower. Raises ``ModelLoadError`` if it does not match the tower."""
    processor = read_image_processor(folder.transformer_path, tower, default_class=default_class)
    shape = probe_image_processor(processor).arrays["pixel_values"].shape
    if tower.image_size is None:
        matches = len(shape) == 3 and shape[2] == 3 * tower.patch_size**2
    else:
        matches = shape == (1, 3, tower.image_size, tower.image_size)
    if not matches:
        raise ModelLoadError(
            f"The image processor returns {shape} for an image, but the image tower takes "
            f"{f'{tower.image_size} pixels a side' if tower.image_size else f'patches of {tower.patch_size} pixels'}."
        )
    return processor


DUAL_ENCODER = ModelKind(
    read=read_dual_encoder,
    load="trio_pool_serve.models.dual_encoder.loading:load_dual_encoder",
    text_format=dual_encoder_text_format,
    image_format=tower_image_format,
)
