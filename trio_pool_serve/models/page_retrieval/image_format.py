"""Image format of page retrievers: each image is one input, with a fixed text around it."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.dual_encoder.image_format import tower_processor
from trio_pool_serve.models.dual_encoder.spec import ImageTower
from trio_pool_serve.models.late_interaction.spec import ScoringMask
from trio_pool_serve.models.late_interaction.text_format import KeptTokens, kept_tokens_of
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.page_retrieval.spec import PageRetrieval
from trio_pool_serve.models.vision_language.image_format import grid_processor, reject_placeholders
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.rendering.text.text_window import too_long
from trio_pool_serve.rendering.text.tokenizer import all_ids
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


@frozen(eq=False)
class PageFormat:
    """An image is one input: the token ids ``page``, in which ``token_id`` is the image's placeholder."""

    processor: FolderProcessor
    page: TokenIds
    token_id: int
    max_model_len: int
    kept_tokens: KeptTokens

    def alone(self, image: ImageFeatures) -> RenderedPrompt:
        """Return a page with the text around it. Raises ``ContextLengthError`` if that is too long."""
        (tokens,) = image.tokens
        token_ids = np.repeat(self.page, np.where(self.page == self.token_id, tokens, 1))
        if len(token_ids) > self.max_model_len:
            raise too_long(f"{len(token_ids)}", self.max_model_len)
        return RenderedPrompt(token_ids, images=image, kept=self.kept_tokens.mask(token_ids, "document"))

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return a text unchanged. Raises ``InvalidRequestError`` if it contains images or placeholders."""
        if images:
            raise InvalidRequestError(
                "This model takes a text or the image of a page: an input cannot have both.",
                field="prompts",
            )
        reject_placeholders(token_ids, self.token_id)
        return RenderedPrompt(token_ids)


def page_image_format(folder: ModelFolder[PageRetrieval]) -> PageFormat:
    """Return the image format. Raises ``ModelLoadError`` if tokenizer, image processor and model do not match."""
    spec = folder.spec
    if isinstance(spec.images, ImageTower):
        processor = tower_processor(folder, spec.images, "SiglipImageProcessor")
    else:
        processor = grid_processor(folder, spec.images)
    tokenizer = load_tokenizer(folder)
    page = all_ids(tokenizer, tokenizer.encode(spec.page_text))
    is_placeholder = tokenizer.id_of(spec.placeholder) == spec.placeholder_id
    if not is_placeholder or np.count_nonzero(page == spec.placeholder_id) != 1:
        raise ModelLoadError(
            f"{spec.placeholder} is not token {spec.placeholder_id} of the tokenizer, the model's image placeholder."
        )
    kept_tokens = kept_tokens_of(spec.mask or ScoringMask(), tokenizer)
    return PageFormat(processor, page, spec.placeholder_id, folder.max_model_len, kept_tokens)
