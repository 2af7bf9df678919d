"""Images among inputs, as clients send them."""

from collections.abc import Sequence

from attrs import frozen

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, field_of
from trio_pool_serve.prompts import ContentPrompt, ImagePart, Prompt, TextPart, TextPrompt

LONGEST_SCHEME = 32


def image_part(asked: str, *, place: str) -> ImagePart:
    """Return an image that is given as a URL, or as base64 and nothing else. Raises ``EmptyInputError``."""
    if not asked:
        raise EmptyInputError("An image is empty.", param=field_of(place))
    return ImagePart(asked if ":" in asked[:LONGEST_SCHEME] else f"data:;base64,{asked}", place)


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
    for index, image in enumerate(images):
        if not isinstance(image, str):
            raise InvalidRequestError("Images are given as URLs, or as their bytes in base64.", param=param)
        place = param if images is not asked else f"{param}[{index}]"
        prompts.append(ContentPrompt((image_part(image, place=place),)))
    return prompts


@frozen(kw_only=True)
class InputObject:
    """An input that says what it is, as Jina's clients send it; a text and an image make one vector together.

    ``image`` is a URL, or base64.
    """

    text: str | None = None
    image: str | None = None

    def prompt(self, *, place: str) -> Prompt:
        """Return what is to be read; ``place`` is where it stands. Raises ``InvalidRequestError`` for nothing."""
        if self.image is not None:
            parts = () if self.text is None else (TextPart(self.text),)
            return ContentPrompt((*parts, image_part(self.image, place=f"{place}.image")))
        if self.text is None:
            raise InvalidRequestError("An input has neither a text nor an image.", param=field_of(place))
        return TextPrompt(self.text)
