"""How a model reads images."""

from collections.abc import Sequence
from typing import Protocol

from PIL.Image import Image

from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


class ImageProcessor(Protocol):
    """An image to what the model's forward pass takes."""

    @property
    def key(self) -> str:
        """Tells processors apart that make different things of the same image."""

    def __call__(self, image: Image) -> ImageFeatures:
        """Return the features of one decoded RGB image. Runs in any thread, several at once.

        Raises ``MediaError`` for an image that the model cannot take.
        """


class ImageFormat(Protocol):
    """Where images stand among the tokens of one model."""

    @property
    def processor(self) -> ImageProcessor:
        """What makes features of images."""

    def alone(self, image: ImageFeatures) -> RenderedPrompt | None:
        """Return what the model reads for an image without any text.

        ``None`` if the model reads it as a conversation whose only message is the image.
        """

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Put each image in the place of its placeholder among ``token_ids``, in order.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images.
        """
