"""How a model reads two texts through its tokenizer's chat template.

sentence-transformers' form for rerankers: a message of role ``query``, one of role ``document``, and the
instruction as a system message before them.
"""

from collections.abc import Mapping
from typing import Any

from attrs import evolve, frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import FolderFiles, read_json

STRUCTURED_BY_SIGHT = ("content[0]", ".type", "'type'", '"type"', "item.type", "message.content[")
"""What sentence-transformers takes for a template that wants a message's content in parts."""

FLAT_MODEL_TYPES = frozenset({"apertus", "deepseek_v3", "gpt_oss", "seed_oss"})

OWN_OPTIONS = frozenset({"padding", "truncation", "max_length", "return_tensors", "restore_suffix"})
"""Options of the tokenizer and of sentence-transformers that no template sees."""


@frozen(kw_only=True)
class ChatFormat:
    """How messages are handed to the template.

    ``structured`` makes a message's content a list of parts. ``options`` are what the template is rendered
    with. ``required`` says that the files name this format; where they do not, it is used if the template has
    a place for both texts.
    """

    structured: bool
    options: Mapping[str, Any]
    required: bool = True

    def messages(self, first: str, second: str, instruction: str) -> list[dict[str, Any]]:
        """Return the conversation that two texts make."""
        said = [("query", first), ("document", second)]
        if instruction:
            said.insert(0, ("system", instruction))
        return [{"role": role, "content": self._content(text)} for role, text in said]

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return [{"type": "text", "text": text}] if self.structured else text


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


def wants_parts(template: str) -> bool:
    """Tell whether a template looks like one that wants a message's content in parts."""
    return any(pattern in template for pattern in STRUCTURED_BY_SIGHT)


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
