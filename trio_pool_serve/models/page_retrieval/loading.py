"""Loading and forward pass of page retrievers: late interaction between a query and images of pages."""

from typing import Any

from attrs import field, frozen
from torch import Tensor, nn

from trio_pool_serve.models.loading.checkpoint import load_checkpoint
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.page_retrieval import PageRetrieval
from trio_pool_serve.models.vision_language.loading import encode_images
from trio_pool_serve.runner.forward_pass import ForwardPass, image_inputs, images_of, require_placeholders
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.heads.maxsim import MaxSimHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.runner.transformer_masks import masks_of
from trio_pool_serve.types import ImageFeatures, MaxSim, TokenEmbed


def load_page_retrieval(folder: ModelFolder[PageRetrieval], params: LoadingParams) -> LoadedModel:
    """Load a ``PageRetrieval`` model."""
    spec = folder.spec
    model = load_checkpoint(folder, params, auto_class=spec.class_name, optional_weights=())
    # The model's vectors have unit length; after truncation to fewer dimensions they are normalised again.
    tokens = TokenEmbeddingHead(nn.Identity(), normalizes=True)
    return LoadedModel(
        backbone=PageRetriever(model, is_qwen=spec.class_name == "ColQwen2ForRetrieval"),
        heads={TokenEmbed: tokens, MaxSim: MaxSimHead(tokens, mean_scores=spec.mean_scores)},
        description="late interaction with pages",
    )


@frozen(eq=False)
class PageRetriever(Backbone):
    """transformers' ColPali and ColQwen2, projection included.

    ``is_qwen``: pages are divided into patches of any number. ColPali takes token type ids, which make its attention
    bidirectional.
    """

    is_qwen: bool = field(kw_only=True)

    def output_of(self, forward: ForwardPass) -> Tensor:
        """Return vectors of unit length, [rows, tokens, d]; queries and pages may be in one batch."""
        inputs: dict[str, Any] = {"attention_mask": forward.attention_mask}
        if not self.is_qwen:
            inputs["token_type_ids"] = forward.type_ids
        images = images_of(forward.requests)
        if images:
            require_placeholders(forward.requests, self.model.config.vlm_config.image_token_id)
        if images and self.is_qwen:
            inputs["inputs_embeds"] = self._embedded(forward, images)
        else:
            inputs["input_ids"] = forward.input_ids
            if images:
                inputs |= image_inputs(images, device=forward.device, dtype=self.model.dtype)
        with masks_of(forward):
            vectors: Tensor = self.model(**inputs, use_cache=False).embeddings
        return vectors

    def _embedded(self, forward: ForwardPass, images: list[ImageFeatures]) -> Tensor:
        """Return the embeddings of tokens, and of images in place of their placeholders, [rows, tokens, hidden].

        Equals the model's own code, which finds the patches of each page by comparing on the device.
        """
        embedded = self.model.vlm.get_input_embeddings()(forward.input_ids)
        features = encode_images(self.model.vlm.visual, images, forward.device).pooler_output
        is_image = (forward.input_ids == self.model.config.vlm_config.image_token_id).unsqueeze(-1)
        joint: Tensor = embedded.masked_scatter(is_image, features.to(embedded.dtype))
        return joint
