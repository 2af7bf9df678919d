"""Embedding models that read images among the words: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

A language model with an image tower before it: in the place of each image's placeholder stand as many tokens as the
tower makes of the image (Wang et al., https://arxiv.org/abs/2409.12191). Qwen3-VL-Embedding, GME and the like pool
the last token's state; sentence-transformers' modules.json says so.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding.spec import STATES, Embedding, modules_after_transformer, similarity_of
from trio_pool_serve.models.files.chat_template import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.files.modalities import modality_config, refuse_lengths, refuse_options, require_methods
from trio_pool_serve.rendering.chat.chat_format import ChatFormat

USUAL_PATCH_SIZE = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
"""The model types, and the patches (pixels a side) of those whose vision_config leaves it out."""

SAVED_FROM = ("VLModel", "VLMoeModel", "ForConditionalGeneration")
"""What the names of the classes end with that have such a model's weights."""

QWEN_IMAGE_TOKEN = 151655


@frozen(kw_only=True)
class ImagePatches:
    """How an image becomes tokens.

    It is cut into patches of ``size`` pixels a side, repeated over ``frames``; ``merged`` by ``merged`` patches become
    one token, which stands where the text has ``token_id``.
    """

    token_id: int
    size: int
    frames: int
    merged: int

    @property
    def numbers(self) -> int:
        """Numbers that a patch has: its colours in all frames."""
        return 3 * self.frames * self.size**2


@frozen(kw_only=True)
class VisionLanguage(Embedding):
    """One vector for texts and images together."""

    patches: ImagePatches


def read_vision_language(files: FolderFiles, config: ModelConfig) -> VisionLanguage | None:
    """Take folders of the model types known."""
    del config
    kind = files.config.get("model_type")
    if kind not in USUAL_PATCH_SIZE:
        return None
    wrong = [name for name in files.architectures if not name.endswith(SAVED_FROM)]
    if wrong:
        raise ModelLoadError(f"{wrong[0]} is not an embedding model, and what it does is not supported.")
    task = files.module_config.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ModelLoadError(f"The transformer's task is {task!r}, which its modules give no use for.")
    refuse_lengths(files)
    return VisionLanguage(
        modules=modules_after_transformer(files),
        vector_similarity=similarity_of(files),
        conversation=_conversation(files),
        patches=read_patches(files.config, kind),
    )


def _conversation(files: FolderFiles) -> ChatFormat | None:
    """Return how the template is used: by sentence-transformers' word, and in a bare folder if there is one."""
    if files.modules:
        found = modality_config(files)
        if "message" not in found:
            refuse_options(files, {})
            return None
        require_methods(found, {"message": STATES})
    return read_chat_format(files)


def read_patches(config: Mapping[str, Any], kind: str) -> ImagePatches:
    """Return what the config of a Qwen model says of images, with transformers' numbers for what it leaves out."""
    vision = config.get("vision_config") or {}
    return ImagePatches(
        token_id=config.get("image_token_id", QWEN_IMAGE_TOKEN),
        size=vision.get("patch_size", USUAL_PATCH_SIZE[kind]),
        frames=vision.get("temporal_patch_size", 2),
        merged=vision.get("spatial_merge_size", 2),
    )
