"""The input of one side of a score: a query or a document."""

from typing import TypeAlias

from trio_pool_serve.prompts import ContentPrompt, TextPart, TextPrompt

ScoreInput: TypeAlias = str | ContentPrompt
"""A text, or texts and images that are one input together."""


def prompt_of(side: ScoreInput) -> TextPrompt | ContentPrompt:
    """Return the prompt of a query or document."""
    return TextPrompt(side) if isinstance(side, str) else side


def has_images(side: ScoreInput) -> bool:
    """Return whether a side has parts other than text."""
    return not isinstance(side, str) and not all(isinstance(part, TextPart) for part in side.parts)


def text_of(side: ScoreInput) -> str:
    """Return the texts of a side, a line each."""
    if isinstance(side, str):
        return side
    return "\n".join(part.text for part in side.parts if isinstance(part, TextPart))
