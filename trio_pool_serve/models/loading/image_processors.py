"""Loading the image processor of a model's folder."""

from pathlib import Path

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.rendering.media.image_processor import FolderProcessor, ImageTokens
from trio_pool_serve.types import ImageFeatures

SUPPORTED = frozenset({"CLIPImageProcessor", "SiglipImageProcessor", "Siglip2ImageProcessor", "Qwen2VLImageProcessor"})


def read_image_processor(folder: Path, image_tokens: ImageTokens, *, default_class: str) -> FolderProcessor:
    """Return the processor of a transformer's folder. Raises ``ModelLoadError``.

    ``default_class`` is used if the files name no class. transformers 5 writes ``processor_config.json``, earlier
    versions wrote ``preprocessor_config.json``.
    """
    settings = read_json(folder / "preprocessor_config.json")
    settings = settings or read_json(folder / "processor_config.json").get("image_processor") or {}
    if not settings:
        raise ModelLoadError(f"{folder} holds no preprocessor_config.json, so images cannot be prepared.")
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type") or default_class
    class_name = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if class_name not in SUPPORTED:
        raise ModelLoadError(f"The image processor {named} is not supported; {', '.join(sorted(SUPPORTED))} are.")
    return FolderProcessor(class_name=class_name, settings=settings, image_tokens=image_tokens)


def probe_image_processor(processor: FolderProcessor) -> ImageFeatures:
    """Return the features of a small image, so that wrong settings fail at start-up. Raises ``ModelLoadError``."""
    from PIL import Image  # imported here: 10 ms, for models with images only

    try:
        return processor(Image.new("RGB", (64, 48)))
    except Exception as error:
        raise ModelLoadError(f"The image processor cannot be used: {error!r}") from error
