"""Building the renderer of a model's folder, with its image processor and format of token embeddings."""

from pathlib import Path

from attrs import evolve

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.rendering.chat.conversations import Conversations
from trio_pool_serve.rendering.media.image_format import FolderProcessor, ImageFormat, ImageTokens
from trio_pool_serve.rendering.media.loader import MediaLoader
from trio_pool_serve.rendering.memory_budget import MemoryBudget
from trio_pool_serve.rendering.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates, Tokenizer, TokenizerPool
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import ImageFeatures

SUPPORTED = frozenset({"CLIPImageProcessor", "SiglipImageProcessor", "Siglip2ImageProcessor", "Qwen2VLImageProcessor"})


def text_renderer_of(folder: AnyModelFolder, tokenizer: Tokenizer, *, workers: int) -> TextRenderer:
    """Return a model's text renderer, with ``workers`` + 1 copies of its tokenizer. Raises ``ModelLoadError``."""
    if folder.routes:
        pairs, numbers = zip(folder.routes, tokenizer.routes, strict=True), folder.spec.route_numbers
        own = [text_renderer_of(route, its, workers=workers) for route, its in pairs]
        of_types = {key: evolve(own[number], route=number) for key, number in numbers.items()}
        chosen: TextRenderer = own[numbers.get(None, 0)]
        return evolve(chosen, max_model_len=folder.max_model_len, routes=of_types)
    return TextRenderer(
        TokenizerPool(tokenizer, workers + 1),  # one for the event loop, which renders short texts inline
        max_model_len=folder.max_model_len,
        vocab_size=folder.vocab_size,
        pools_instruction=folder.spec.pools_instruction,
        pair_format=folder.kind.pair_format(folder.spec, tokenizer),
        text_format=folder.kind.text_format(folder.spec, tokenizer),
    )


def renderer_of(
    folder: AnyModelFolder,
    tokenizer: Tokenizer,
    offload: Offload,
    *,
    workers: int,
    templates: ChatTemplates | None = None,
    trusts_request_templates: bool = False,
    media: MediaLoader | None = None,
    image_format: ImageFormat | None = None,
    memory: MemoryBudget | None = None,
) -> Renderer:
    """Return a model's renderer, with ``workers`` + 1 copies of its tokenizer. Raises ``ModelLoadError``.

    Without ``templates`` it renders only single texts, token ids and token embeddings.
    """
    renderer = Renderer(text_renderer_of(folder, tokenizer, workers=workers), offload, memory=memory or MemoryBudget())
    if templates is not None:
        renderer.conversations = Conversations(
            templates=templates,
            chat=tokenizer.chat if folder.spec.supports_messages else ModelChatTemplates(),
            texts=renderer.texts,
            structured=folder.structured_messages,
            uses_chat_template=folder.spec.uses_chat_template,
            options={} if folder.spec.conversation is None else folder.spec.conversation.options,
            trusts_request_templates=trusts_request_templates,
            media=media,
            image_format=image_format,
        )
    return renderer


def embeds_format_of(folder: AnyModelFolder, embeds_width: int, *, enabled: bool) -> EmbedsFormat | str:
    """Return the format of a model's ``prompt_embeds``, or the message that refuses them.

    ``embeds_width`` is the width of the runner's token embeddings, 0 if its forward pass takes none.
    """
    if not enabled:
        return "This server does not accept token embeddings; start it with --enable-prompt-embeds."
    if not folder.spec.supports_prompt_embeds:
        return "This model requires token ids, which token embeddings cannot replace."
    if not embeds_width:
        return f"{folder.model_type} models do not accept token embeddings."
    return EmbedsFormat(embeds_width, folder.max_model_len)


def read_image_processor(folder: Path, image_tokens: ImageTokens, *, default_class: str) -> FolderProcessor:
    """Return the processor of a transformer's folder. Raises ``ModelLoadError``.

    ``default_class`` is used if the files name no class. transformers 5 writes ``processor_config.json``, earlier
    versions wrote ``preprocessor_config.json``.
    """
    settings = read_json(folder / "preprocessor_config.json")
    settings = settings or read_json(folder / "processor_config.json").get("image_processor") or {}
    require(bool(settings), f"{folder} contains no preprocessor_config.json, so images cannot be prepared.")
    named = settings.get("image_processor_type") or settings.get("feature_extractor_type") or default_class
    class_name = named.removesuffix("Fast").replace("FeatureExtractor", "ImageProcessor")
    require(
        class_name in SUPPORTED, f"The image processor {named} is not supported; {', '.join(sorted(SUPPORTED))} are."
    )
    return FolderProcessor(class_name=class_name, settings=settings, image_tokens=image_tokens)


def probe_image_processor(processor: FolderProcessor) -> ImageFeatures:
    """Return the features of a small image, so that wrong settings fail at start-up. Raises ``ModelLoadError``."""
    from PIL import Image  # imported here: 10 ms, for models with images only

    try:
        return processor(Image.new("RGB", (64, 48)))
    except Exception as error:
        raise ModelLoadError(f"The image processor cannot be used: {error!r}") from error
