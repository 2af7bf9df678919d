"""Images as dual encoders read them: each by itself, in a tower of its own."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


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
                "This model reads a text or an image, each by itself: an input cannot have both.", param="input"
            )
        return RenderedPrompt(token_ids)
