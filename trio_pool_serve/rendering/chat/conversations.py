"""Renders conversations, and inputs of several texts and images."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import Factory, define, evolve

from trio_pool_serve.errors import (
    EmptyInputError,
    InvalidRequestError,
    MediaError,
    PoolServeError,
    field_of,
    require_request,
    unwrap_exception_groups,
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
from trio_pool_serve.rendering.chat.chat_pair import expects_content_parts
from trio_pool_serve.rendering.chat.chat_templates import ChatTemplate, ChatTemplates
from trio_pool_serve.rendering.media.image_format import ImageFormat
from trio_pool_serve.rendering.media.loader import MediaLoader
from trio_pool_serve.rendering.memory_budget import Reservation
from trio_pool_serve.rendering.text.excerpt import shorten
from trio_pool_serve.rendering.text.long_text import too_long
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates
from trio_pool_serve.types import Client, ImageFeatures, RenderedPrompt

MAX_TEMPLATE_CHARACTERS = 64 * 1024
"""Limit for a client's template; the longest of published models have a third of it."""

DEVELOPER = "developer"

MAX_CHARACTERS_PER_TOKEN = 1024
MIN_TEXT_CHARACTERS = 2**17
"""Maximum length of a rendered text: far more than is kept, for long conversations that are truncated."""

MAX_IMAGES = 16
"""Maximum number of images per input: all are in memory at once, until the input has been computed."""


