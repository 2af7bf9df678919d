"""How many positions of a model's sequence an image takes."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.models.dual_encoder.spec import ImageTower
from trio_pool_serve.models.vision_language.spec import ImagePatches


class ImageTokens(Protocol):
    """Counts the positions from what an image processor made."""

    def of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
        """Return the positions of each image, in order."""


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
class GridTokens:
    """Qwen's: ``image_grid_thw`` has each image's patches in time, height and width."""

    patches: ImagePatches

    def of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
        """Count patches, merged by merged of them."""
        return tuple(int(patches) // self.patches.merged**2 for patches in arrays["image_grid_thw"].prod(axis=1))
