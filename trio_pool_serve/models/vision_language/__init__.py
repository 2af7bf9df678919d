"""Vision-language embedding models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

A language model with an image tower: each image placeholder is replaced by as many tokens as the tower outputs for the
image (Wang et al., https://arxiv.org/abs/2409.12191). Qwen3-VL-Embedding, GME and similar models pool the last token's
state, as declared in sentence-transformers' modules.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require, require_request
from trio_pool_serve.models.embedding import (
    Embedding,
    assumption_of,
    modules_after_transformer,
    read_conversation,
    require_plain_states,
    similarity_of,
    why_not_scored,
)
from trio_pool_serve.models.files.chat_settings import read_chat_format
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.loading.renderer_loading import probe_image_processor, read_image_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelKind
from trio_pool_serve.rendering.media.image_format import Arrays, FolderProcessor
from trio_pool_serve.rendering.text.long_text import too_long
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

DEFAULT_PATCH_SIZE = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16}
"""Pixels per side by model type, if vision_config omits it."""

CLASS_SUFFIXES = ("VLModel", "VLMoeModel", "ForConditionalGeneration")
"""Suffixes of the class names that such a model's weights are saved from."""

QWEN_IMAGE_TOKEN = 151655


@frozen(kw_only=True)
class ImagePatches:
    """The patches of an image, which become tokens.

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
    if unsupported := [name for name in files.architectures if not name.endswith(CLASS_SUFFIXES)]:
        raise ModelLoadError(f"{unsupported[0]} is not an embedding model, and is not supported.")
    require_plain_states(files)
    return VisionLanguage(
        modules=modules_after_transformer(files, config),
        assumption=assumption_of(files, config),
        no_score=why_not_scored(files, config),
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


@frozen
class PlaceholderFormat:
    """``token_id`` is the image placeholder; inputs with their images are limited to ``max_model_len`` tokens."""

    processor: FolderProcessor
    token_id: int
    max_model_len: int

    def alone(self, _: ImageFeatures) -> RenderedPrompt | None:
        """Return ``None``: the chat template renders the text around an image."""
        return None

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Repeat each placeholder as many times as its image has tokens.

        Raises ``InvalidRequestError`` unless there are as many placeholders as images: a client's text may contain the
        placeholder. Raises ``ContextLengthError`` for more tokens than ``max_model_len``.
        """
        if not images:
            reject_placeholders(token_ids, self.token_id)
            return RenderedPrompt(token_ids)
        (positions,) = np.nonzero(token_ids == self.token_id)
        sizes = [tokens for image in images for tokens in image.tokens]
        require_request(
            len(positions) == len(sizes),
            f"An input has {len(sizes)} images, but {len(positions)} placeholders for images.",
            field="prompts",
        )
        repeats = np.ones(len(token_ids), dtype=np.int64)
        repeats[positions] = sizes
        if repeats.sum() > self.max_model_len:
            raise too_long(f"{repeats.sum()}", self.max_model_len)
        return RenderedPrompt(np.repeat(token_ids, repeats), images=join_images(images))


def reject_placeholders(token_ids: TokenIds, token_id: int) -> None:
    """Raise ``InvalidRequestError`` for an image placeholder: the model would match it with any image of the batch."""
    require_request(
        token_id not in token_ids, "An input has a placeholder for an image, but no image.", field="prompts"
    )


def join_images(images: Sequence[ImageFeatures]) -> ImageFeatures:
    """Concatenate the images of one input: the first dimension of every array is images or patches."""
    if len(images) == 1:
        return images[0]
    return ImageFeatures(
        {name: np.concatenate([image.arrays[name] for image in images]) for name in images[0].arrays},
        tuple(tokens for image in images for tokens in image.tokens),
    )


def grid_processor(folder: AnyModelFolder, patches: ImagePatches) -> FolderProcessor:
    """Return the image processor of a Qwen-VL model. Raises ``ModelLoadError`` if it does not match the model."""
    processor = read_image_processor(folder.transformer_path, patches, default_class="Qwen2VLImageProcessor")
    require(
        processor.class_name == "Qwen2VLImageProcessor",
        f"The image processor {processor.class_name} does not prepare images for this model.",
    )
    shape = probe_image_processor(processor).arrays["pixel_values"].shape
    require(
        shape[1:] == (patches.values_per_patch,),
        f"The image processor returns {shape} for an image, but the image tower takes patches of "
        f"{patches.values_per_patch} values.",
    )
    merge_size = int(processor.settings.get("merge_size", 2))
    require(
        merge_size == patches.merge_size,
        f"The image processor has merge_size {merge_size}, the model {patches.merge_size}.",
    )
    return processor


VISION_LANGUAGE = ModelKind(
    read=read_vision_language,
    load="trio_pool_serve.models.vision_language.loading:load_vision_language",
    image_format=lambda folder: PlaceholderFormat(
        grid_processor(folder, folder.spec.patches), folder.spec.patches.token_id, folder.max_model_len
    ),
)
