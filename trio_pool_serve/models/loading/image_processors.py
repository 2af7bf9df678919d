"""Loading the image processor of a model's folder."""

from pathlib import Path

from PIL import Image

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.rendering.media.image_processor import FolderProcessor, ImageTokens
from trio_pool_serve.types import ImageFeatures

KNOWN = frozenset({"CLIPImageProcessor", "SiglipImageProcessor", "Siglip2ImageProcessor", "Qwen2VLImageProcessor"})


def read_processor(folder: Path, image_tokens: ImageTokens, *, usual: str) -> FolderProcessor:
    """Return the processor of a transformer's folder, of class ``usual`` if it does not say. Raises ``ModelLoadError``.

    ``processor_config.json`` is how transformers 5 writes it, ``preprocessor_config.json`` how everybody did before.
    """
    settings = read_json(folder / "preprocessor_config.json")
    settings = settings or read_json(folder / "processor_config.json").get("image_processor") or {}
    if not settings:
        raise ModelLoadError(f"{folder} holds no preprocessor_config.json: it says not how images are read.")
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type") or usual
    class_name = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    if class_name not in KNOWN:
        raise ModelLoadError(f"The image processor {named} is not supported; {', '.join(sorted(KNOWN))} are.")
    return FolderProcessor(class_name=class_name, settings=settings, image_tokens=image_tokens)


def probe(processor: FolderProcessor) -> ImageFeatures:
    """Return what a processor makes of a small image: its settings are found wrong here or never."""
    try:
        return processor(Image.new("RGB", (64, 48)))
    except Exception as error:
        raise ModelLoadError(f"The image processor cannot be used: {error!r}") from error
