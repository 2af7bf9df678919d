"""Making the renderer of a model's folder."""

from trio_pool_serve.config import InputConfig
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplates
from trio_pool_serve.rendering.chat.conversations import Conversations, ImageLoader
from trio_pool_serve.rendering.embeds.prompt_embeds import EmbedsFormat
from trio_pool_serve.rendering.media.image_protocols import ImageFormat
from trio_pool_serve.rendering.renderer import Renderer
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import ChatTexts, Tokenizer
from trio_pool_serve.rendering.text.tokenizer_pool import TokenizerPool
from trio_pool_serve.rendering.waiting_bytes import WaitingBytes
from trio_pool_serve.threads.offload import Offload


def text_renderer_of(folder: AnyModelFolder, tokenizer: Tokenizer, *, workers: int) -> TextRenderer:
    """Return the renderer of a model's texts, with ``workers`` copies of its tokenizer. Raises ``ModelLoadError``."""
    return TextRenderer(
        TokenizerPool(tokenizer, workers + 1),  # one for the event loop, which renders short texts by itself
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
    embeds_format: EmbedsFormat | str = "This model is read from texts.",
    templates: ChatTemplates | None = None,
    settings: InputConfig | None = None,
    media: ImageLoader | None = None,
    image_format: ImageFormat | None = None,
    waiting: WaitingBytes | None = None,
) -> Renderer:
    """Return the renderer for a model, with ``workers`` copies of its tokenizer. Raises ``ModelLoadError``.

    Without ``templates`` it reads single texts, tokens and token embeddings only.
    """
    texts = text_renderer_of(folder, tokenizer, workers=workers)
    renderer = Renderer(texts, offload, embeds_format, waiting=waiting or WaitingBytes())
    if templates is not None:
        settings = settings or InputConfig()
        renderer.conversations = Conversations(
            templates=templates,
            chat=tokenizer.chat if folder.spec.reads_conversations else ChatTexts(),
            read_text=renderer.render_text,
            shorten=renderer.shorten,
            max_model_len=folder.max_model_len,
            structured=folder.messages_in_parts,
            in_conversation=folder.spec.in_conversation,
            options=folder.spec.template_options,
            trusts_request_templates=settings.trust_request_chat_template,
            max_images=settings.max_images_per_input,
            media=media,
            image_format=image_format,
        )
    return renderer


def embeds_format_of(folder: AnyModelFolder, embeds_width: int, *, enabled: bool) -> EmbedsFormat | str:
    """Return which token embeddings a model takes, or why none; its runner takes them ``embeds_width`` wide."""
    if not enabled:
        return "This server takes no token embeddings; it does when it is started with --enable-prompt-embeds."
    if not folder.spec.takes_embeds:
        return "This model looks at the tokens themselves: token embeddings cannot stand in for them."
    if not embeds_width:
        return f"The forward pass of {folder.model_type} takes no token embeddings."
    return EmbedsFormat(embeds_width, folder.max_model_len)
