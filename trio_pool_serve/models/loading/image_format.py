"""From a model's folder to how it reads images."""

import numpy as np
from PIL import Image

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.dual_encoder.image_format import TowerFormat
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, ImageTower
from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.page_retrieval.image_format import PageFormat
from trio_pool_serve.models.page_retrieval.spec import PageRetrieval
from trio_pool_serve.models.vision_language.image_format import PlaceholderFormat
from trio_pool_serve.models.vision_language.spec import ImagePatches, VisionLanguage
from trio_pool_serve.rendering.media.image_format import ImageFormat
from trio_pool_serve.rendering.media.image_processor import FolderProcessor, read_processor
from trio_pool_serve.rendering.media.image_tokens import GridTokens, TowerTokens
from trio_pool_serve.rendering.text.text_format import tokens_that_count
from trio_pool_serve.rendering.text.tokenizer_loading import load_tokenizer
from trio_pool_serve.types import ImageFeatures

USUAL_PROCESSORS = {
    "clip": "CLIPImageProcessor",
    "siglip": "SiglipImageProcessor",
    "siglip2": "Siglip2ImageProcessor",
}
"""By the model's type, for folders that do not name it."""


def load_image_format(folder: ModelFolder) -> ImageFormat | None:
    """Return how a model reads images, ``None`` if it reads none.

    Blocks for seconds. Raises ``ModelLoadError`` where the folder's files do not fit together.
    """
    architecture = folder.architecture
    if isinstance(architecture, DualEncoder):
        return TowerFormat(_tower_processor(folder, architecture.images, USUAL_PROCESSORS[folder.model_type]))
    if isinstance(architecture, VisionLanguage):
        processor = _grid_processor(folder, architecture.patches)
        return PlaceholderFormat(processor, architecture.patches.token_id, folder.max_model_len)
    if isinstance(architecture, PageRetrieval):
        return _page_format(folder, architecture)
    return None


def _page_format(folder: ModelFolder, architecture: PageRetrieval) -> PageFormat:
    if isinstance(architecture.images, ImageTower):
        processor = _tower_processor(folder, architecture.images, "SiglipImageProcessor")
    else:
        processor = _grid_processor(folder, architecture.images)
    tokenizer = load_tokenizer(folder)
    encoded = tokenizer.encode(architecture.page_text)
    page = tokenizer.finish(encoded, len(encoded), "right", add_special_tokens=False)
    known = tokenizer.id_of(architecture.placeholder) == architecture.placeholder_id
    if not known or np.count_nonzero(page == architecture.placeholder_id) != 1:
        raise ModelLoadError(
            f"{architecture.placeholder} is not token {architecture.placeholder_id} of the tokenizer, by which the "
            "model knows where an image is."
        )
    counting = None if architecture.mask is None else tokens_that_count(architecture.mask, tokenizer)
    return PageFormat(processor, page, architecture.placeholder_id, folder.max_model_len, counting)


def _tower_processor(folder: ModelFolder, tower: ImageTower, usual: str) -> FolderProcessor:
    processor = read_processor(folder.transformer_path, TowerTokens(tower), usual=usual)
    shape = probe(processor).arrays["pixel_values"].shape
    if tower.image_size is None:
        fits = len(shape) == 3 and shape[2] == 3 * tower.patch_size**2
    else:
        fits = shape == (1, 3, tower.image_size, tower.image_size)
    if not fits:
        raise ModelLoadError(
            f"The image processor makes {shape} of an image, which is not what the image tower takes: it reads "
            f"{f'{tower.image_size} pixels a side' if tower.image_size else f'patches of {tower.patch_size} pixels'}."
        )
    return processor


def _grid_processor(folder: ModelFolder, patches: ImagePatches) -> FolderProcessor:
    processor = read_processor(folder.transformer_path, GridTokens(patches), usual="Qwen2VLImageProcessor")
    if processor.class_name != "Qwen2VLImageProcessor":
        raise ModelLoadError(
            f"The image processor {processor.class_name} does not cut images as this model reads them."
        )
    shape = probe(processor).arrays["pixel_values"].shape
    if shape[1:] != (patches.numbers,):
        raise ModelLoadError(
            f"The image processor makes {shape} of an image, which is not what the image tower takes: patches of "
            f"{patches.numbers} numbers."
        )
    merged = int(processor.settings.get("merge_size", 2))
    if merged != patches.merged:
        raise ModelLoadError(f"The image processor merges {merged} patches a side, the model {patches.merged}.")
    return processor


def probe(processor: FolderProcessor) -> ImageFeatures:
    """Return what a processor makes of a small image: its settings are found wrong here or never."""
    try:
        return processor(Image.new("RGB", (64, 48)))
    except Exception as error:
        raise ModelLoadError(f"The image processor cannot be used: {error!r}") from error
