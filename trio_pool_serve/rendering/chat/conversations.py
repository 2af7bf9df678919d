"""Conversations, and texts and images that make one input together, to what the model reads."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import trio
from attrs import Factory, define, evolve

from trio_pool_serve.errors import (
    EmptyInputError,
    InvalidRequestError,
    MediaError,
    PoolServeError,
    at_place,
    innermost,
)
from trio_pool_serve.prompts import (
    ChatMessage,
    ChatPrompt,
    ContentPrompt,
    ImagePart,
    Part,
    RenderingParams,
    TextPart,
    TextPrompt,
)
from trio_pool_serve.rendering.chat.chat_format import expects_content_parts
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplate, ChatTemplates
from trio_pool_serve.rendering.media.image_protocols import ImageFormat, ImageProcessor
from trio_pool_serve.rendering.text.length_limit import too_long
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates
from trio_pool_serve.types import ImageFeatures, RenderedPrompt

MAX_TEMPLATE_CHARACTERS = 64 * 1024
"""Of a template that comes with a request; the longest that models are published with have a third of it."""


MAX_CHARACTERS_PER_TOKEN = 1024
MIN_TEXT_CHARACTERS = 2**17
"""Of what a template makes: far more than is read, for whoever wants a long conversation cut."""


class ImageLoader(Protocol):
    """Gets images, and has them prepared."""

    async def load(self, part: ImagePart, processor: ImageProcessor) -> ImageFeatures:
        """Return what a processor makes of an image. Raises ``MediaError``. Cancellation: at once."""


RenderText = Callable[[TextPrompt, RenderingParams], Awaitable[RenderedPrompt]]
"""Tokenises a text off the loop; raises and is cancelled as ``Renderer.render``."""

Shorten = Callable[[str, int], Awaitable[str]]
"""Returns the beginning of a text that makes so many tokens, off the loop."""


@define(eq=False, kw_only=True)
class Conversations:
    """How one model reads conversations and contents.

    ``uses_chat_template`` says that it reads every input as a conversation of one user message, as
    sentence-transformers has it. ``structured`` is how its own template wants texts. ``options`` are what its files
    have the template rendered with. Without ``image_format`` it reads texts only.
    """

    templates: ChatTemplates
    chat: ModelChatTemplates
    render_text: RenderText
    shorten: Shorten
    max_model_len: int
    structured: bool | None = None
    """``None`` to tell from the template."""
    uses_chat_template: bool = False
    options: Mapping[str, Any] = Factory(dict)
    trusts_request_templates: bool = False
    max_images: int = 16
    media: ImageLoader | None = None
    image_format: ImageFormat | None = None

    @property
    def max_characters(self) -> int:
        """The longest text that a template may make; only its beginning may be tokenised."""
        return max(MIN_TEXT_CHARACTERS, self.max_model_len * MAX_CHARACTERS_PER_TOKEN)

    async def render(self, prompt: TextPrompt | ContentPrompt | ChatPrompt, params: RenderingParams) -> RenderedPrompt:
        """Return what the model reads.

        Raises ``InvalidRequestError``, ``ContextLengthError`` or ``MediaError``. Cancellation: at once, wherever it
        waits; the images of the prompt are no longer loaded, and a process or thread keeps its place until it is done.
        """
        if isinstance(prompt, ChatPrompt):
            return await self._render_chat(prompt, params)
        parts = (TextPart(prompt.text),) if isinstance(prompt, TextPrompt) else prompt.parts
        return await self._render_parts(parts, params)

    async def _render_parts(self, parts: Sequence[Part], params: RenderingParams) -> RenderedPrompt:
        if self.uses_chat_template:
            return await self._render_in_conversation(parts, params)
        images = _images(parts)
        if not images:
            text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
            return await self.render_text(TextPrompt(text), params)
        image_format = self._format_for(images)
        if len(parts) == 1:
            (image,) = await self._load(images, image_format)
            alone = image_format.alone(image)
            if alone is not None:
                return alone  # an image has as many tokens as its processor gives it, whatever texts may have
        if len(parts) > 1 and not self.chat.templates:
            raise InvalidRequestError("This model reads a text or an image, not several together.", field="prompts")
        return await self._render_in_conversation(parts, params)

    @property
    def _reads_single_messages(self) -> bool:
        """Whether it reads texts and images but no conversations: clients send it what it reads in a message."""
        return self.image_format is not None and not self.chat.templates

    # -- conversations --------------------------------------------------------------------------------

    async def _render_in_conversation(self, parts: Sequence[Part], params: RenderingParams) -> RenderedPrompt:
        """Read parts as one user message."""
        if params.max_text_tokens is not None:
            parts = [await self._shortened(part, params.max_text_tokens) for part in parts]
        options = dict(self.options)
        chat = ChatPrompt(
            messages=(ChatMessage("user", tuple(parts)),),
            add_generation_prompt=bool(options.pop("add_generation_prompt", False)),
        )
        return await self._render_chat(chat, evolve(params, add_special_tokens=False))

    async def _render_chat(self, prompt: ChatPrompt, params: RenderingParams) -> RenderedPrompt:
        if not prompt.messages:
            raise EmptyInputError("A conversation has no messages.", field="prompts")
        if self._reads_single_messages and prompt.chat_template is None:
            return await self._render_parts(_only_message(prompt), evolve(params, add_special_tokens=True))
        if prompt.add_generation_prompt and prompt.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt and continue_final_message exclude each other.", field="continue_final_message"
            )
        template = self._template(prompt)
        if params.instruction:
            system = ChatMessage("system", (TextPart(params.instruction),))
            prompt = evolve(prompt, messages=(system, *prompt.messages))
        images = _images([part for message in prompt.messages for part in message.parts])
        reading = evolve(params, instruction="", max_text_tokens=None)
        if not images:
            text = await self.templates.render(template, prompt, max_characters=self.max_characters)
            return await self.render_text(TextPrompt(text), reading)
        image_format = self._format_for(images)
        # An image that is cut through is none: what is too long is refused, even where texts may be cut.
        reading = evolve(reading, truncate_to=None)
        text, features = await self._render_beside_images(template, prompt, images, image_format)
        tokens = (await self.render_text(TextPrompt(text), reading)).token_ids
        rendered = await self.templates.offload.run(
            "media", lambda: image_format.expand(tokens, features), abandon_on_cancel=True
        )
        self._check_length(rendered, params)
        return rendered

    async def _render_beside_images(
        self, template: ChatTemplate, prompt: ChatPrompt, images: Sequence[ImagePart], image_format: ImageFormat
    ) -> tuple[str, Sequence[ImageFeatures]]:
        """Render the template while the images are loaded; the first failure ends both, and is raised as itself.

        A client's template, which may take long, comes first: images are not held for its sake.
        """
        if template.is_from_request:
            text = await self.templates.render(template, prompt, max_characters=self.max_characters)
            return text, await self._load(images, image_format, self.max_model_len)
        text, features = "", list[ImageFeatures]()

        async def render() -> None:
            nonlocal text
            text = await self.templates.render(template, prompt, max_characters=self.max_characters)

        async def load() -> None:
            features.extend(await self._load(images, image_format, self.max_model_len))

        await _together(render, load)
        return text, features

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        """Return the template of a conversation: the model's own, one of those that it has by name, or the client's."""
        asked = prompt.chat_template
        text = self.chat.templates.get("default" if asked is None else asked)
        if text is not None:
            structured = expects_content_parts(text) if self.structured is None else self.structured
            return ChatTemplate(text=text, variables=self._variables, structured=structured)
        if asked is None:
            names = ", ".join(sorted(self.chat.templates))
            instead = (
                f"no default one of its chat templates: chat_template can name {names}" if names else "no chat template"
            )
            raise InvalidRequestError(f"This model has {instead}.", field="prompts")
        if not self.trusts_request_templates:
            raise InvalidRequestError(
                "Templates that come with a request are rendered with --trust-request-chat-template only.",
                field="chat_template",
            )
        if len(asked) > MAX_TEMPLATE_CHARACTERS:
            raise InvalidRequestError(
                f"The chat template has {len(asked)} characters; at most {MAX_TEMPLATE_CHARACTERS} are taken.",
                field="chat_template",
            )
        return ChatTemplate(
            text=asked, variables=self._variables, structured=expects_content_parts(asked), is_from_request=True
        )

    @property
    def _variables(self) -> dict[str, Any]:
        options = {name: value for name, value in self.options.items() if name != "add_generation_prompt"}
        return {**self.chat.special_tokens, **options}

    async def _shortened(self, part: Part, tokens: int) -> Part:
        return part if isinstance(part, ImagePart) else TextPart(await self.shorten(part.text, tokens))

    # -- images ---------------------------------------------------------------------------------------

    def _format_for(self, images: Sequence[ImagePart]) -> ImageFormat:
        """Return how images are read. Raises ``InvalidRequestError`` unless the model takes so many."""
        if self.image_format is None or self.media is None:
            raise InvalidRequestError("This model reads texts only.", field="prompts")
        if len(images) > self.max_images:
            raise InvalidRequestError(
                f"An input has {len(images)} images; at most {self.max_images} are taken (--max-images-per-input).",
                field="prompts",
            )
        return self.image_format

    async def _load(
        self, images: Sequence[ImagePart], image_format: ImageFormat, max_tokens: int | None = None
    ) -> list[ImageFeatures]:
        """Return the features of images, loaded concurrently, in order.

        Raises ``ContextLengthError`` as soon as those that are loaded have more than ``max_tokens`` tokens: of one
        image a model may read 300 MB, and the rest need not be held beside it.
        """
        media = self.media
        assert media is not None  # noqa: S101  (there is a format)
        loaded: dict[int, ImageFeatures] = {}

        async def one(index: int, image: ImagePart) -> None:
            try:
                loaded[index] = await media.load(image, image_format.processor)
            except (InvalidRequestError, MediaError) as error:
                raise at_place(image.place, error) from error
            tokens = sum(sum(features.tokens) for features in loaded.values())
            if max_tokens is not None and tokens > max_tokens:
                raise too_long(f"at least {tokens}", max_tokens)

        await _together(*(partial(one, index, image) for index, image in enumerate(images)))
        return [loaded[index] for index in range(len(images))]

    def _check_length(self, rendered: RenderedPrompt, params: RenderingParams) -> None:
        limit = min(self.max_model_len, params.truncate_to or self.max_model_len)
        if len(rendered.token_ids) > limit:
            raise too_long(f"{len(rendered.token_ids)}", limit)


async def _together(*works: Callable[[], Awaitable[None]]) -> None:
    """Run works concurrently; the first that fails cancels the others, and its error is raised as itself."""
    try:
        async with trio.open_nursery() as nursery:
            for work in works:
                nursery.start_soon(work)
    except BaseExceptionGroup as group:
        expected, rest = group.split(PoolServeError)
        if expected is None or rest is not None:
            raise
        raise innermost(expected) from None


def _only_message(prompt: ChatPrompt) -> Sequence[Part]:
    if len(prompt.messages) > 1 or prompt.messages[0].role != "user":
        raise InvalidRequestError("This model reads one message of the user: a text or an image.", field="prompts")
    if not prompt.messages[0].parts:
        raise EmptyInputError("The message has no text and no image.", field="prompts")
    return prompt.messages[0].parts


def _images(parts: Sequence[Part]) -> list[ImagePart]:
    return [part for part in parts if isinstance(part, ImagePart)]
