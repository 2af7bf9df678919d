"""Loading the tokenizer of a model's folder."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.folder_files import read_json
from trio_pool_serve.models.loading.runner_loader import import_transformers
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.rendering.text.fast_tokenizer import FastTokenizer
from trio_pool_serve.rendering.text.slow_tokenizer import SlowTokenizer, named_ids
from trio_pool_serve.rendering.text.tokenizer import ModelChatTemplates, RenderChat, Tokenizer


def load_tokenizer(folder: AnyModelFolder, *, trust_remote_code: bool = False) -> Tokenizer:
    """Load the tokenizer of a model's folder. Blocks; raises ``ModelLoadError``."""
    import_transformers()
    # Imported here: it takes seconds and imports torch.
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            folder.transformer_path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise ModelLoadError(f"The tokenizer of {folder.transformer_path} cannot be loaded: {error}") from error
    if folder.chat_template is not None:
        loaded.chat_template = folder.chat_template
    if loaded.is_fast and folder.lower_case:
        normalizer = loaded.backend_tokenizer.normalizer
        loaded.backend_tokenizer.normalizer = NormalizerSequence([Lowercase(), *([normalizer] if normalizer else [])])
    _add_marker_tokens(loaded, folder.spec.marker_tokens)
    has_segments, chat = "token_type_ids" in loaded.model_input_names, _chat_renderer(loaded)
    texts = ModelChatTemplates(
        templates=_templates(loaded, folder),
        special_tokens={name: str(token) for name, token in loaded.special_tokens_map.items()},
    )
    if not loaded.is_fast:
        return SlowTokenizer(loaded, folder.lower_case, has_segments, chat, texts, loaded.truncation_side)
    ids = frozenset(loaded.all_special_ids), named_ids(loaded)
    return FastTokenizer(loaded.backend_tokenizer, *ids, has_segments, chat, texts, loaded.truncation_side)


def _templates(loaded: Any, folder: AnyModelFolder) -> Mapping[str, str]:
    """Return the chat templates by name. A processor's own files take precedence over the tokenizer's."""
    if folder.chat_template is not None:
        return {"default": folder.chat_template}
    for name in ("processor_config.json", "chat_template.json"):
        template = read_json(folder.transformer_path / name).get("chat_template")
        if template:
            break
    else:
        template = loaded.chat_template
    if not template:
        return {}
    return template if isinstance(template, dict) else {"default": template}


def _chat_renderer(loaded: Any) -> RenderChat | None:
    if not loaded.chat_template:
        return None

    def render(messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        rendered: str = loaded.apply_chat_template(messages, tokenize=False, **options)
        return rendered

    return render


def _add_marker_tokens(tokenizer: Any, markers: Iterable[str]) -> None:
    """Tokenise each marker, or its first word, as one token if the vocabulary has it; others stay ordinary text.

    ``[unused0]`` is in BERT's vocabulary, but is tokenised as ``[``, ``unused`` and so on.
    """
    split = []
    if not (texts := [*filter(str.strip, markers)]):
        return
    vocabulary = tokenizer.get_vocab()
    for marker in texts:
        known = next((text for text in (marker, marker.split()[0]) if text in vocabulary), None)
        if known is not None and tokenizer.tokenize(known) != [known]:
            split.append(tokenizers.AddedToken(known, normalized=False, special=True))
    tokenizer.add_tokens(split, special_tokens=True)
