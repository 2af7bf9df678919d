"""What a model makes of a text beside its tokens: by role, how long it may be, what is added, which tokens count."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from attrs import Factory, frozen

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.bge_m3.spec import BgeM3
from trio_pool_serve.models.dual_encoder.spec import DualEncoder, TextFilling
from trio_pool_serve.models.folder import ModelFolder
from trio_pool_serve.models.late_interaction.spec import LateInteraction, QueryExpansion, ScoringMask
from trio_pool_serve.models.page_retrieval.spec import AUGMENTATION, PageRetrieval
from trio_pool_serve.models.sparse.spec import Sparse
from trio_pool_serve.prompts import Role
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import RenderedPrompt, TokenIds


@frozen(kw_only=True)
class TextFormat:
    """Texts as most models read them, whatever their role."""

    prefix: str = ""
    """What stands before every text, and before its instruction."""
    limits: Mapping[Role | None, int] = Factory(dict)
    """Most tokens of a text in a role, special tokens included, where that is not the model's limit."""

    def most_tokens(self, role: Role | None, max_model_len: int) -> int:
        """Return the most tokens that a text in this role may have."""
        return min(self.limits.get(role, max_model_len), max_model_len)

    def adds_special_tokens(self, role: Role | None) -> bool:
        """Tell whether texts in this role have special tokens at all."""
        del role  # only some formats tell them apart
        return True

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Return what the model reads; ``token_ids`` has its special tokens already."""
        del role
        return RenderedPrompt(token_ids, instruction_tokens)


@frozen(kw_only=True, eq=False)
class TokensThatCount:
    """Chooses the tokens of a document, or a query, that have a vector; the arrays are ids."""

    skipped: npt.NDArray[np.int32]
    skipped_roles: frozenset[str]
    only: npt.NDArray[np.int32]

    def of(self, token_ids: TokenIds, role: Role | None) -> npt.NDArray[np.bool_]:
        """Return, for each token, whether it counts. A text without a role is a document."""
        counts = np.ones(len(token_ids), dtype=np.bool_)
        if (role or "document") in self.skipped_roles:
            counts &= ~np.isin(token_ids, self.skipped)
        if role != "query" and len(self.only):
            counts &= np.isin(token_ids, self.only)
        return counts


@frozen(kw_only=True)
class LateInteractionFormat(TextFormat):
    """Queries are filled up to their length with ``expansion_id``; ``counting`` chooses the tokens with a vector.

    ``counting`` is ``None`` where those attended to do.
    """

    expansion: QueryExpansion | None
    expansion_id: int
    counting: TokensThatCount | None

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Fill up a query, and choose the tokens."""
        tokens = len(token_ids)
        attended = None
        if role == "query" and self.expansion is not None and tokens < self.expansion.length:
            added = np.full(self.expansion.length - tokens, self.expansion_id, dtype=np.int32)
            token_ids = np.concatenate([token_ids, added])
            attended = None if self.expansion.attends else tokens
        if self.counting is not None:
            kept = self.counting.of(token_ids, role)
        else:
            kept = np.arange(len(token_ids)) < (len(token_ids) if attended is None else attended)
        return RenderedPrompt(token_ids, instruction_tokens, attended=attended, kept=None if kept.all() else kept)


@frozen(kw_only=True, eq=False)
class QuestionFormat(TextFormat):
    """Every text is a question to page retrievers: its prefix and ``suffix`` (ids) are written by the format itself.

    ``counting`` is ``None`` where all tokens have a vector that counts.
    """

    suffix: TokenIds
    counting: TokensThatCount | None

    def most_tokens(self, role: Role | None, max_model_len: int) -> int:
        """Leave room for the suffix."""
        return super().most_tokens(role, max_model_len) - len(self.suffix)

    def adds_special_tokens(self, role: Role | None) -> bool:
        """Tell that the tokenizer adds none."""
        del role
        return False

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """End a question."""
        token_ids = np.concatenate([token_ids, self.suffix])
        kept = None if self.counting is None else self.counting.of(token_ids, role)
        return RenderedPrompt(token_ids, instruction_tokens, kept=None if kept is None or kept.all() else kept)


