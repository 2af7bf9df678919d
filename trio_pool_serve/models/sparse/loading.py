"""Loading learned sparse models: a masked language model and an optional table, or an autoencoder after pooling."""

from typing import Any

import torch

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.folder_files import ModuleFiles
from trio_pool_serve.models.loading.checkpoint import load_checkpoint, read_weights, require_own_class
from trio_pool_serve.models.loading.sentence_modules import load_pooler
from trio_pool_serve.models.model_kind import ModelFolder
from trio_pool_serve.models.sparse import Sparse
from trio_pool_serve.runner.forward_pass import Head
from trio_pool_serve.runner.heads.pooling import Normalize, Pooler
from trio_pool_serve.runner.heads.sparse import LatentHead, SparseEncoding, SparseLookupHead, SpladeHead
from trio_pool_serve.runner.loaded_model import Backbone, LoadedModel, LoadingParams
from trio_pool_serve.types import SparseEmbed, SparseLookup


def load_sparse(folder: ModelFolder[Sparse], params: LoadingParams) -> LoadedModel:
    """Load a ``Sparse`` model."""
    spec = folder.spec
    if spec.modules:
        return _load_autoencoder(folder, params)
    model = load_checkpoint(folder, params, auto_class="AutoModelForMaskedLM", optional_weights=())
    heads: dict[type[Any], Head] = {
        SparseEmbed: SpladeHead(spec.splade_pooling, spec.log1p_twice, spec.max_active_dims)
    }
    description = f"SPLADE by {spec.splade_pooling}"
    if spec.table is not None:
        if (table := read_weights(spec.table, "weight").get("")) is None:
            raise ModelLoadError(f"{spec.table} contains no tensor named weight.")
        require(
            len(table) <= folder.vocab_size,
            f"The table has {len(table)} weights for a vocabulary of {folder.vocab_size}.",
        )
        # Clients may send any id of the vocabulary, whose size is often rounded up.
        weights = torch.zeros(folder.vocab_size, dtype=torch.float32)
        weights[: len(table)] = table
        heads[SparseLookup] = SparseLookupHead(weights.to(params.device), spec.max_active_dims)
        description += f", {' and '.join(sorted(filter(None, spec.lookup_input_types)))} weights looked up"
    return LoadedModel(
        backbone=Backbone(model, output="logits"), heads=heads, description=description, output_width=folder.vocab_size
    )


def _load_autoencoder(folder: ModelFolder[Sparse], params: LoadingParams) -> LoadedModel:
    require_own_class(folder, params)
    *modules, last = folder.spec.modules
    dense, k = load_pooler(modules, params.device), folder.spec.max_active_dims
    assert k is not None  # noqa: S101  (the module's own k is the default)
    normalize = [Normalize()] if dense.normalizes else []
    encoder = _read_encoding(last).to(params.device)
    pooler = Pooler(dense.pooling, [*dense.modules_after, *normalize, encoder]).eval()
    return LoadedModel(
        backbone=Backbone(load_checkpoint(folder, params)),
        heads={SparseEmbed: LatentHead(pooler, k)},
        description=f"{'+'.join(dense.pooling)} pooling, {k} of {len(encoder.latent_bias)} latents",
    )


def _read_encoding(files: ModuleFiles) -> SparseEncoding:
    stored = read_weights(files.path)
    # The weight is tied to the decoder's, and is stored once.
    weight = stored.get("encoder.weight", stored.get("decoder.linear.weight"))
    inputs, latents = files.config["input_dim"], files.config.get("hidden_dim", 512)
    of_names = {
        "decoder.linear.weight": (weight, (latents, inputs)),
        "latent_bias": (stored.get("latent_bias"), (latents,)),
        "pre_bias": (stored.get("pre_bias"), (inputs,)),
    }
    found = []
    for name, (tensor, shape) in of_names.items():
        if tensor is None or tensor.shape != shape:
            found_shape = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ModelLoadError(f"{files.path}: {name} is {found_shape}; its shape must be {list(shape)}.")
        found.append(tensor.float())
    return SparseEncoding(*found, standardises=bool(files.config.get("normalize")))
