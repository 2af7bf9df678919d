"""Chat template settings in the files of a model's folder."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json, read_text
from trio_pool_serve.rendering.chat.chat_pair import ChatFormat, expects_content_parts
from trio_pool_serve.rendering.chat.template_sandbox import SANDBOX

JINJA = re.compile(r"\{[{%#]")

FLAT_MODEL_TYPES = frozenset({"apertus", "deepseek_v3", "gpt_oss", "seed_oss"})
"""Model types whose chat templates take a message's content as one string."""

TOKENIZER_KWARGS = frozenset({"padding", "truncation", "max_length", "return_tensors", "restore_suffix"})
"""``chat_template`` options that go to the tokenizer or to sentence-transformers, not to the template."""


def given_chat_template(given: str | None) -> str | None:
    """Return the template that ``--chat-template`` contains, or the file it names. Raises ``ModelLoadError``."""
    if given is None:
        return None
    template = given
    if not JINJA.search(given):
        try:
            template = read_text(Path(given).expanduser())
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"--chat-template {given} is neither a template nor a file: {error}") from error
    try:
        SANDBOX.parse(template)
    except TemplateSyntaxError as error:
        raise ModelLoadError(f"--chat-template cannot be parsed: {error}") from error
    return template


def variables_of(template: str) -> set[str]:
    """Return the variables that a template reads; none if it cannot be parsed."""
    try:
        return find_undeclared_variables(SANDBOX.parse(template))
    except TemplateSyntaxError:
        return set()


def names_both_texts(template: str | None) -> bool:
    """Return whether a template is for pairs: it has the roles query and document."""
    return all(re.search(rf"""["']{role}["']""", template or "") for role in ("query", "document"))


def read_chat_format(files: FolderFiles) -> ChatFormat | None:
    """Return how texts are put into the chat template, ``None`` if they are not. Raises ``ModelLoadError``."""
    options = _template_options(files)
    template = read_chat_template(files)
    is_declared = bool(files.modules) and files.chat_template is None
    if is_declared and files.modality_config.get("message") is None:
        return None
    if template is None and not files.modules:
        return None
    is_flat = files.text_config.get("model_type") in FLAT_MODEL_TYPES
    structured = read_message_format(files) if is_declared else None
    if structured is None:
        structured = not is_flat and expects_content_parts(template or ".type")
    return ChatFormat(
        structured=structured,
        options=options,
        required=is_declared or files.chat_template is not None,
        instruction_is_variable="instruction" in variables_of(template or ""),
    )


def read_message_format(files: FolderFiles) -> bool | None:
    """Return whether message content is a list of parts; ``None`` if the chat template's text decides."""
    if files.chat_template is not None:
        return None
    form = (files.modality_config.get("message") or {}).get("format", "auto")
    if form == "auto":
        return False if files.text_config.get("model_type") in FLAT_MODEL_TYPES else None
    return bool(form == "structured")


def read_chat_template(files: FolderFiles) -> str | None:
    """Return the folder's chat template, ``""`` for several named ones, ``None`` if it has none."""
    if files.chat_template is not None:
        return files.chat_template
    template = processor_template(files.transformer_path)
    if template is None:
        try:
            return read_text(files.transformer_path / "chat_template.jinja")
        except FileNotFoundError:
            template = files.tokenizer_config.get("chat_template")
    return template if isinstance(template, str | None) else ""


def processor_template(folder: Path) -> Any:
    """Return the chat template, or templates, of a processor's files, ``None`` if there are none.

    They take precedence over the tokenizer's. Only older versions of transformers save them there.
    """
    found = (read_json(folder / name).get("chat_template") for name in ("processor_config.json", "chat_template.json"))
    return next(filter(None, found), None)


def _template_options(files: FolderFiles) -> Mapping[str, Any]:
    unsupported = [name for name, options in files.processing_kwargs.items() if options and name != "chat_template"]
    options = files.processing_kwargs.get("chat_template") or {}
    unsupported += sorted(TOKENIZER_KWARGS & options.keys())
    require(not unsupported, f"processing_kwargs requires {', '.join(unsupported)}, which is not supported.")
    return options
