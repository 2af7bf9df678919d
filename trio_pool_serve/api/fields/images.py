"""Images among inputs."""

from collections.abc import Sequence

from attrs import frozen

from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError, field_of
from trio_pool_serve.prompts import ContentPrompt, ImagePart, Prompt, TextPart, TextPrompt

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
    if not images:
        raise EmptyInputError(f"{param} is empty.", param=param)
    if len(images) > network.max_inputs_per_request:
        raise InvalidRequestError(f"{len(images)} inputs are more than {network.max_inputs_per_request}.", param=param)
    prompts: list[Prompt] = []
    for index, image in enumerate(images):
        if not isinstance(image, str):
            raise InvalidRequestError("Images are given as URLs, or as their bytes in base64.", param=param)
        place = param if images is not given else f"{param}[{index}]"
        prompts.append(ContentPrompt((image_part(image, place=place),)))
    return prompts


@frozen(kw_only=True)
class InputObject:
    """An input as an object, as Jina's clients send it; a text and an image make one vector together.

    ``image`` is a URL, or base64.
    """

    text: str | None = None
    image: str | None = None

    def prompt(self, *, place: str) -> Prompt:
        """Return the prompt; ``place`` is where it is in the request. Raises ``InvalidRequestError`` if it is empty."""
        if self.image is not None:
            parts = () if self.text is None else (TextPart(self.text),)
            return ContentPrompt((*parts, image_part(self.image, place=f"{place}.image")))
        if self.text is None:
            raise InvalidRequestError("An input has neither a text nor an image.", param=field_of(place))
        return TextPrompt(self.text)
