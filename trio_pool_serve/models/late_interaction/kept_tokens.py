"""Which tokens of a text have a vector in the output of a late-interaction model or page retriever."""

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import TokenIds


@frozen(kw_only=True)
class ScoringMask:
    """The kept tokens: all but ``skipped_words``, which are left out of texts of the ``skipped_input_types``.

    If ``only_token_ids`` is not empty, a document keeps only these.
    """

    skipped_words: tuple[str, ...] = ()
    skipped_input_types: frozenset[str] = frozenset({"document"})
    only_token_ids: tuple[int, ...] = ()


def scoring_mask(module: ModuleFiles) -> ScoringMask:
    """Return the mask that a MultiVectorMask module declares."""
    found = module.config.get("skiplist_tasks")
    return ScoringMask(
        skipped_words=tuple(module.config.get("skiplist_words") or ()),
        skipped_input_types=frozenset({"document"} if found is None else {found} if isinstance(found, str) else found),
        only_token_ids=tuple(module.config.get("keep_only_token_ids") or ()),
    )


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


def kept_tokens_of(mask: ScoringMask, tokenizer: Tokenizer) -> KeptTokens:
    """Return a mask's words as token ids, without words that are not in the vocabulary."""
    skipped = (tokenizer.id_of(word) for word in mask.skipped_words)
    return KeptTokens(
        skipped=np.array([token_id for token_id in skipped if token_id is not None], dtype=np.int32),
        skipped_input_types=mask.skipped_input_types,
        only=np.array(mask.only_token_ids, dtype=np.int32),
    )
