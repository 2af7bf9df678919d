"""Late interaction with images of pages as documents: ColPali and ColQwen2.

One vector per patch of a page and per token of a query (Faysse et al., https://arxiv.org/abs/2407.01449).
transformers' ``*ForRetrieval`` folders, bare or with sentence-transformers' modules.json. The text around a query and
around a page is not in the model's files; the constants below repeat those of transformers' processors.
"""

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder.spec import ImageTower
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json
from trio_pool_serve.models.late_interaction.spec import LateInteraction, ScoringMask, scoring_mask
from trio_pool_serve.models.vision_language.spec import ImagePatches, read_patches

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
    if vlm.get("model_type", model_type) != model_type:
        raise ModelLoadError(f"A {name.removesuffix('ForRetrieval')} of {vlm['model_type']} is not supported.")
    processor = read_json(files.transformer_path / "processor_config.json")
    spec = _colqwen2(vlm, processor) if model_type == "qwen2_vl" else _colpali(vlm, processor)
    mean_scores = files.sentence_transformers_config.get("similarity_fn_name") == "meanmaxsim"
    return evolve(spec, mask=_mask(files), mean_scores=mean_scores)


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


def _mask(files: FolderFiles) -> ScoringMask | None:
    """Return the mask of modules.json, if any. Raises ``ModelLoadError`` for any other module."""
    files.reject_processing_kwargs()
    files.reject_input_type_lengths()
    if not files.modules:
        return None
    task = files.transformer_task
    names = [module.name for module in files.modules[1:]]
    if task != "retrieval" or names not in ([], ["MultiVectorMask"]):
        raise ModelLoadError(f"The model's transformer does {task}, followed by {names}, which is not supported.")
    if files.modality_config:
        files.require_methods({"text": ("forward", "embeddings"), "image": ("forward", "embeddings")})
    if "message" in files.modality_config:
        raise ModelLoadError("The model takes conversations, which is not supported for a page retriever.")
    return scoring_mask(files.modules[1]) if names else None
