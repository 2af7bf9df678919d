"""Late interaction with images of pages as documents: ColPali and ColQwen2.

A vector for each patch of a page and for each token of a question (Faysse et al., https://arxiv.org/abs/2407.01449).
transformers' ``*ForRetrieval`` folders, bare or behind sentence-transformers' modules.json. What stands around a
question and around a page is not in the model's files: it is transformers' processors' own, as repeated here.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder.spec import ImageTower
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json
from trio_pool_serve.models.files.modalities import (
    modality_config,
    reject_input_type_lengths,
    reject_processing_kwargs,
    require_methods,
)
from trio_pool_serve.models.late_interaction.spec import LateInteraction, ScoringMask, scoring_mask
from trio_pool_serve.models.vision_language.spec import ImagePatches, read_patches

QUERY_AUGMENTATION_TOKENS = 10
"""Padding tokens behind every question: room for the model to think."""

QWEN_PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"


@frozen(kw_only=True)
class PageRetrieval(LateInteraction):
    """One vector for each token of a text, and for each of a page with what stands around it."""

    supports_messages = False

    class_name: str
    """transformers' class."""
    text_prefix: str
    """Before every text, whatever its input type: these models read a text as a question."""
    page_text: str
    """Around the image of a page; ``placeholder`` stands for it."""
    placeholder: str
    placeholder_id: int
    images: ImagePatches | ImageTower
    needs_token_type_ids: bool
    """Whether the model is handed segments, by which it knows that every token attends to every other."""


def read_page_retrieval(files: FolderFiles, config: ModelConfig) -> PageRetrieval | None:
    """Take folders of the two classes."""
    del config
    [*others, name] = files.architectures or ("",)
    if others or name not in ("ColPaliForRetrieval", "ColQwen2ForRetrieval"):
        return None
    mask = _mask(files)
    processor = read_json(files.transformer_path / "processor_config.json")
    mean_scores = files.sentence_transformers_config.get("similarity_fn_name") == "meanmaxsim"
    vlm: Mapping[str, Any] = files.config.get("vlm_config") or {}
    if name == "ColQwen2ForRetrieval":
        if vlm.get("model_type", "qwen2_vl") != "qwen2_vl":
            raise ModelLoadError(f"A ColQwen2 of {vlm['model_type']} is not supported.")
        patches = read_patches(vlm, "qwen2_vl")
        return PageRetrieval(
            class_name=name,
            text_prefix=processor.get("query_prefix") or "Query: ",
            page_text=processor.get("visual_prompt_prefix") or QWEN_PAGE,
            placeholder="<|image_pad|>",
            placeholder_id=patches.token_id,
            images=patches,
            needs_token_type_ids=False,
            mask=mask,
            mean_scores=mean_scores,
        )
    if vlm.get("model_type", "paligemma") != "paligemma":
        raise ModelLoadError(f"A ColPali of {vlm['model_type']} is not supported.")
    return PageRetrieval(
        class_name=name,
        text_prefix=f"<bos>{processor.get('query_prefix', 'Question: ')}",
        page_text=f"<image><bos>{processor.get('visual_prompt_prefix', 'Describe the image.')}\n",
        placeholder="<image>",
        placeholder_id=vlm.get("image_token_id", vlm.get("image_token_index", 256000)),
        images=_siglip(vlm.get("vision_config") or {}),
        needs_token_type_ids=True,
        mask=mask,
        mean_scores=mean_scores,
    )


def _siglip(vision: Mapping[str, Any]) -> ImageTower:
    return ImageTower(
        image_size=vision.get("image_size", 224), patch_size=vision.get("patch_size", 14), has_class_token=False
    )


def _mask(files: FolderFiles) -> ScoringMask | None:
    """Check the modules, of which the model needs none, and return the mask if they have one."""
    reject_processing_kwargs(files, {})
    reject_input_type_lengths(files)
    if not files.modules:
        return None
    task = files.module_config.get("transformer_task")
    names = [module.name for module in files.modules[1:]]
    if task != "retrieval" or names not in ([], ["MultiVectorMask"]):
        raise ModelLoadError(f"The model's transformer does {task}, with {names} behind it, which is not supported.")
    found = modality_config(files)
    if found:
        require_methods(found, {"text": ("forward", "embeddings"), "image": ("forward", "embeddings")})
    if "message" in found:
        raise ModelLoadError("The model is to read conversations, which is not supported for a page retriever.")
    return scoring_mask(files.modules[1]) if names else None
