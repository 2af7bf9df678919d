"""What a tokenizer of the ``tokenizers`` library needs besides its tokenizer.json."""

from typing import Any

import tokenizers
from attrs import Factory, frozen

from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates
from trio_pool_serve.storage.entry_record import RecordBase

PROCESSOR_FILES = ("processor_config.json", "chat_template.json")


@frozen(kw_only=True)
class TokenizerRecord(RecordBase):
    """All of a ``FastTokenizer`` that is not in the library's own file.

    ``special_tokens`` are the ones with names, such as ``bos_token``. ``splits_special_tokens`` is whether special
    tokens in a text are tokenised as other text is.
    """

    special_ids: list[int]
    named_ids: dict[str, int]
    special_tokens: dict[str, str]
    has_segments: bool
    truncation_side: TruncationSide
    chat_templates: dict[str, str] = Factory(dict)
    splits_special_tokens: bool = False

    def tokenizer(self, backend: tokenizers.Tokenizer) -> FastTokenizer:
        """Return the tokenizer, which owns ``backend``."""
        backend.encode_special_tokens = self.splits_special_tokens
        return FastTokenizer(
            backend,
            frozenset(self.special_ids),
            self.named_ids,
            self.has_segments,
            ModelChatTemplates(templates=self.chat_templates, special_tokens=self.special_tokens),
            self.truncation_side,
        )


def named_templates(template: Any) -> dict[str, str]:
    """Return chat templates by name, of one or several."""
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    if not template:
        return {}
    return template if isinstance(template, dict) else {"default": template}


def chat_templates_of(folder: AnyModelFolder, of_tokenizer: Any) -> dict[str, str]:
    """Return a model's chat templates by name: a processor's own files take precedence over the tokenizer's."""
    if folder.chat_template is not None:
        return {"default": folder.chat_template}
    of_processor = (read_json(folder.transformer_path / name).get("chat_template") for name in PROCESSOR_FILES)
    return named_templates(next(filter(None, of_processor), None) or of_tokenizer)
