"""Dual encoders: a text tower and an image tower with one vector space.

CLIP (Radford et al., https://arxiv.org/abs/2103.00020), SigLIP (Zhai et al., https://arxiv.org/abs/2303.15343) and
SigLIP 2 (Tschannen et al., https://arxiv.org/abs/2502.14786), as bare transformers folders or with
sentence-transformers' modules.json.
"""

import math
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require, require_request
from trio_pool_serve.models.embedding import similarity_of
from trio_pool_serve.models.files.folder_files import FolderFiles
from trio_pool_serve.models.files.pooled_modules import require_vector_modules
from trio_pool_serve.models.loading.renderer_loading import probe_image_processor, read_image_processor
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelKind, ModelSpec
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.media.image_format import Arrays, FolderProcessor
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import ImageFeatures, RenderedPrompt, TokenIds

MODEL_CLASSES = {"clip": "CLIPModel", "siglip": "SiglipModel", "siglip2": "Siglip2Model"}
"""transformers' model class by model type."""

PADDED_TO_MAX = frozenset({"siglip", "siglip2"})
"""Model types trained on texts padded to the maximum length, whose text vector is the last token's state."""

METHODS = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}

DEFAULT_PATCH_SIZE = {"clip": 32, "siglip": 16, "siglip2": 16}
"""Pixels, by model type, if vision_config omits it."""

TEXT_KWARGS = ("padding", "truncation", "max_length")
"""processing_kwargs for texts, by which sentence-transformers pads texts as SigLIP's processor does."""


@frozen(kw_only=True)
class ImageTower:
    """The image tower; sizes are pixels per side."""

    image_size: int | None
    """``None`` if images keep their aspect ratio (NaFlex)."""
    patch_size: int
    has_class_token: bool
    """Whether a class token for the whole image is added to the patches."""

    def tokens(self, arrays: Arrays) -> tuple[int, ...]:
        """Return the positions of each image. NaFlex pixel values are patches already, padding included."""
        images, *shape = map(int, arrays["pixel_values"].shape)
        sides = shape[:1] if self.image_size is None else [side // self.patch_size for side in shape[1:]]
        return (math.prod(sides) + self.has_class_token,) * images


@frozen(kw_only=True)
class TextPadding:
    """Every text is padded to ``length`` tokens, as in training; on the left only if padding is attended to."""

    length: int
    attends_to_padding: bool
    pad_left: bool = False


@frozen(kw_only=True)
class DualEncoder(ModelSpec):
    """One vector per text, and one per image."""

    images: ImageTower
    padding: TextPadding | None = None

    @property
    def pads_texts(self) -> bool:
        """Whether the text tower was trained with padding."""
        return self.padding is not None

    tasks = frozenset({"embed", "score"})
    scoring = "vectors"


def read_dual_encoder(files: FolderFiles, _: ModelConfig) -> DualEncoder | None:
    """Read folders of the known model types."""
    model_type = files.config.get("model_type")
    if model_type not in MODEL_CLASSES:
        return None
    if any(name != MODEL_CLASSES[model_type] for name in files.architectures):
        raise ModelLoadError(
            f"{files.architectures[0]} is not supported; for {model_type} models, only {MODEL_CLASSES[model_type]} is."
        )
    _check_modules(files)
    return DualEncoder(
        modules=files.modules[1:],
        similarity=similarity_of(files),
        images=_image_tower(files, model_type),
        padding=_text_padding(files) if model_type in PADDED_TO_MAX else None,
    )


def _check_modules(files: FolderFiles) -> None:
    files.reject_input_type_lengths()
    files.reject_processing_kwargs(text=TEXT_KWARGS)
    kwargs = files.processing_kwargs.get("text") or {}
    require(
        kwargs.get("padding", True) in (True, "max_length", "longest") and kwargs.get("truncation", True),
        f"processing_kwargs requires text options {dict(kwargs)}, which is not supported.",
    )
    if files.modules and (files.modality_config or files.modules[0].name != "CLIPModel"):
        files.require_methods(METHODS)
        if (output := files.module_config.get("module_output_name")) != "sentence_embedding":
            raise ModelLoadError(f"The transformer module outputs {output!r}, which is not supported.")
    require_vector_modules(files.modules[1:])


def _image_tower(files: FolderFiles, model_type: str) -> ImageTower:
    vision = files.config.get("vision_config") or {}
    sizes = {
        "image_size": None if model_type == "siglip2" else vision.get("image_size", 224),
        "patch_size": vision.get("patch_size", DEFAULT_PATCH_SIZE[model_type]),
    }
    require(
        all(isinstance(size, int | None) for size in sizes.values()),
        f"vision_config has {sizes}; images and patches must be squares.",
    )
    return ImageTower(has_class_token=model_type == "clip", **sizes)


def _text_padding(files: FolderFiles) -> TextPadding:
    """Return how the tokenizer pads: to its maximum length, or to the tower's if that is less.

    Published tokenizers pad on the right, and pass a mask to the model only if they lack ``model_input_names``.
    """
    tokenizer = files.tokenizer_config
    positions = int(files.text_config["max_position_embeddings"])
    kwargs = files.processing_kwargs.get("text") or {}
    max_length = (
        kwargs.get("max_length") or files.module_config.get("max_seq_length") or tokenizer.get("model_max_length")
    )
    class_name = str(tokenizer.get("tokenizer_class", "")).removesuffix("Fast")
    default_side = "left" if class_name in ("GemmaTokenizer", "Siglip2Tokenizer") else "right"
    padding = TextPadding(
        length=min(int(max_length or positions), positions),
        attends_to_padding="attention_mask" not in (tokenizer.get("model_input_names") or ("attention_mask",)),
        pad_left=tokenizer.get("padding_side", default_side) == "left",
    )
    require(
        padding.attends_to_padding or not padding.pad_left,
        "The tokenizer pads texts on the left and masks the padding, which is not supported.",
    )
    return padding


DEFAULT_PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip2": "Siglip2ImageProcessor",
}
"""Image processor class by model type, for folders that do not name one."""


