"""From a model's folder to the renderer of its texts."""

from functools import cache
from pathlib import Path

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.embedding.spec import Embedding
from trio_pool_serve.models.folder import ModelFolder, read_model_folder
from trio_pool_serve.rendering.chat.pair_templates import template_of
from trio_pool_serve.rendering.text.pairs import JoinedPair
from trio_pool_serve.rendering.text.text_format import text_format_of
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.rendering.text.tokenizer_loading import load_tokenizer
from trio_pool_serve.rendering.text.tokenizer_pool import TokenizerPool


@frozen
class TextRecipe:
    """How another process comes by the same renderer: a few hundred bytes, where a tokenizer has megabytes."""

    path: Path
    loading: ModelConfig

    def __call__(self) -> TextRenderer:
        """Return the renderer, which is loaded when it is first asked for. Raises ``ModelLoadError``."""
        return _load(self)


@cache
def _load(recipe: TextRecipe) -> TextRenderer:
    folder = read_model_folder(recipe.path, recipe.loading)
    tokenizer = load_tokenizer(folder, trust_remote_code=recipe.loading.trust_remote_code)
    return text_renderer_of(folder, tokenizer, workers=1, recipe=recipe)


def text_renderer_of(
    folder: ModelFolder, tokenizer: Tokenizer, *, workers: int, recipe: TextRecipe | None = None
) -> TextRenderer:
    """Return the renderer of a model's texts, with ``workers`` copies of its tokenizer. Raises ``ModelLoadError``.

    Only with a ``recipe`` can it be pickled.
    """
    architecture = folder.architecture
    return TextRenderer(
        TokenizerPool(tokenizer, workers + 1),  # one for the event loop, which renders short texts by itself
        max_model_len=folder.max_model_len,
        vocab_size=folder.vocab_size,
        pools_instruction=not isinstance(architecture, Embedding) or architecture.pools_instruction,
        pair_format=template_of(architecture, tokenizer) or JoinedPair(),
        text_format=text_format_of(folder, tokenizer),
        recipe=recipe,
    )
