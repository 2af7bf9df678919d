"""Images among inputs, as clients send them."""

from collections.abc import Sequence

from attrs import frozen

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.types import ContentPrompt, ImagePart, Part, Prompt, TextPart, TextPrompt

LONGEST_SCHEME = 32


def image_part(asked: str, *, param: str) -> ImagePart:
    """Return an image that is given as a URL, or as base64 and nothing else. Raises ``EmptyInputError``."""
    if not asked:
        raise EmptyInputError("An image is empty.", param=param)
    return ImagePart(asked if ":" in asked[:LONGEST_SCHEME] else f"data:;base64,{asked}")


def image_prompts(asked: str | Sequence[object], network: NetworkConfig, *, param: str = "input") -> list[Prompt]:
    """Return a prompt for each of several images, or for one.

    Raises ``InvalidRequestError``, which blames ``param``, if anything else is among them, or too much.
    """
    images = [asked] if isinstance(asked, str) else asked
    if not images:
        raise EmptyInputError(f"{param} is empty.", param=param)
    if len(images) > network.max_inputs_per_request:
        raise InvalidRequestError(f"{len(images)} inputs are more than {network.max_inputs_per_request}.", param=param)
    prompts: list[Prompt] = []
    for image in images:
        if not isinstance(image, str):
            raise InvalidRequestError("Images are given as URLs, or as their bytes in base64.", param=param)
        prompts.append(ContentPrompt((image_part(image, param=param),)))
    return prompts


@frozen(kw_only=True)
class InputObject:
    """An input that says what it is, as Jina's clients send it; a text and an image make one vector together.

    ``image`` is a URL, or base64.
    """

    text: str | None = None
    image: str | None = None

    def prompt(self, *, param: str) -> Prompt:
        """Return what is to be read. Raises ``InvalidRequestError`` for nothing."""
        if self.image is not None:
            parts = () if self.text is None else (TextPart(self.text),)
            return ContentPrompt((*parts, image_part(self.image, param=param)))
        if self.text is None:
            raise InvalidRequestError("An input has neither a text nor an image.", param=param)
        return TextPrompt(self.text)


@frozen(kw_only=True)
class ImageUrl:
    """Where an image is."""

    url: str


@frozen(kw_only=True)
class ContentPart:
    """A part of an input, as Cohere's and Voyage's clients send it."""

    type: str
    text: str | None = None
    image_url: ImageUrl | str | None = None
    image_base64: str | None = None

    def part(self, *, param: str) -> Part:
        """Return what is to be read. Raises ``InvalidRequestError`` for what is none of the known types, or empty."""
        match self.type:
            case "text" if self.text is not None:
                return TextPart(self.text)
            case "image_url" if isinstance(self.image_url, ImageUrl):
                return image_part(self.image_url.url, param=param)
            case "image_url" if isinstance(self.image_url, str):
                return image_part(self.image_url, param=param)
            case "image_base64" if self.image_base64 is not None:
                return image_part(self.image_base64, param=param)
            case "text" | "image_url" | "image_base64":
                raise EmptyInputError(f"A part of an input has no {self.type}.", param=param)
        raise InvalidRequestError(f"The parts of an input can be texts and images, not {self.type!r}.", param=param)


@frozen(kw_only=True)
class ContentInput:
    """An input of several parts, which make one vector."""

    content: list[ContentPart]

    def prompt(self, *, param: str) -> Prompt:
        """Return what is to be read: several texts are one, a line each. Raises ``InvalidRequestError``."""
        parts = tuple(part.part(param=param) for part in self.content)
        if not parts:
            raise EmptyInputError("An input has no text and no image.", param=param)
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        return TextPrompt("\n".join(texts)) if len(texts) == len(parts) else ContentPrompt(parts)
