"""The interfaces of image processors and image formats."""

from collections.abc import Sequence
from typing import Protocol

from PIL.Image import Image

from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


class ImageProcessor(Protocol):
    """Prepares an image for the model's forward pass."""

    @property
    def key(self) -> str:
        """Identifies processors with the same output: part of the key of cached images."""

    def __call__(self, image: Image) -> ImageFeatures:
        """Return the features of one decoded RGB image. Runs in any thread, several at once.

        Raises ``MediaError`` for an image that the model does not support.
        """


class ImageFormat(Protocol):
    """Places images among the tokens of one model's inputs."""

    @property
    def processor(self) -> ImageProcessor:
        """The processor of this model's images."""

    def alone(self, image: ImageFeatures) -> RenderedPrompt | None:
        """Return the model input of an image without text.

        ``None`` if it is rendered as a conversation whose only message is the image.
        """

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return the model input with each placeholder among ``token_ids`` replaced by an image, in order.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images.
        """