@frozen(kw_only=True)
class PaddedFormat(TextFormat):
    """Every text is padded with ``pad_id``."""

    padding: TextPadding
    pad_id: int

    def finish(self, token_ids: TokenIds, _: InputType | None) -> RenderedPrompt:
        """Pad a text."""
        tokens = len(token_ids)
        padded = np.full(max(self.padding.length, tokens), self.pad_id, dtype=np.int32)
        start = len(padded) - tokens if self.padding.pad_left else 0
        padded[start : start + tokens] = token_ids
        return RenderedPrompt(padded, attended=None if self.padding.attends_to_padding else tokens)


def dual_encoder_text_format(spec: DualEncoder, tokenizer: Tokenizer) -> TextFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer has no padding token."""
    if spec.padding is None:
        return TextFormat()
    if (pad_id := tokenizer.id_named("pad_token")) is None:
        raise ModelLoadError("The tokenizer has no padding token.")
    return PaddedFormat(padding=spec.padding, pad_id=pad_id)


@frozen
class TowerFormat:
    """An image is one input, which the image tower computes; texts contain none."""

    processor: FolderProcessor

    def alone(self, image: ImageFeatures) -> RenderedPrompt:
        """Return an image as an input, with token id 0 for each position of the image tower."""
        return RenderedPrompt(np.zeros(sum(image.tokens), dtype=np.int32), images=image)

    def expand(self, token_ids: TokenIds, images: Sequence[ImageFeatures]) -> RenderedPrompt:
        """Return a text unchanged. Raises ``InvalidRequestError`` if it contains images."""
        require_request(
            not images, "This model takes a text or an image; an input cannot contain both.", field="prompts"
        )
        return RenderedPrompt(token_ids)


def tower_processor(folder: AnyModelFolder, tower: ImageTower, default_class: str) -> FolderProcessor:
    """Return the image processor of an image tower. Raises ``ModelLoadError`` if it does not match the tower."""
    processor = read_image_processor(folder.transformer_path, tower, default_class=default_class)
    shape = probe_image_processor(processor).arrays["pixel_values"].shape
    if tower.image_size is None:
        matches = len(shape) == 3 and shape[2] == 3 * tower.patch_size**2
    else:
        matches = shape == (1, 3, tower.image_size, tower.image_size)
    require(
        matches,
        f"The image processor returns {shape} for an image, but the image tower takes "
        f"{f'{tower.image_size} pixels a side' if tower.image_size else f'patches of {tower.patch_size} pixels'}.",
    )
    return processor


DUAL_ENCODER = ModelKind(
    read=read_dual_encoder,
    load="trio_pool_serve.models.dual_encoder.loading:load_dual_encoder",
    text_format=dual_encoder_text_format,
    image_format=lambda folder: TowerFormat(
        tower_processor(folder, folder.spec.images, DEFAULT_PROCESSORS[folder.model_type])
    ),
)
