"""Late-interaction models: one vector per token, compared by MaxSim."""

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.late_interaction.spec import (
    LateInteraction,
    QueryExpansion,
    ScoringMask,
    read_late_interaction,
)
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.formats import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True, eq=False)
class KeptTokens:
    """A ``ScoringMask`` as token ids."""

    skipped: npt.NDArray[np.int32]
    skipped_input_types: frozenset[str]
    only: npt.NDArray[np.int32]

    def mask(self, token_ids: TokenIds, input_type: InputType | None) -> npt.NDArray[np.bool_] | None:
        """Return whether each token is kept; ``None`` if all are. A text without an input type is a document."""
        kept = np.ones(len(token_ids), dtype=np.bool_)
        if (input_type or "document") in self.skipped_input_types:
            kept &= ~np.isin(token_ids, self.skipped)
        if input_type != "query" and len(self.only):
            kept &= np.isin(token_ids, self.only)
        return None if kept.all() else kept


@frozen(kw_only=True)
class LateInteractionFormat(TextFormat):
    """Queries are padded to their length with ``expansion_id``.

    If ``kept_tokens`` is ``None``, exactly the tokens that are attended to are kept.
    """

    expansion: QueryExpansion | None
    expansion_id: int
    kept_tokens: KeptTokens | None

    def finish(self, token_ids: TokenIds, input_type: InputType | None) -> RenderedPrompt:
        """Expand a query, and mark the kept tokens."""
        tokens = len(token_ids)
        attended = None
        if input_type == "query" and self.expansion is not None and tokens < self.expansion.length:
            added = np.full(self.expansion.length - tokens, self.expansion_id, dtype=np.int32)
            token_ids = np.concatenate([token_ids, added])
            attended = None if self.expansion.attends_to_expansion else tokens
        kept = None
        if self.kept_tokens is not None:
            kept = self.kept_tokens.mask(token_ids, input_type)
        elif attended is not None:
            kept = np.arange(len(token_ids)) < attended
        return RenderedPrompt(token_ids, attended=attended, kept=kept)


def late_interaction_format(spec: LateInteraction, tokenizer: Tokenizer) -> LateInteractionFormat:
    """Return the text format of a model. Raises ``ModelLoadError`` if the tokenizer lacks the expansion token."""
    expansion, mask = spec.expansion, spec.mask
    query_length = expansion.length if expansion and expansion.strategy == "fixed" else spec.query_length
    lengths: dict[InputType | None, int | None] = {
        None: spec.text_length,
        "query": query_length or spec.text_length,
        "document": spec.document_length or spec.text_length,
    }
    return LateInteractionFormat(
        limits={input_type: length for input_type, length in lengths.items() if length is not None},
        expansion=expansion,
        expansion_id=_expansion_id(expansion, tokenizer) if expansion else 0,
        kept_tokens=None if mask is None else kept_tokens_of(mask, tokenizer),
    )


def kept_tokens_of(mask: ScoringMask, tokenizer: Tokenizer) -> KeptTokens:
    """Return a mask's words as token ids, without those that are not in the vocabulary."""
    skipped = (tokenizer.id_of(word) for word in mask.skipped_words)
    return KeptTokens(
        skipped=np.array([token_id for token_id in skipped if token_id is not None], dtype=np.int32),
        skipped_input_types=mask.skipped_input_types,
        only=np.array(mask.only_token_ids, dtype=np.int32),
    )


def _expansion_id(expansion: QueryExpansion, tokenizer: Tokenizer) -> int:
    if expansion.token is not None:
        found = tokenizer.id_of(expansion.token)
    else:
        found = tokenizer.id_named("mask_token")
        found = tokenizer.id_named("eos_token") if found is None else found
    if found is None:
        raise ModelLoadError(f"The tokenizer lacks the query expansion token ({expansion.token}).")
    return found


LATE_INTERACTION = ModelKind(
    read=read_late_interaction,
    load="trio_pool_serve.models.late_interaction.loading:load_late_interaction",
    text_format=late_interaction_format,
)
