"""Sample texts as a model's own inputs."""

from collections.abc import Sequence
from itertools import pairwise

from trio_pool_serve.models.loading.renderer_loading import text_renderer_of
from trio_pool_serve.models.loading.sample_texts import calibration_texts, held_out_texts
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.prompts import PairPrompt, RenderingParams, TextPrompt
from trio_pool_serve.rendering.text.text_renderer import TextRenderer
from trio_pool_serve.runner.compute_params import SamplePrompts
from trio_pool_serve.types import RenderedPrompt

MAX_TOKENS = 256
"""Longer texts are truncated."""


def sample_prompts(folder: AnyModelFolder, *, trust_remote_code: bool = False) -> SamplePrompts:
    """Return the sample texts, tokenised for a model: in pairs if it does nothing but score.

    Blocks for a second. Raises ``ModelLoadError``.
    """
    renderer = text_renderer_of(folder, load_tokenizer(folder, trust_remote_code=trust_remote_code), workers=0)
    return SamplePrompts(_render(folder, renderer, calibration_texts()), _render(folder, renderer, held_out_texts()))


def _render(folder: AnyModelFolder, renderer: TextRenderer, texts: Sequence[str]) -> list[RenderedPrompt]:
    params = RenderingParams(truncate_to=min(MAX_TOKENS, folder.max_model_len))
    scores_only = "score" in folder.spec.tasks and "embed" not in folder.spec.tasks
    prompts = [PairPrompt(*pair) for pair in pairwise(texts)] if scores_only else [TextPrompt(text) for text in texts]
    return [renderer.render(prompt, params) for prompt in prompts]