@frozen(kw_only=True)
class LookupFormat(TextFormat):
    """Texts in ``lookup_roles`` have no special tokens, and so may have none at all."""

    lookup_roles: frozenset[Role | None]

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Put a token that does not count in the place of none: a row of a batch has at least one."""
        if role in self.lookup_roles and len(token_ids) == 0:
            return RenderedPrompt(np.zeros(1, dtype=np.int32), attended=0)
        return RenderedPrompt(token_ids, instruction_tokens)

    def adds_special_tokens(self, role: Role | None) -> bool:
        """Tell whether the text is read by the transformer."""
        return role not in self.lookup_roles


@frozen(kw_only=True)
class FirstTokenLeftOut(TextFormat):
    """A first token ``token_id``, whose vector is the whole text's, has none of its own."""

    token_id: int | None

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Leave out the first token."""
        del role
        kept = None
        if len(token_ids) and token_ids[0] == self.token_id:
            kept = np.arange(len(token_ids)) > 0
        return RenderedPrompt(token_ids, instruction_tokens, kept=kept)


@frozen(kw_only=True)
class FilledFormat(TextFormat):
    """Every text is filled up with ``pad_id``."""

    filling: TextFilling
    pad_id: int

    def finish(self, token_ids: TokenIds, role: Role | None, *, instruction_tokens: int = 0) -> RenderedPrompt:
        """Fill up a text."""
        del role
        tokens = len(token_ids)
        filled = np.full(max(self.filling.length, tokens), self.pad_id, dtype=np.int32)
        start = len(filled) - tokens if self.filling.on_the_left else 0
        filled[start : start + tokens] = token_ids
        return RenderedPrompt(filled, instruction_tokens, attended=None if self.filling.attends else tokens)


def text_format_of(folder: ModelFolder, tokenizer: Tokenizer) -> TextFormat:
    """Return a model's format. Raises ``ModelLoadError`` where the tokenizer lacks what that needs."""
    architecture = folder.architecture
    if isinstance(architecture, PageRetrieval):
        return _question_format(architecture, tokenizer)
    if isinstance(architecture, LateInteraction):
        return _late_interaction_format(architecture, tokenizer)
    if isinstance(architecture, Sparse) and architecture.lookup_roles:
        length = architecture.lookup_length
        return LookupFormat(
            limits=dict.fromkeys(architecture.lookup_roles, length) if length else {},
            lookup_roles=architecture.lookup_roles,
        )
    if isinstance(architecture, DualEncoder) and architecture.filling is not None:
        return _filled_format(architecture.filling, tokenizer)
    if isinstance(architecture, BgeM3):
        return FirstTokenLeftOut(token_id=tokenizer.id_named("cls_token"))
    return TextFormat()


def _late_interaction_format(architecture: LateInteraction, tokenizer: Tokenizer) -> LateInteractionFormat:
    expansion, mask = architecture.expansion, architecture.mask
    of_query = expansion.length if expansion and expansion.strategy == "fixed" else architecture.query_length
    lengths: dict[Role | None, int | None] = {
        None: architecture.text_length,
        "query": of_query or architecture.text_length,
        "document": architecture.document_length or architecture.text_length,
    }
    return LateInteractionFormat(
        limits={role: length for role, length in lengths.items() if length is not None},
        expansion=expansion,
        expansion_id=_expansion_id(expansion, tokenizer) if expansion else 0,
        counting=None if mask is None else tokens_that_count(mask, tokenizer),
    )


def tokens_that_count(mask: ScoringMask, tokenizer: Tokenizer) -> TokensThatCount:
    """Return a mask by the ids of its words; those that the tokenizer does not know are left out."""
    known = (tokenizer.id_of(word) for word in mask.skipped_words)
    return TokensThatCount(
        skipped=np.array([found for found in known if found is not None], dtype=np.int32),
        skipped_roles=mask.skipped_roles,
        only=np.array(mask.only_token_ids, dtype=np.int32),
    )


def _question_format(architecture: PageRetrieval, tokenizer: Tokenizer) -> QuestionFormat:
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no padding token, which is to stand behind every question.")
    end = tokenizer.encode("\n")
    end_ids = tokenizer.finish(end, len(end), "right", add_special_tokens=False)
    return QuestionFormat(
        prefix=architecture.text_prefix,
        suffix=np.concatenate([np.full(AUGMENTATION, pad_id, dtype=np.int32), end_ids]),
        counting=None if architecture.mask is None else tokens_that_count(architecture.mask, tokenizer),
    )


def _filled_format(filling: TextFilling, tokenizer: Tokenizer) -> FilledFormat:
    pad_id = tokenizer.id_named("pad_token")
    if pad_id is None:
        raise ModelLoadError("The tokenizer has no token that texts could be filled up with.")
    return FilledFormat(filling=filling, pad_id=pad_id)


def _expansion_id(expansion: QueryExpansion, tokenizer: Tokenizer) -> int:
    if expansion.token is not None:
        found = tokenizer.id_of(expansion.token)
    else:
        found = tokenizer.id_named("mask_token")
        found = tokenizer.id_named("eos_token") if found is None else found
    if found is None:
        raise ModelLoadError(f"The tokenizer lacks the token that queries are filled up with ({expansion.token}).")
    return found
