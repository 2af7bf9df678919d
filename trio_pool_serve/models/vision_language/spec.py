"""Vision-language embedding models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

A language model with an image tower: each image placeholder is replaced by as many tokens as the tower outputs for the
image (Wang et al., https://arxiv.org/abs/2409.12191). Qwen3-VL-Embedding, GME and similar models pool the last token's
state, as declared in sentence-transformers' modules.json.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding.spec import (
    STATES,
    Embedding,
    assumption_of,
    modules_after_transformer,
    read_conversation,
    require_plain_states,
    similarity_of,
)
from trio_pool_serve.models.files.chat_template import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.rendering.media.image_processor import Arrays

DEFAULT_PATCH_SIZE = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
"""Pixels per side by model type, if vision_config omits it."""

CLASS_SUFFIXES = ("VLModel", "VLMoeModel", "ForConditionalGeneration")
"""Suffixes of the class names that such a model's weights are saved from."""

QWEN_IMAGE_TOKEN = 151655


@frozen(kw_only=True)
class ImagePatches:
    """How an image becomes tokens.

    An image is split into patches of ``patch_size`` pixels per side, repeated over ``temporal_patch_size`` frames.
    ``merge_size`` × ``merge_size`` patches become one token, in the place of ``token_id``.
    """

    token_id: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int

    @property
    def values_per_patch(self) -> int:
        """Pixel values of a patch: three channels in all frames."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def tokens(self, arrays: Arrays) -> tuple[int, ...]:
        """Return the tokens of each image, of whose patches ``image_grid_thw`` has time, height and width."""
        return tuple(int(patches) // self.merge_size**2 for patches in arrays["image_grid_thw"].prod(axis=1))


@frozen(kw_only=True)
class VisionLanguage(Embedding):
    """One vector for texts and images together."""

    patches: ImagePatches


def read_vision_language(files: FolderFiles, config: ModelConfig) -> VisionLanguage | None:
    """Read folders of the known model types."""
    model_type = files.config.get("model_type")
    if model_type not in DEFAULT_PATCH_SIZE:
        return None
    unsupported = [name for name in files.architectures if not name.endswith(CLASS_SUFFIXES)]
    if unsupported:
        raise ModelLoadError(f"{unsupported[0]} is not an embedding model, and is not supported.")
    require_plain_states(files)
    if files.modules and "message" in files.modality_config:
        files.require_methods({"message": STATES})
    return VisionLanguage(
        modules=modules_after_transformer(files, config),
        assumption=assumption_of(files, config),
        similarity=similarity_of(files),
        conversation=read_conversation(files) if files.modules else read_chat_format(files),
        patches=read_patches(files.config, model_type),
    )


def read_patches(config: Mapping[str, Any], model_type: str) -> ImagePatches:
    """Return the patches that a Qwen model's config declares, with transformers' defaults for omitted values."""
    vision = config.get("vision_config") or {}
    return ImagePatches(
        token_id=config.get("image_token_id", QWEN_IMAGE_TOKEN),
        patch_size=vision.get("patch_size", DEFAULT_PATCH_SIZE[model_type]),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        merge_size=vision.get("spatial_merge_size", 2),
    )
