"""Late interaction: documents are scored on the device against query vectors in their params.

Only scores are copied to the host.
"""

from collections.abc import Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from trio_pool_serve.runner.forward_pass import ForwardPass, HeadRows
from trio_pool_serve.runner.heads.embedding import TokenEmbeddingHead
from trio_pool_serve.runner.openvino.heads import EMPTY_SCORE
from trio_pool_serve.runner.row_states import RowStates
from trio_pool_serve.runner.torch_device import to_device
from trio_pool_serve.types import MaxSim, TokenEmbed


@frozen(eq=False)
class MaxSimHead:
    """The head of ``MaxSim``."""

    tokens: TokenEmbeddingHead
    mean_scores: bool = False
    """Whether scores are divided by the number of the query's vectors."""

    def __call__(self, forward: ForwardPass, params: Sequence[MaxSim]) -> HeadRows:
        """Return the rows' scores against their queries, [rows]."""
        vectors, counts = self.tokens.vectors(forward, [TokenEmbed()] * len(params))
        documents = RowStates.packed(vectors, counts)
        # Rows of one request may have come in several parts of frames, each with its own array.
        queries = {id(param): param.query for param in params}
        numbers = {key: np.asarray(query, np.float32).tobytes() for key, query in queries.items()}
        rows_of: dict[bytes, list[int]] = {}
        for row, param in enumerate(params):
            rows_of.setdefault(numbers[id(param)], []).append(row)
        parts = [self._scores(query, documents.select(rows)) for query, rows in rows_of.items()]
        scores = parts[0]
        if len(parts) > 1:
            places = np.argsort(np.concatenate([*rows_of.values()]))
            scores = torch.cat(parts).index_select(0, to_device(places, vectors.device))
        return HeadRows(scores, lambda array: [score.reshape(1) for score in array])

    def _scores(self, numbers: bytes, documents: RowStates) -> Tensor:
        vectors = np.frombuffer(bytearray(numbers), np.float32).reshape(-1, documents.flat.shape[-1])
        query = to_device(vectors, documents.flat.device)
        scores = max_sim(query, documents)
        return scores / max(1, len(query)) if self.mean_scores else scores


def max_sim(query: Tensor, documents: RowStates) -> Tensor:
    """Score documents, whose vectors are [tokens, d], against one query [q, d]: [documents]."""
    vectors = documents.at(documents.cells)
    similarity = RowStates.packed(vectors @ query.T, documents.lengths)
    scores = similarity.maxima(np.zeros_like(documents.lengths)).sum(dim=1)
    if documents.lengths.all():
        return scores
    return scores.masked_fill(to_device(documents.lengths == 0, scores.device), EMPTY_SCORE)
