"""The image processor that a model's folder describes.

transformers' own classes on PIL and NumPy: the same pixels as the model was trained on, without torchvision.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen
from PIL.Image import Image

from trio_pool_serve.errors import MediaError
from trio_pool_serve.types import ImageFeatures

MOST_ELONGATED = 200
"""How many times an image may be as long as it is wide, or the other way round.

Qwen2-VL's own limit. CLIP enlarges an image to 224 pixels on its shorter side before it cuts the middle out: of one
of 1 by 10,000 pixels it would make 500 million.
"""


class ImageTokens(Protocol):
    """Counts the positions from what an image processor made."""

    def of(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, ...]:
        """Return the positions of each image, in order."""


@frozen(kw_only=True)
class FolderProcessor:
    """The image processor of a model: a class of transformers, and its settings."""

    class_name: str
    settings: Mapping[str, Any] = field(repr=False)
    image_tokens: ImageTokens
    key: str = field(init=False)

    def __attrs_post_init__(self) -> None:
        text = json.dumps([self.class_name, self.settings, repr(self.image_tokens)], sort_keys=True)
        object.__setattr__(self, "key", f"{self.class_name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}")

    def __call__(self, image: Image) -> ImageFeatures:
        """Return the features of one RGB image; every array's first dimension counts images, or their patches.

        Raises ``MediaError`` for an image of a shape that the model cannot take.
        """
        width, height = image.size
        if max(width, height) > MOST_ELONGATED * min(width, height):
            raise MediaError(
                f"An image of {width} by {height} pixels is too elongated: one side may be {MOST_ELONGATED} times as "
                "long as the other."
            )
        try:
            made = self._processor(images=image, return_tensors="np")
        except ValueError as error:
            raise MediaError(f"The model cannot take an image of {width} by {height} pixels: {error}") from error
        arrays = {name: _contiguous(array) for name, array in made.items()}
        return ImageFeatures(arrays, self.image_tokens.of(arrays))

    @cached_property
    def _processor(self) -> Any:
        """The object of that class, made at load time; calls change no state, so threads share it."""
        import transformers  # here, because it takes seconds and only models that read images need it

        return getattr(transformers, f"{self.class_name}Pil").from_dict(dict(self.settings))


def _contiguous(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(array, dtype=np.float32 if array.dtype.kind == "f" else np.int64)