@define(eq=False, kw_only=True)
class Conversations:
    """Renders conversations and contents for one model.

    ``uses_chat_template`` renders every input as a conversation of one user message, as in sentence-transformers.
    ``structured`` is whether the model's template expects texts as lists of parts. ``options`` are the template kwargs
    of the model's files. Without ``image_format`` only texts are accepted.
    """

    templates: ChatTemplates
    chat: ModelChatTemplates
    texts: TextRenderer
    structured: bool | None = None
    """``None`` to detect it from the template."""
    uses_chat_template: bool = False
    options: Mapping[str, Any] = Factory(dict)
    trusts_request_templates: bool = False
    media: MediaLoader | None = None
    image_format: ImageFormat | None = None

    @property
    def max_characters(self) -> int:
        """Maximum length of a rendered text, of which perhaps only the beginning is tokenised."""
        return max(MIN_TEXT_CHARACTERS, self.texts.max_model_len * MAX_CHARACTERS_PER_TOKEN)

    async def render(
        self, prompt: TextPrompt | ContentPrompt | ChatPrompt, params: RenderingParams, client: Client
    ) -> RenderedPrompt:
        """Return the model input, rendered in the turns of a client.

        Raises ``InvalidRequestError``, ``ContextLengthError`` or ``MediaError``. Cancellation: at once; loading the
        prompt's images stops, and a process or thread that works keeps its slot until it finishes.
        """
        if isinstance(prompt, ChatPrompt):
            return await self._render_chat(prompt, params, client)
        parts = (TextPart(prompt.text),) if isinstance(prompt, TextPrompt) else prompt.parts
        return await self._render_parts(parts, params, client)

    async def _render_parts(self, parts: Sequence[Part], params: RenderingParams, client: Client) -> RenderedPrompt:
        if self.uses_chat_template:
            return await self._render_as_message(parts, params, client)
        images = _images(parts)
        if not images:
            text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
            return await self._render_text(text, params, client)
        image_format = self._format_for(images)
        if len(parts) == 1:
            (image,) = await self._load(images, image_format, client)
            alone = image_format.alone(image)
            if alone is not None:
                return alone  # not truncated: its processor decides how many tokens an image has
        require_request(
            len(parts) == 1 or bool(self.chat.templates),
            "An input has several parts; this model reads one text or one image.",
            field="prompts",
        )
        return await self._render_as_message(parts, params, client)

    async def _render_as_message(
        self, parts: Sequence[Part], params: RenderingParams, client: Client
    ) -> RenderedPrompt:
        """Render parts as one user message."""
        if (most := params.max_text_tokens) is not None:
            parts = [
                part if isinstance(part, ImagePart) else TextPart(await self._shorten(part.text, most, client))
                for part in parts
            ]
        chat = ChatPrompt(
            messages=(ChatMessage("user", tuple(parts)),),
            add_generation_prompt=bool(self.options.get("add_generation_prompt", False)),
        )
        return await self._render_chat(chat, evolve(params, add_special_tokens=False), client)

    async def _render_chat(self, prompt: ChatPrompt, params: RenderingParams, client: Client) -> RenderedPrompt:
        if not prompt.messages:
            raise EmptyInputError("An input has no messages.", field="prompts")
        if self.image_format is not None and not self.chat.templates and prompt.chat_template is None:
            # The model takes texts and images but no conversations: clients send its input as one message.
            return await self._render_parts(_only_message(prompt), evolve(params, add_special_tokens=True), client)
        template, prompt = self._template_and_messages(prompt, params.instruction)
        images = _images(prompt.parts)
        text_params = evolve(params, instruction="", max_text_tokens=None)
        if not images:
            text = await self.templates.render(template, prompt, client.number, max_characters=self.max_characters)
            return await self._render_text(text, text_params, client)
        image_format = self._format_for(images)
        # Truncation could divide an image's tokens: inputs with images that are too long are rejected.
        text_params = evolve(text_params, truncate_to=None)
        tokens = np.empty(0, dtype=np.int32)

        async def render() -> None:
            nonlocal tokens
            text = await self.templates.render(template, prompt, client.number, max_characters=self.max_characters)
            tokens = (await self._render_text(text, text_params, client)).token_ids

        features = await self._load(images, image_format, client, render, max_tokens=self.texts.max_model_len)
        rendered = await self.templates.offload.run(
            "media", lambda: image_format.expand(tokens, features), abandon_on_cancel=True
        )
        limit = min(self.texts.max_model_len, params.truncate_to or self.texts.max_model_len)
        if len(rendered.token_ids) > limit:
            raise too_long(f"{len(rendered.token_ids)}", limit)
        return rendered

    async def _render_text(self, text: str, params: RenderingParams, client: Client) -> RenderedPrompt:
        return await self.templates.offload.in_turn(client.number, partial(self.texts.render, TextPrompt(text), params))

    async def _shorten(self, text: str, tokens: int, client: Client) -> str:
        """Return a text truncated to its first ``tokens`` tokens."""
        cut = partial(self.texts.with_tokenizer, partial(shorten, text=text, tokens=tokens))
        return await self.templates.offload.in_turn(client.number, cut)

    async def text_of(self, prompt: ChatPrompt, client: int) -> str:
        """Return the text of a conversation of texts. Raises ``InvalidRequestError``. Cancellation: as ``render``."""
        require_request(
            not _images(prompt.parts),
            "An input has an image; only conversations of texts can be tokenized.",
            field="prompts",
        )
        template, prompt = self._template_and_messages(prompt, "")
        return await self.templates.render(template, prompt, client, max_characters=self.max_characters)

    def _template_and_messages(self, prompt: ChatPrompt, instruction: str) -> tuple[ChatTemplate, ChatPrompt]:
        """Return the template of a conversation, and the conversation with roles that the template knows."""
        require_request(
            not (prompt.add_generation_prompt and prompt.continue_final_message),
            "Send add_generation_prompt or continue_final_message, not both.",
            field="continue_final_message",
        )
        template = self._template(prompt)
        messages = prompt.messages if DEVELOPER in template.text else _with_system_for_developer(prompt.messages)
        if instruction:
            messages = (ChatMessage("system", (TextPart(instruction),)), *messages)
        return template, evolve(prompt, messages=messages)

    def _template(self, prompt: ChatPrompt) -> ChatTemplate:
        """Return the model's default template, one of its templates by name, or the client's template."""
        requested = prompt.chat_template
        variables = {**self.chat.special_tokens, **self.options}
        variables.pop("add_generation_prompt", None)  # which prompts have
        text = self.chat.templates.get("default" if requested is None else requested)
        if text is not None:
            structured = expects_content_parts(text) if self.structured is None else self.structured
            return ChatTemplate(text=text, variables=variables, structured=structured)
        if requested is None:
            names = ", ".join(sorted(self.chat.templates))
            instead = f"no default chat template: set chat_template to one of {names}" if names else "no chat template"
            raise InvalidRequestError(f"This model has {instead}.", field="prompts")
        require_request(
            self.trusts_request_templates,
            "This server accepts no `{chat_template}` in requests (--trust-request-chat-template).",
            field="chat_template",
        )
        require_request(
            len(requested) <= MAX_TEMPLATE_CHARACTERS,
            f"{{chat_template}} has {len(requested)} characters; the limit is {MAX_TEMPLATE_CHARACTERS}.",
            field="chat_template",
        )
        return ChatTemplate(
            text=requested, variables=variables, structured=expects_content_parts(requested), is_from_request=True
        )

    def _format_for(self, images: Sequence[ImagePart]) -> ImageFormat:
        """Return the image format. Raises ``InvalidRequestError`` unless the model accepts that many images."""
        if self.image_format is None or self.media is None:
            raise InvalidRequestError("An input has an image; this model reads texts only.", field="prompts")
        require_request(
            len(images) <= MAX_IMAGES, f"An input has {len(images)} images; the limit is {MAX_IMAGES}.", field="prompts"
        )
        return self.image_format

    async def _load(
        self,
        images: Sequence[ImagePart],
        image_format: ImageFormat,
        client: Client,
        *besides: Callable[[], Awaitable[None]],
        max_tokens: int | None = None,
    ) -> list[ImageFeatures]:
        """Return the features of images, loaded concurrently, in order.

        None is prepared before all are fetched and the functions ``besides`` have returned: the features of one image
        can take 300 MB, and must not be held meanwhile. Images of background work are fetched as there is room. Raises
        ``ContextLengthError`` as soon as the prepared ones have more than ``max_tokens`` tokens, so that the rest is
        not held as well.
        """
        media = self.media
        assert media is not None  # noqa: S101  (``_format_for`` returned a format)
        fetched: dict[int, ImagePart] = {}
        loaded: dict[int, ImageFeatures] = {}

        async def fetch(index: int, image: ImagePart) -> None:
            with errors_at(image.place):
                fetched[index] = await media.fetch(image, held)

        async def prepare(index: int, image: ImagePart) -> None:
            with errors_at(image.place):
                loaded[index] = await media.load(image, image_format.processor, client)
            tokens = sum(sum(features.tokens) for features in loaded.values())
            if max_tokens is not None and tokens > max_tokens:
                raise too_long(f"at least {tokens}", max_tokens)

        room, held = (Reservation(media.memory, client, is_of_images=True) for _ in range(2))
        try:
            if client.is_background and (count := sum(image.url[:4].lower() == "http" for image in images)):
                await media.memory.wait_to_fetch(room, count * media.max_bytes)
            await _run_together(*besides, *(partial(fetch, *each) for each in enumerate(images)))
            room.release()
            await _run_together(*(partial(prepare, *each) for each in fetched.items()))
        finally:
            room.release()
            held.release()
        return [loaded[index] for index in range(len(images))]


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Errors of the block name the part of the request at fault, if it has a place: ``input[3].image: The image …``."""
    try:
        yield
    except (InvalidRequestError, MediaError) as error:
        # A copy, because another request that waits for the same image may have it at another place.
        raised = copy(error)
        if place:
            raised.args, raised.param = (f"{place}: {error.args[0]}",), field_of(place)
        raise raised from error


async def _run_together(*functions: Callable[[], Awaitable[None]]) -> None:
    """Run functions concurrently; the first that fails cancels the others, and its error is raised unwrapped."""
    with unwrap_exception_groups(PoolServeError):
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)


def _with_system_for_developer(messages: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    """Return messages in which ``developer``, OpenAI's newer name of the role, is ``system``.

    All messages of that role become one at the beginning, where templates expect it, a blank line between, as in vLLM.
    """
    if all(message.role != DEVELOPER for message in messages):
        return messages
    instructing = [message for message in messages if message.role in ("system", DEVELOPER)]
    parts = [part for message in instructing for part in (TextPart(""), *message.parts)][1:]
    return (
        ChatMessage("system", tuple(parts)),
        *(message for message in messages if message.role not in ("system", DEVELOPER)),
    )


def _only_message(prompt: ChatPrompt) -> Sequence[Part]:
    require_request(
        len(prompt.messages) == 1 and prompt.messages[0].role == "user",
        "An input must be one message with the role user: this model reads a text or an image.",
        field="prompts",
    )
    if not prompt.messages[0].parts:
        raise EmptyInputError("An input has no text and no image.", field="prompts")
    return prompt.messages[0].parts


def _images(parts: Sequence[Part]) -> list[ImagePart]:
    return [part for part in parts if isinstance(part, ImagePart)]
