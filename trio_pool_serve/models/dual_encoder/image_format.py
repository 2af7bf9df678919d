"""Images as dual encoders read them: each by itself, in a tower of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, ImageTower
from trio_pool_serve.models.loading.image_processors import probe, read_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

DEFAULT_PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip2": "Siglip2ImageProcessor",
}
"""By the model's type, for folders that do not name it."""


@frozen
class TowerTokens:
    """The sequence of an image tower alone: one position for each patch, and perhaps one for the whole image."""

    tower: ImageTower

    def of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
        """Count patches: in NaFlex, of pixels cut up already, filled ones included."""
        images, *shape = map(int, arrays["pixel_values"].shape)
        if self.tower.image_size is None:
            patches = shape[0]
        else:
            patches = (shape[1] // self.tower.patch_size) * (shape[2] // self.tower.patch_size)
        return (self.tower.tokens(patches),) * images


@frozen
class TowerFormat:
    """An image is an input of its own, and there is no place for one in a text."""

    processor: FolderProcessor

    def alone(self, image: ImageFeatures) -> RenderedPrompt:
        """Return an image as an input, with a zero for each position that its tower computes."""
        return RenderedPrompt(np.zeros(sum(image.tokens), dtype=np.int32), images=image)

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return a text as it is. Raises ``InvalidRequestError`` if there are images to put into it."""
        if images:
            raise InvalidRequestError(
                "This model reads a text or an image, each by itself: an input cannot have both.", field="prompts"
            )
        return RenderedPrompt(token_ids)


def tower_image_format(folder: ModelFolder[DualEncoder]) -> TowerFormat:
    """Return the image format of a model. Raises ``ModelLoadError`` if the processor does not fit the tower."""
    return TowerFormat(tower_processor(folder, folder.spec.images, DEFAULT_PROCESSORS[folder.model_type]))


def tower_processor(folder: AnyModelFolder, tower: ImageTower, usual: str) -> FolderProcessor:
    """Return the image processor of an image tower. Raises ``ModelLoadError`` if it does not fit the tower."""
    processor = read_processor(folder.transformer_path, TowerTokens(tower), usual=usual)
    shape = probe(processor).arrays["pixel_values"].shape
    if tower.image_size is None:
        fits = len(shape) == 3 and shape[2] == 3 * tower.patch_size**2
    else:
        fits = shape == (1, 3, tower.image_size, tower.image_size)
    if not fits:
        raise ModelLoadError(
            f"The image processor makes {shape} of an image, which is not what the image tower takes: it reads "
            f"{f'{tower.image_size} pixels a side' if tower.image_size else f'patches of {tower.patch_size} pixels'}."
        )
    return processor
