"""Forward pass of page retrievers: one vector per token of a query or page."""

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

    ``needs_token_type_ids``: the model takes segments. ``pads_images``: pages are padded to the most patches of a
    page in the batch.
    """

    needs_token_type_ids: bool = field(kw_only=True)
    pads_images: bool = field(kw_only=True)

    def __call__(self, forward: ForwardPass) -> Tensor:
        """Return vectors of unit length, [rows, tokens, d]; queries and pages may be in one batch."""
        model: Any = self.model
        inputs: dict[str, Any] = {"input_ids": forward.input_ids, "attention_mask": forward.attention_mask}
        if self.needs_token_type_ids:
            inputs["token_type_ids"] = forward.type_ids
        images = images_of(forward.requests)
        if images:
            images = _padded(images) if self.pads_images else images
            inputs |= image_inputs(images, device=forward.input_ids.device, dtype=model.dtype)
        vectors = model(**inputs, use_cache=False).embeddings
        assert isinstance(vectors, Tensor)  # noqa: S101
        return vectors


def _padded(images: list[ImageFeatures]) -> list[ImageFeatures]:
    """Return images with pixel values [1, most patches, values per patch], padded with zeros."""
    most_patches = max(len(image.arrays["pixel_values"]) for image in images)
    padded = []
    for image in images:
        pixels = image.arrays["pixel_values"]
        values = np.zeros((1, most_patches, pixels.shape[1]), dtype=pixels.dtype)
        values[0, : len(pixels)] = pixels
        padded.append(ImageFeatures({**image.arrays, "pixel_values": values}, image.tokens))
    return padded
