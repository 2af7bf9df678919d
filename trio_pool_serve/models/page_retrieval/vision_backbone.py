"""A vector for each token of a question, and for each of a page."""

from typing import Any

import numpy as np
from attrs import field, frozen
from torch import Tensor

from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.image_arrays import image_inputs, images_of
from trio_pool_serve.types import ImageFeatures


@frozen(eq=False)
class PageRetriever(Backbone):
    """transformers' ColPali and ColQwen2, projection included.

    ``reads_types`` says that segments are handed over, ``fills_up`` that pages of few patches are filled up to the
    most that one in the batch has.
    """

    reads_types: bool = field(kw_only=True)
    fills_up: bool = field(kw_only=True)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return vectors of unit length, [rows, tokens, d]; questions and pages may be in one batch."""
        model: Any = self.model
        inputs: dict[str, Any] = {"input_ids": forward.input_ids, "attention_mask": forward.attention_mask}
        if self.reads_types:
            inputs["token_type_ids"] = forward.type_ids
        images = images_of(forward.requests)
        if images:
            images = _filled_up(images) if self.fills_up else images
            inputs |= image_inputs(images, device=forward.input_ids.device, dtype=model.dtype)
        vectors = model(**inputs, use_cache=False).embeddings
        assert isinstance(vectors, Tensor)  # noqa: S101
        return vectors


def _filled_up(images: list[ImageFeatures]) -> list[ImageFeatures]:
    """Return images whose pixels are [1, most patches, numbers]: zeros follow what an image has."""
    most = max(len(image.arrays["pixel_values"]) for image in images)
    filled = []
    for image in images:
        pixels = image.arrays["pixel_values"]
        room = np.zeros((1, most, pixels.shape[1]), dtype=pixels.dtype)
        room[0, : len(pixels)] = pixels
        filled.append(ImageFeatures({**image.arrays, "pixel_values": room}, image.tokens))
    return filled
