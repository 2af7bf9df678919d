"""Page retrievers: late interaction between a query and images of pages."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.errors import InvalidRequestError, ModelLoadError
from trio_pool_serve.models.dual_encoder import tower_processor
from trio_pool_serve.models.dual_encoder.spec import ImageTower
from trio_pool_serve.models.late_interaction import KeptTokens, kept_tokens_of
from trio_pool_serve.models.late_interaction.spec import ScoringMask
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import ModelFolder, ModelKind
from trio_pool_serve.models.page_retrieval.spec import QUERY_AUGMENTATION_TOKENS, PageRetrieval, read_page_retrieval
from trio_pool_serve.models.vision_language import grid_processor, reject_placeholders
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.media.image_processor import FolderProcessor
from trio_pool_serve.rendering.text.excerpt import too_long
from trio_pool_serve.rendering.text.formats import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds


@frozen(kw_only=True, eq=False)
class PageQueryFormat(TextFormat):
    """Every text is a query: a prefix before it and ``suffix`` (token ids) after it, without special tokens."""

    suffix: TokenIds
    kept_tokens: KeptTokens

    def max_tokens_of(self, input_type: InputType | None, max_model_len: int) -> int:
        """Return the maximum without the suffix."""
        return super().max_tokens_of(input_type, max_model_len) - len(self.suffix)

    def adds_special_tokens(self, _: InputType | None) -> bool:
        """Return ``False``."""
        return False

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Append the suffix."""
        token_ids = np.concatenate([token_ids, self.suffix])
        return RenderedPrompt(token_ids, kept=self.kept_tokens.mask(token_ids, input_type))


def page_query_format(spec: PageRetrieval, tokenizer: Tokenizer) -> PageQueryFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token, which every query ends with.")
    end_ids = all_ids(tokenizer, tokenizer.encode("\n"))
    return PageQueryFormat(
        prefix=spec.text_prefix,
        suffix=np.concatenate([np.full(QUERY_AUGMENTATION_TOKENS, pad_id, dtype=np.int32), end_ids]),
        kept_tokens=kept_tokens_of(spec.mask or ScoringMask(), tokenizer),
    )


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


PAGE_RETRIEVAL = ModelKind(
    read=read_page_retrieval,
    load="trio_pool_serve.models.page_retrieval.loading:load_page_retrieval",
    text_format=page_query_format,
    image_format=page_image_format,
)
