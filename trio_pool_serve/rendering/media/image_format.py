"""The image processor of a model's folder.

Uses transformers' classes on PIL and NumPy: the same pixels as in training, without torchvision.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from trio_pool_serve.errors import MediaError, require
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter one.

Qwen2-VL's limit. CLIP enlarges an image to 224 pixels on its shorter side before it crops the centre: one of 1 by
10,000 pixels would become 500 million pixels.
"""


Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
"""The arrays that an image processor returns, by name."""


class ImageTokens(Protocol):
    """Counts an image's token positions from the arrays of an image processor."""

    def tokens(self, arrays: Arrays) -> tuple[int, ...]:
        """Return the number of positions of each image, in order."""


@frozen(kw_only=True)
class FolderProcessor:
    """Prepares images for a model's forward pass: a class of transformers and its settings."""

    class_name: str
    settings: Mapping[str, Any] = field(repr=False)
    image_tokens: ImageTokens

    @cached_property
    def key(self) -> str:
        """Identifies processors with the same output: part of the key of cached images."""
        text = json.dumps([self.class_name, self.settings, repr(self.image_tokens)], sort_keys=True)
        return f"{self.class_name}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def __call__(self, image: "Image") -> ImageFeatures:
        """Return the features of one RGB image; every array's first dimension counts images, or their patches.

        Runs in any thread, several at once. Raises ``MediaError`` for an image of a shape that the model does not
        support.
        """
        width, height = image.size
        require(
            max(width, height) <= MAX_ASPECT_RATIO * min(width, height),
            f"The image of {width} × {height} pixels is too elongated: one side may be {MAX_ASPECT_RATIO} times as "
            "long as the other.",
            MediaError,
        )
        try:
            made = self._processor(images=image, return_tensors="np")
        except ValueError as error:
            raise MediaError(f"The model cannot process the image of {width} × {height} pixels: {error}") from error
        arrays = {
            name: np.ascontiguousarray(array, dtype=np.float32 if array.dtype.kind == "f" else np.int64)
            for name, array in made.items()
        }
        return ImageFeatures(arrays, self.image_tokens.tokens(arrays))

    @cached_property
    def _processor(self) -> Any:
        """The processor object, created at load time; calls change no state, so threads share it."""
        import transformers  # imported here: it takes seconds, and only models with images need it

        return getattr(transformers, f"{self.class_name}Pil").from_dict(dict(self.settings))


class ImageFormat(Protocol):
    """Places images among the tokens of one model's inputs."""

    @property
    def processor(self) -> FolderProcessor:
        """The processor of this model's images."""

    def alone(self, image: ImageFeatures) -> RenderedPrompt | None:
        """Return the model input of an image without text.

        ``None`` if it is rendered as a conversation whose only message is the image.
        """

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return the model input with each placeholder among ``token_ids`` replaced by an image, in order.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images.
        """
