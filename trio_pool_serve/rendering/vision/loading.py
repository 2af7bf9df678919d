"""From a model's folder to how it reads images."""

from PIL import Image

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.model_folder.dual_encoder import DualEncoder
from trio_pool_serve.model_folder.folder import ModelFolder
from trio_pool_serve.model_folder.vision_language import ImagePatches, VisionLanguage
from trio_pool_serve.rendering.image_format import ImageFormat
from trio_pool_serve.rendering.vision.folder_processor import FolderProcessor, read_processor
from trio_pool_serve.rendering.vision.image_tokens import GridTokens, TowerTokens
from trio_pool_serve.rendering.vision.placeholder_format import PlaceholderFormat
from trio_pool_serve.rendering.vision.tower_format import TowerFormat
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
        return _tower_format(folder, architecture)
    if isinstance(architecture, VisionLanguage):
        return _grid_format(folder, architecture.patches)
    return None


def _tower_format(folder: ModelFolder, architecture: DualEncoder) -> TowerFormat:
    tower = architecture.images
    usual = USUAL_PROCESSORS[folder.model_type]
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
    return TowerFormat(processor)


def _grid_format(folder: ModelFolder, patches: ImagePatches) -> PlaceholderFormat:
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
    return PlaceholderFormat(processor, patches.token_id, folder.max_model_len)


def probe(processor: FolderProcessor) -> ImageFeatures:
    """Return what a processor makes of a small image: its settings are found wrong here or never."""
    try:
        return processor(Image.new("RGB", (64, 48)))
    except Exception as error:
        raise ModelLoadError(f"The image processor cannot be used: {error!r}") from error
