"""How a folder's files say that its chat template is used."""

from collections.abc import Mapping
from typing import Any

from attrs import evolve

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json
from trio_pool_serve.rendering.chat.chat_format import ChatFormat, wants_parts

FLAT_MODEL_TYPES = frozenset({"apertus", "deepseek_v3", "gpt_oss", "seed_oss"})

OWN_OPTIONS = frozenset({"padding", "truncation", "max_length", "return_tensors", "restore_suffix"})
"""Options of the tokenizer and of sentence-transformers that no template sees."""


def read_chat_format(files: FolderFiles) -> ChatFormat | None:
    """Return the format if pairs may go through the chat template. Raises ``ModelLoadError``."""
    options = _template_options(files)
    template = chat_template(files)
    sighted = ChatFormat(
        structured=files.text_config.get("model_type") not in FLAT_MODEL_TYPES and wants_parts(template or ".type"),
        options=options,
    )
    if not files.modules:
        return evolve(sighted, required=False) if template is not None else None
    message = (files.module_config.get("modality_config") or {}).get("message")
    if message is None:
        return None
    form = message.get("format", "auto")
    return sighted if form == "auto" else evolve(sighted, structured=form == "structured")


def read_message_form(files: FolderFiles) -> bool | None:
    """Return whether messages are in parts, as a folder's files say; ``None`` where its template is to tell."""
    message = (files.module_config.get("modality_config") or {}).get("message") or {}
    form = message.get("format", "auto")
    if form == "auto":
        return False if files.text_config.get("model_type") in FLAT_MODEL_TYPES else None
    return bool(form == "structured")


def chat_template(files: FolderFiles) -> str | None:
    """Return the folder's template, ``""`` for several with names, ``None`` for none.

    Processors used to be saved with a template of their own beside the tokenizer's, in chat_template.json.
    """
    try:
        return (files.transformer_path / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        of_processor = read_json(files.transformer_path / "chat_template.json").get("chat_template")
        template = of_processor or files.tokenizer_config.get("chat_template")
        return template if isinstance(template, str | None) else ""


def _template_options(files: FolderFiles) -> Mapping[str, Any]:
    asked: Mapping[str, Mapping[str, Any]] = files.module_config.get("processing_kwargs") or {}
    unsupported = [name for name, options in asked.items() if options and name != "chat_template"]
    options = asked.get("chat_template") or {}
    unsupported += sorted(OWN_OPTIONS & options.keys())
    if unsupported:
        raise ModelLoadError(f"processing_kwargs asks for {', '.join(unsupported)}, which is not supported.")
    return options
