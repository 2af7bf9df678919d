"""What a tokenizer of the ``tokenizers`` library needs besides its tokenizer.json."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from attrs import frozen

from trio_pool_serve.models.files.chat_template import processor_template
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates
from trio_pool_serve.storage.model_cache import RecordBase


@frozen(kw_only=True)
class TokenizerRecord(RecordBase):
    """All of a ``FastTokenizer`` that is not in the library's own file.

    ``splits_special_tokens`` is whether special tokens in a text are tokenised as other text is.
    """

    special_ids: list[int]
    named_ids: dict[str, int]
    has_segments: bool
    truncation_side: TruncationSide
    chat: ModelChatTemplates
    splits_special_tokens: bool = False

    def tokenizer(self, backend: tokenizers.Tokenizer) -> FastTokenizer:
        """Return the tokenizer, which owns ``backend``."""
        backend.encode_special_tokens = self.splits_special_tokens
        return FastTokenizer(
            backend,
            frozenset(self.special_ids),
            self.named_ids,
            self.has_segments,
            self.chat,
            self.truncation_side,
        )


def _by_name(template: Any) -> dict[str, str]:
    """Return one or several chat templates by name."""
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    if isinstance(template, dict):
        return template
    return {"default": template} if template else {}


def chat_templates_of(
    folder: AnyModelFolder, of_tokenizer: Any, special_tokens: Mapping[str, str]
) -> ModelChatTemplates:
    """Return a model's chat templates."""
    found = folder.chat_template
    if found is None:
        found = processor_template(folder.transformer_path) or of_tokenizer
    return ModelChatTemplates(templates=_by_name(found), special_tokens=special_tokens)
