"""The tokens of each chunk of a document, for late chunking.

A token belongs to the chunk in which its first character other than a blank is: tokenizers of the SentencePiece kind
count the blank in front of a word to its token. As in the reference implementation
(https://github.com/jina-ai/late-chunking, ``_extend_special_tokens`` in ``chunked_pooling/mteb_chunked_eval.py``), the
special tokens in front of the document, and an instruction that is pooled, belong to the chunk at its beginning, and
special tokens after it to the chunk at its end. So one chunk that is the whole document has the document's vector.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trio_pool_serve.errors import InvalidRequestError, require_request
from trio_pool_serve.rendering.text.tokenizer import Positions

MAX_OVERLAP = 8
"""Maximum ratio of the tokens of all chunks to the document's: each token is added up that often."""


def tokens_of_chunks(
    chunks: Sequence[tuple[int, int]], text: str, positions: Positions, *, begin: int, first_pooled: int
) -> npt.NDArray[np.int32]:
    """Return the first token of each chunk and the one after its last, shape (chunks, 2).

    The document begins at ``begin`` in the text.
    ``positions`` are the positions of the text's tokens. A chunk at the document's beginning begins at
    ``first_pooled``, or with its own first token if it ends before that. Raises ``InvalidRequestError`` for a chunk
    without tokens, and for chunks with too many tokens together.
    """
    of_text = np.flatnonzero(positions[:, 0] >= 0)
    first_characters = [_first_character(text, *span) - begin for span in positions[of_text].tolist()]
    edges = np.array(chunks, dtype=np.int64)
    # Tokens are in the order of the text; tokens of one character have the same position.
    bounds = np.searchsorted(np.maximum.accumulate(np.array(first_characters, dtype=np.int64)), edges)
    _refuse_without_tokens(bounds, chunks)
    tokens = np.stack([of_text[bounds[:, 0]], of_text[bounds[:, 1] - 1] + 1], axis=1)
    tokens[edges[:, 1] == len(text) - begin, 1] = len(positions)
    # If the instruction is the whole input, it is pooled.
    first = first_pooled if first_pooled < len(positions) else 0
    # Alone, an instruction can have more tokens than in front of a text: a blank at its end is then a token.
    tokens[(edges[:, 0] == 0) & (tokens[:, 1] > first), 0] = first
    _refuse_without_tokens(tokens, chunks)
    _refuse_too_many(tokens, len(positions))
    return tokens.astype(np.int32)


def _first_character(text: str, begin: int, end: int) -> int:
    piece = text[begin:end]
    return begin + len(piece) - len(piece.lstrip()) if piece[:1].isspace() and not piece.isspace() else begin


def _refuse_without_tokens(tokens: npt.NDArray[np.int64], chunks: Sequence[tuple[int, int]]) -> None:
    """Raise ``InvalidRequestError`` for a chunk whose tokens end where they begin, or before."""
    empty = np.flatnonzero(tokens[:, 0] >= tokens[:, 1])
    if len(empty):
        begin, end = chunks[empty[0]]
        raise InvalidRequestError(
            f"Chunk {empty[0]}, characters {begin} to {end} of the document, has no tokens: it is blank, within one "
            "token of another chunk, or beyond the end of the truncated document.",
            field="chunks",
        )


def _refuse_too_many(tokens: npt.NDArray[np.int64], of_document: int) -> None:
    require_request(
        len(tokens) <= of_document,
        f"The document has {len(tokens)} chunks, but only {of_document} tokens.",
        field="chunks",
    )
    together = int((tokens[:, 1] - tokens[:, 0]).sum())
    require_request(
        together <= MAX_OVERLAP * of_document,
        f"The chunks have {together} tokens together; the limit is {MAX_OVERLAP} times the document's "
        f"{of_document}. Send fewer chunks that overlap.",
        field="chunks",
    )
