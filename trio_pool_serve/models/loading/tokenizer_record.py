"""What a tokenizer of the ``tokenizers`` library needs besides its tokenizer.json."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from attrs import Factory, frozen

from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import TruncationSide
from trio_pool_serve.rendering.chat.template_sandbox import render_conversation
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates, RenderChat
from trio_pool_serve.storage.entry_record import RecordBase


@frozen(kw_only=True)
class TokenizerRecord(RecordBase):
    """All of a ``FastTokenizer`` that is not in the library's own file.

    ``special_tokens`` are the ones with names, such as ``bos_token``. ``chat_templates`` are the model's,
    ``own_templates`` the tokenizer's; they differ where a processor has files of its own. ``splits_special_tokens`` is
    whether special tokens in a text are tokenised as other text is.
    """

    special_ids: list[int]
    named_ids: dict[str, int]
    special_tokens: dict[str, str]
    has_segments: bool
    truncation_side: TruncationSide
    chat_templates: dict[str, str] = Factory(dict)
    own_templates: dict[str, str] = Factory(dict)
    splits_special_tokens: bool = False

    def tokenizer(self, backend: tokenizers.Tokenizer) -> FastTokenizer:
        """Return the tokenizer, which owns ``backend``."""
        backend.encode_special_tokens = self.splits_special_tokens
        return FastTokenizer(
            backend,
            frozenset(self.special_ids),
            self.named_ids,
            self.has_segments,
            chat_renderer(self.own_templates, self.special_tokens),
            ModelChatTemplates(templates=self.chat_templates, special_tokens=self.special_tokens),
            self.truncation_side,
        )


def chat_renderer(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> RenderChat | None:
    """Return what renders chat templates in this process, ``None`` if there are none.

    The option ``chat_template`` is the name of one of them, or another one.
    """
    if not templates:
        return None

    def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        variables = {**special_tokens, **options}
        named = variables.pop("chat_template", "default")
        flags = {name: bool(variables.pop(name, False)) for name in ("add_generation_prompt", "continue_final_message")}
        return render_conversation(templates.get(named, named), messages, variables, **flags)

    return render


def named_templates(template: Any) -> dict[str, str]:
    """Return chat templates by name, of one or several."""
    if not template:
        return {}
    return template if isinstance(template, dict) else {"default": template}


def chat_templates_of(folder: AnyModelFolder, own_templates: dict[str, str]) -> dict[str, str]:
    """Return a model's chat templates by name: a processor's own files take precedence over the tokenizer's."""
    if folder.chat_template is not None:
        return {"default": folder.chat_template}
    for name in ("processor_config.json", "chat_template.json"):
        template = read_json(folder.transformer_path / name).get("chat_template")
        if template:
            return named_templates(template)
    return own_templates
