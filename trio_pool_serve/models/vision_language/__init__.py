"""Vision-language embedding models: images among the tokens of a text."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.loading.renderer_loading import probe_image_processor, read_image_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder, ModelKind
from trio_pool_serve.models.vision_language.spec import ImagePatches, VisionLanguage, read_vision_language
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.rendering.text.excerpt import too_long
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


@frozen
class PlaceholderFormat:
    """``token_id`` is the image placeholder; inputs with their images are limited to ``max_model_len`` tokens."""

    processor: FolderProcessor
    token_id: int
    max_model_len: int

    def alone(self, _: ImageFeatures) -> RenderedPrompt | None:
        """Return ``None``: the chat template renders the text around an image."""
        return None

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Repeat each placeholder as many times as its image has tokens.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images: a client's text may contain the
        placeholder. Raises ``ContextLengthError`` for more tokens than ``max_model_len``.
        """
        if not images:
            reject_placeholders(token_ids, self.token_id)
            return RenderedPrompt(token_ids)
        (positions,) = np.nonzero(token_ids == self.token_id)
        sizes = [tokens for image in images for tokens in image.tokens]
        if len(positions) != len(sizes):
            raise InvalidRequestError(
                f"An input has {len(sizes)} images, but {len(positions)} placeholders for images.", field="prompts"
            )
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[positions] = sizes
        if repeats.sum() > self.max_model_len:
            raise too_long(f"{repeats.sum()}", self.max_model_len)
        return RenderedPrompt(np.repeat(token_ids, repeats), images=join_images(images))


def reject_placeholders(token_ids: TokenIds, token_id: int) -> None:
    """Raise ``InvalidRequestError`` for an image placeholder: the model would match it with any image of the batch."""
    if token_id in token_ids:
        raise InvalidRequestError("An input has a placeholder for an image, but no image.", field="prompts")


def join_images(images: Sequence[ImageFeatures]) -> ImageFeatures:
    """Concatenate the images of one input: the first dimension of every array is images or patches."""
    if len(images) == 1:
        return images[0]
    return ImageFeatures(
        {name: np.concatenate([image.arrays[name] for image in images]) for name in images[0].arrays},
        tuple(tokens for image in images for tokens in image.tokens),
    )


def placeholder_image_format(folder: ModelFolder[VisionLanguage]) -> PlaceholderFormat:
    """Return the image format. Raises ``ModelLoadError`` if the image processor does not match the model."""
    patches = folder.spec.patches
    return PlaceholderFormat(grid_processor(folder, patches), patches.token_id, folder.max_model_len)


def grid_processor(folder: AnyModelFolder, patches: ImagePatches) -> FolderProcessor:
    """Return the image processor of a Qwen-VL model. Raises ``ModelLoadError`` if it does not match the model."""
    processor = read_image_processor(folder.transformer_path, patches, default_class="Qwen2VLImageProcessor")
    if processor.class_name != "Qwen2VLImageProcessor":
        raise ModelLoadError(f"The image processor {processor.class_name} does not prepare images for this model.")
    shape = probe_image_processor(processor).arrays["pixel_values"].shape
    if shape[1:] != (patches.values_per_patch,):
        raise ModelLoadError(
            f"The image processor returns {shape} for an image, but the image tower takes patches of "
            f"{patches.values_per_patch} values."
        )
    merge_size = int(processor.settings.get("merge_size", 2))
    if merge_size != patches.merge_size:
        raise ModelLoadError(f"The image processor has merge_size {merge_size}, the model {patches.merge_size}.")
    return processor


VISION_LANGUAGE = ModelKind(
    read=read_vision_language,
    load="trio_pool_serve.models.vision_language.loading:load_vision_language",
    image_format=placeholder_image_format,
)
