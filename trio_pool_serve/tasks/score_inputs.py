"""The two sides of a comparison: what a query or a document can be."""

from typing import TypeAlias

from trio_pool_serve.prompts import ContentPrompt, TextPart, TextPrompt

ScoreInput: TypeAlias = str | ContentPrompt
"""A text, or texts and images that make one side together."""


def prompt_of(side: ScoreInput) -> TextPrompt | ContentPrompt:
    """Return what is rendered of a side."""
    return TextPrompt(side) if isinstance(side, str) else side


def has_images(side: ScoreInput) -> bool:
    """Tell whether a side is more than text."""
    return not isinstance(side, str) and not all(isinstance(part, TextPart) for part in side.parts)


def text_of(side: ScoreInput) -> str:
    """Return the text of a side: its texts, a line each; its images have none."""
    if isinstance(side, str):
        return side
    return "\n".join(part.text for part in side.parts if isinstance(part, TextPart))
