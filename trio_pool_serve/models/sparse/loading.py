"""Loading learned sparse models: a masked language model and an optional table of token weights."""

from typing import Any

import torch

from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, read_weights
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.sparse import Sparse
from trio_pool_serve.runner.forward_pass import Head
from trio_pool_serve.runner.heads.sparse import SparseLookupHead, SpladeHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import SparseEmbed, SparseLookup


def load_sparse(folder: ModelFolder[Sparse], params: LoadingParams) -> LoadedModel:
    """Load a ``Sparse`` model."""
    spec = folder.spec
    model = load_checkpoint(folder, params, auto_class="AutoModelForMaskedLM", optional_weights=())
    heads: dict[type[Any], Head] = {
        SparseEmbed: SpladeHead(spec.splade_pooling, spec.log1p_twice, spec.max_active_dims)
    }
    description = f"SPLADE by {spec.splade_pooling}"
    if spec.table is not None:
        if (table := read_weights(spec.table, "weight").get("")) is None:
            raise ModelLoadError(f"{spec.table} has no weight named weight.")
        if len(table) > folder.vocab_size:
            raise ModelLoadError(f"The table has {len(table)} weights for a vocabulary of {folder.vocab_size}.")
        # Clients may send any id of the vocabulary, whose size is often rounded up.
        weights = torch.zeros(folder.vocab_size, dtype=torch.float32)
        weights[: len(table)] = table
        heads[SparseLookup] = SparseLookupHead(weights.to(params.device), spec.max_active_dims)
        description += f", {' and '.join(sorted(filter(None, spec.lookup_input_types)))} weights looked up"
    return LoadedModel(
        backbone=Backbone(model, output="logits"), heads=heads, description=description, output_width=folder.vocab_size
    )
