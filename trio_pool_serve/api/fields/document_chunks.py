"""Late chunking: the fields of a request that asks for a vector for each chunk of one document."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Annotated, TypeAlias

import msgspec

from trio_pool_serve.api.fields.numbers import require_few_parts
from trio_pool_serve.config import NetworkConfig
from trio_pool_serve.errors import EmptyInputError, InvalidRequestError
from trio_pool_serve.prompts import ChunkedPrompt, Prompt, TextPrompt

Position: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, le=2**31 - 1, description="A position in the text, in Unicode code points.")
]

Chunk: TypeAlias = tuple[Position, Position]
"""The first character of a chunk and the one after its last."""


def document_of_chunks(prompts: Sequence[Prompt]) -> ChunkedPrompt:
    """Return the document whose consecutive chunks are the texts of ``input``, joined without anything between them.

    That is how Jina's API reads ``input`` with ``late_chunking``. Raises ``InvalidRequestError`` for inputs that are
    not texts, and for an empty one.
    """
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    if len(texts) < len(prompts):
        message = "late_chunking is for texts in input: they are the chunks of one document."
        raise InvalidRequestError(message, param="late_chunking")
    if "" in texts:
        raise EmptyInputError(f"Chunk {texts.index('')} is empty.", param="input")
    return ChunkedPrompt("".join(texts), tuple(pairwise(accumulate(map(len, texts), initial=0))))


def document_with_chunks(prompts: Sequence[Prompt], chunks: Sequence[Chunk], network: NetworkConfig) -> ChunkedPrompt:
    """Return the document that is the only text of ``input``, with the chunks that are given by their positions.

    Raises ``InvalidRequestError`` for other inputs, for too many chunks, and for one that is empty or not in the text.
    """
    document = prompts[0]
    if len(prompts) != 1 or not isinstance(document, TextPrompt):
        raise InvalidRequestError("chunks is for one text in input, the document.", param="chunks")
    if not chunks:
        raise EmptyInputError("chunks is empty.", param="chunks")
    require_few_parts(len(chunks), "chunks", network, "chunks")
    for number, (begin, end) in enumerate(chunks):
        if not begin < end <= len(document.text):
            problem = f"behind the {len(document.text)} characters of the text" if begin < end else "empty"
            raise InvalidRequestError(
                f"Chunk {number}, characters {begin} to {end}, is {problem} - at `$.chunks[{number}]`", param="chunks"
            )
    return ChunkedPrompt(document.text, tuple(chunks))
