"""Loading and forward pass of page retrievers: late interaction between a query and images of pages."""

from typing import Any

import numpy as np
from attrs import field, frozen
from torch import Tensor, nn

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.page_retrieval.spec import PageRetrieval
from trio_pool_serve.runner.backbone import Backbone
from trio_pool_serve.runner.forward_pass import ForwardPass
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import HoldQueryHead, MaxSimHead
from trio_pool_serve.runner.image_arrays import image_inputs, images_of
from trio_pool_serve.runner.loaded_model import LoadedModel, LoadingParams
from trio_pool_serve.types import HoldQuery, ImageFeatures, MaxSim, TokenEmbed


def load_page_retrieval(folder: ModelFolder[PageRetrieval], params: LoadingParams) -> LoadedModel:
    """Load a ``PageRetrieval`` model."""
    spec = folder.spec
    model = load_checkpoint(folder, params, auto_class=spec.class_name, optional_weights=())
    # The model's vectors have unit length; after truncation to fewer dimensions they are normalised again.
    tokens = TokenEmbeddingHead(nn.Identity(), normalizes=True)
    return LoadedModel(
        backbone=PageRetriever(
            model, needs_token_type_ids=spec.needs_token_type_ids, pads_images=spec.class_name == "ColQwen2ForRetrieval"
        ),
        heads={
            TokenEmbed: tokens,
            HoldQuery: HoldQueryHead(tokens),
            MaxSim: MaxSimHead(tokens, mean_scores=spec.mean_scores),
        },
        description="late interaction with pages",
    )


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
            inputs |= image_inputs(images, device=forward.device, dtype=model.dtype)
        vectors: Tensor = model(**inputs, use_cache=False).embeddings
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
