"""Generative rerankers: causal language models that score a query and a document."""

import numpy as np
from attrs import frozen

from trio_pool_serve.models.generative_reranker.spec import (
    GenerativeReranker,
    RerankerTemplate,
    read_generative_reranker,
)
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.prompts import PairPrompt, RenderingParams
from trio_pool_serve.rendering.chat.pair_templates import chat_pair, shortened_pair
from trio_pool_serve.rendering.text.excerpt import encode_input
from trio_pool_serve.rendering.text.formats import PairFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer, all_ids
from trio_pool_serve.types import RenderedPrompt


@frozen
class RerankerPairFormat:
    """Prefix and suffix, which are never truncated, around a body, which may be."""

    format: RerankerTemplate

    def render(
        self, tokenizer: Tokenizer, prompt: PairPrompt, params: RenderingParams, max_model_len: int
    ) -> RenderedPrompt:
        """Return the tokens of prefix, body and suffix, each tokenised by itself."""
        texts = self.format.prefix, self.format.suffix
        prefix, suffix = (all_ids(tokenizer, tokenizer.encode(text)) for text in texts)
        frame = len(prefix) + len(suffix)
        text = self.format.body(*shortened_pair(tokenizer, prompt), params.instruction)
        excerpt, keep = encode_input(tokenizer, text, params, max_model_len, frame, "template")
        body = tokenizer.finish(excerpt.encoded, keep, params.truncation_side, add_special_tokens=False)
        return RenderedPrompt(np.concatenate([prefix, body, suffix]))


def reranker_pair_format(spec: GenerativeReranker, tokenizer: Tokenizer) -> PairFormat:
    """Return the pair format of a model. Raises ``ModelLoadError`` if its template cannot be used."""
    if isinstance(spec.template, RerankerTemplate):
        return RerankerPairFormat(spec.template)
    return chat_pair(spec.template, tokenizer)


GENERATIVE_RERANKER = ModelKind(
    read=read_generative_reranker,
    load="trio_pool_serve.models.generative_reranker.loading:load_generative_reranker",
    pair_format=reranker_pair_format,
)
