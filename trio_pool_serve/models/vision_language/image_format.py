"""Images among the tokens of a text, each in the place of its placeholder."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.loading.image_processors import probe, read_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder
from trio_pool_serve.models.vision_language.spec import ImagePatches, VisionLanguage
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.rendering.text.length_limit import too_long
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


@frozen
class GridTokens:
    """Qwen's: ``image_grid_thw`` has each image's patches in time, height and width."""

    patches: ImagePatches

    def of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
        """Count patches, merged by merged of them."""
        return tuple(int(patches) // self.patches.merged**2 for patches in arrays["image_grid_thw"].prod(axis=1))


@frozen
class PlaceholderFormat:
    """A placeholder is the token ``token_id``; with its images an input has at most ``max_model_len`` tokens."""

    processor: FolderProcessor
    token_id: int
    max_model_len: int

    def alone(self, image: ImageFeatures) -> RenderedPrompt | None:
        """Return ``None``: around an image stands what the chat template says."""
        del image
        return None

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Put as many tokens in the place of each placeholder as its image has.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images: a text can hold the
        placeholder's own name. Raises ``ContextLengthError`` for more tokens than the model takes.
        """
        if not images:
            refuse_placeholders(token_ids, self.token_id)
            return RenderedPrompt(token_ids)
        (places,) = np.nonzero(token_ids == self.token_id)
        sizes = [tokens for image in images for tokens in image.tokens]
        if len(places) != len(sizes):
            raise InvalidRequestError(
                f"An input has {len(sizes)} images, but {len(places)} placeholders for images.", field="prompts"
            )
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[places] = sizes
        if repeats.sum() > self.max_model_len:
            raise too_long(f"{repeats.sum()}", self.max_model_len)
        return RenderedPrompt(np.repeat(token_ids, repeats), images=join(images))


def refuse_placeholders(token_ids: TokenIds, token_id: int) -> None:
    """Raise ``InvalidRequestError`` for what stands for an image: a model would look for it in the whole batch."""
    if token_id in token_ids:
        raise InvalidRequestError("An input has a placeholder for an image, but no image.", field="prompts")


def join(images: Sequence[ImageFeatures]) -> ImageFeatures:
    """Return several images of one input as one: every array's first dimension counts images, or their patches."""
    if len(images) == 1:
        return images[0]
    return ImageFeatures(
        {name: np.concatenate([image.arrays[name] for image in images]) for name in images[0].arrays},
        tuple(tokens for image in images for tokens in image.tokens),
    )


def placeholder_image_format(folder: ModelFolder[VisionLanguage]) -> PlaceholderFormat:
    """Return the image format of a model. Raises ``ModelLoadError`` if the processor does not fit the model."""
    patches = folder.spec.patches
    return PlaceholderFormat(grid_processor(folder, patches), patches.token_id, folder.max_model_len)


def grid_processor(folder: AnyModelFolder, patches: ImagePatches) -> FolderProcessor:
    """Return the image processor of a Qwen-VL model. Raises ``ModelLoadError`` if it does not fit the model."""
    processor = read_processor(folder.transformer_path, GridTokens(patches), usual="Qwen2VLImageProcessor")
    if processor.class_name != "Qwen2VLImageProcessor":
        raise ModelLoadError(
            f"The image processor {processor.class_name} does not cut images as this model reads them."
        )
    shape = probe(processor).arrays["pixel_values"].shape
    if shape[1:] != (patches.numbers,):
        raise ModelLoadError(
            f"The image processor makes {shape} of an image, which is not what the image tower takes: patches of "
            f"{patches.numbers} numbers."
        )
    merged = int(processor.settings.get("merge_size", 2))
    if merged != patches.merged:
        raise ModelLoadError(f"The image processor merges {merged} patches a side, the model {patches.merged}.")
    return processor
