"""Contents: texts and images that make one input together."""

from collections.abc import Sequence
from typing import TypeAlias

from attrs import frozen

from trio_pool_serve.api.fields.numbers import require_few_parts, require_some
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, field_of
from trio_pool_serve.prompts import ContentPrompt, ImagePart, Part, Prompt, TextPart, TextPrompt

LONGEST_SCHEME = 32


def image_part(image: str, *, place: str) -> ImagePart:
    """Return the part for a URL of an image, or for its bytes in bare base64. Raises ``EmptyInputError``."""
    if not image:
        raise EmptyInputError("An image is empty.", param=field_of(place))
    return ImagePart(image if ":" in image[:LONGEST_SCHEME] else f"data:;base64,{image}", place)


def image_prompts(given: str | Sequence[object], network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Return a prompt for each of several images, or for one; ``param`` is the field that they are in.

    Raises ``InvalidRequestError`` for anything but strings, and for too many.
    """
    images = [given] if isinstance(given, str) else given
    require_some(images, network, param=param)
    prompts: list[Prompt] = []
    for index, image in enumerate(images):
        if not isinstance(image, str):
            raise InvalidRequestError("Images are given as URLs, or as their bytes in base64.", param=param)
        place = param if images is not given else f"{param}[{index}]"
        prompts.append(ContentPrompt((image_part(image, place=place),)))
    return prompts


@frozen(kw_only=True)
class ImageUrl:
    """The URL of an image; ``detail`` is ignored: it is for models that are not served here."""

    url: str
    detail: str | None = None


@frozen(kw_only=True)
class ContentPart:
    """A text or an image of a content: by its ``type``, or else by the field that is there."""

    type: str | None = None
    text: str | None = None
    image_url: str | ImageUrl | None = None
    image_base64: str | None = None

    def part(self, place: str) -> Part:
        """Return the part; ``place`` is where it is in the request. Raises ``InvalidRequestError`` for that field."""
        param = field_of(place)
        kind = self.type or ("text" if self.image_url is None else "image_url")
        match kind:
            case "text" | "input_text":
                return TextPart(_required(self.text, kind, "text", param))
            case "image_url" | "input_image":
                url = self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url
                return image_part(_required(url, kind, "image_url", param), place=place)
            case "image_base64":
                return image_part(_required(self.image_base64, kind, "image_base64", param), place=place)
        raise InvalidRequestError(
            f"Parts of type {kind!r} are not supported; text, image_url and image_base64 are.", param=param
        )


WireContent: TypeAlias = str | list[str | ContentPart]


@frozen(kw_only=True)
class ContentInput:
    """An input in parts, without a conversation around it."""

    content: WireContent

    def prompt(self, network: NetworkConfig, place: str) -> ContentPrompt:
        """Return the prompt; ``place`` is where it is in the request. Raises ``InvalidRequestError`` for that field."""
        param = field_of(place)
        parts = parts_of(self.content, f"{place}.content")
        if not parts:
            raise EmptyInputError("An input has no text and no image.", param=param)
        require_few_parts(len(parts), "parts", network, param)
        return ContentPrompt(parts)

    def plain_prompt(self, network: NetworkConfig, place: str) -> TextPrompt | ContentPrompt:
        """Return the prompt; texts alone are one text, a line each. Raises as ``prompt``."""
        prompt = self.prompt(network, place)
        texts = [part.text for part in prompt.parts if isinstance(part, TextPart)]
        return TextPrompt("\n".join(texts)) if len(texts) == len(prompt.parts) else prompt


def parts_of(content: WireContent | tuple[()], place: str) -> tuple[Part, ...]:
    """Return the parts; ``place`` is where they are in the request. Raises ``InvalidRequestError`` for that field."""
    if isinstance(content, str):
        return (TextPart(content),)
    return tuple(
        TextPart(part) if isinstance(part, str) else part.part(f"{place}[{index}]")
        for index, part in enumerate(content)
    )


def _required(value: str | None, kind: str, field: str, param: str) -> str:
    if value is None:
        raise InvalidRequestError(f"A part of type {kind!r} has no {field}.", param=param)
    return value
