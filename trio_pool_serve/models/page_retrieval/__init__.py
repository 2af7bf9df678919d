"""Late interaction with images of pages as documents: ColPali and ColQwen2.

One vector per patch of a page and per token of a query (Faysse et al., https://arxiv.org/abs/2407.01449).
transformers' ``*ForRetrieval`` folders, bare or with sentence-transformers' modules.json. The text around a query and
around a page is not in the model's files; the constants below repeat constants of transformers' processors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require, require_request
from trio_pool_serve.models.dual_encoder import ImageTower, tower_processor
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json
from trio_pool_serve.models.late_interaction import LateInteraction
from trio_pool_serve.models.late_interaction.kept_tokens import KeptTokens, ScoringMask, kept_tokens_of, scoring_mask
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import ModelFolder, ModelKind
from trio_pool_serve.models.token_pooling import TokenPooling, read_token_pooling
from trio_pool_serve.models.vision_language import ImagePatches, grid_processor, read_patches, reject_placeholders
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.media.image_format import FolderProcessor
from trio_pool_serve.rendering.text.long_text import too_long
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

MODEL_TYPES = {"ColPaliForRetrieval": "paligemma", "ColQwen2ForRetrieval": "qwen2_vl"}
"""Model types of the vision-language models, by transformers' class."""

QUERY_AUGMENTATION_TOKENS = 10
"""Padding tokens after every query: ColPali's query augmentation."""

QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"


@frozen(kw_only=True)
class PageRetrieval(LateInteraction):
    """One vector per token of a text, or of a page with the text around it."""

    supports_messages = False

    class_name: str
    """transformers' model class."""
    text_prefix: str
    """Before every text, of any input type: these models treat all texts as queries."""
    page_text: str
    """Around the image of a page, with ``placeholder`` in its place."""
    placeholder: str
    placeholder_id: int
    images: ImagePatches | ImageTower


def read_page_retrieval(files: FolderFiles, _: ModelConfig) -> PageRetrieval | None:
    """Read folders of the two classes."""
    [*others, name] = files.architectures or ("",)
    if others or name not in MODEL_TYPES:
        return None
    vlm: Mapping[str, Any] = files.config.get("vlm_config") or {}
    model_type = MODEL_TYPES[name]
    require(
        vlm.get("model_type", model_type) == model_type,
        f"A {name.removesuffix('ForRetrieval')} of {vlm.get('model_type')} is not supported.",
    )
    processor = read_json(files.transformer_path / "processor_config.json")
    spec = _colqwen2(vlm, processor) if model_type == "qwen2_vl" else _colpali(vlm, processor)
    mask, token_pooling = _modules(files)
    return evolve(
        spec,
        mask=mask,
        token_pooling=token_pooling,
        mean_scores=files.sentence_transformers_config.get("similarity_fn_name") == "meanmaxsim",
    )


def _colqwen2(vlm: Mapping[str, Any], processor: Mapping[str, Any]) -> PageRetrieval:
    patches = read_patches(vlm, "qwen2_vl")
    return PageRetrieval(
        class_name="ColQwen2ForRetrieval",
        text_prefix=processor.get("query_prefix") or "Query: ",
        page_text=processor.get("visual_prompt_prefix") or QWEN_PAGE,
        placeholder="<|image_pad|>",
        placeholder_id=patches.token_id,
        images=patches,
    )


def _colpali(vlm: Mapping[str, Any], processor: Mapping[str, Any]) -> PageRetrieval:
    vision = vlm.get("vision_config") or {}
    return PageRetrieval(
        class_name="ColPaliForRetrieval",
        text_prefix=f"<bos>{processor.get('query_prefix', 'Question: ')}",
        page_text=f"<image><bos>{processor.get('visual_prompt_prefix', 'Describe the image.')}\n",
        placeholder="<image>",
        placeholder_id=vlm.get("image_token_id", vlm.get("image_token_index", 256000)),
        images=ImageTower(
            image_size=vision.get("image_size", 224), patch_size=vision.get("patch_size", 14), has_class_token=False
        ),
    )


def _modules(files: FolderFiles) -> tuple[ScoringMask | None, TokenPooling | None]:
    """Return the mask and the token pooling of modules.json, if any. Raises ``ModelLoadError`` for other modules."""
    files.reject_processing_kwargs()
    files.reject_input_type_lengths()
    if not files.modules:
        return None, None
    task = files.transformer_task
    names = [module.name for module in files.modules[1:]]
    pools, masks = names[-1:] == ["HierarchicalTokenPooling"], names[:1] == ["MultiVectorMask"]
    require(
        task == "retrieval" and len(names) == masks + pools,
        f"The model's transformer does {task}, followed by {names}, which is not supported.",
    )
    if files.modality_config:
        files.require_methods({"text": ("forward", "embeddings"), "image": ("forward", "embeddings")})
    require(
        "message" not in files.modality_config,
        "The model takes conversations, which is not supported for a page retriever.",
    )
    return (
        scoring_mask(files.modules[1]) if masks else None,
        read_token_pooling(files.modules[-1]) if pools else None,
    )


@frozen(kw_only=True, eq=False)
class PageQueryFormat(TextFormat):
    """Every text is a query: a prefix before it and ``suffix`` (token ids) after it, without special tokens."""

    suffix: TokenIds
    kept_tokens: KeptTokens

    def adds_special_tokens(self, _: InputType | None) -> bool:
        """Return ``False``."""
        return False

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Append the suffix."""
        token_ids = np.concatenate([token_ids, self.suffix])
        return RenderedPrompt(token_ids, kept=self.kept_tokens.mask(token_ids, input_type))


def page_query_format(spec: PageRetrieval, tokenizer: Tokenizer) -> PageQueryFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    if (pad_id := tokenizer.id_named("pad_token")) is None:
        raise ModelLoadError("The tokenizer has no padding token, which every query ends with.")
    padding = np.full(QUERY_AUGMENTATION_TOKENS, pad_id, dtype=np.int32)
    suffix = np.concatenate([padding, all_ids(tokenizer, tokenizer.encode("\n"))])
    return PageQueryFormat(
        prefix=spec.text_prefix,
        added_tokens=len(suffix),
        suffix=suffix,
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
        require_request(
            not images, "This model takes a text or the image of a page; an input cannot contain both.", field="prompts"
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
    require(
        tokenizer.id_of(spec.placeholder) == spec.placeholder_id and np.count_nonzero(page == spec.placeholder_id) == 1,
        f"{spec.placeholder} is not token {spec.placeholder_id} of the tokenizer, the model's image placeholder.",
    )
    kept_tokens = kept_tokens_of(spec.mask or ScoringMask(), tokenizer)
    return PageFormat(processor, page, spec.placeholder_id, folder.max_model_len, kept_tokens)


PAGE_RETRIEVAL = ModelKind(
    read=read_page_retrieval,
    load="trio_pool_serve.models.page_retrieval.loading:load_page_retrieval",
    text_format=page_query_format,
    image_format=page_image_format,
)
