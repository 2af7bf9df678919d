"""Learned sparse models: weights over the vocabulary, or over the latents of an autoencoder.

SPLADE encodes queries and documents with a masked language model. Inference-free SPLADE encodes only documents so
and looks up the weights of a query's tokens in a table: a Router with two routes. CSR encodes the vector of an
embedding model by a sparse autoencoder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from attrs import evolve, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import require
from trio_pool_serve.models.embedding import read_conversation, require_plain_states
from trio_pool_serve.models.files.folder_files import TRANSFORMERS, FolderFiles, ModuleFiles, RouterFiles, read_json
from trio_pool_serve.models.files.pooled_modules import require_vector_modules
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec, pooling_modes
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.rendering.text.tokenizer import Tokenizer
from trio_pool_serve.types import SparseEmbed, SparseLookup

SpladePooling: TypeAlias = Literal["max", "sum"]

AUTOENCODERS = frozenset({"SparseAutoEncoder", "CSRSparsity"})
"""The module's name, and its name before it was released."""

SPARSE_MODULES = frozenset({"MLMTransformer", "SpladePooling", "SparseStaticEmbedding", *AUTOENCODERS})

ACTIVATIONS = ("relu", "log1p_relu")


@frozen(kw_only=True)
class Sparse(ModelSpec):
    """A masked language model and, for some input types, a table of token weights; or an autoencoder after pooling.

    Only the latter has ``modules``: Pooling, others of an embedding model, and last the autoencoder.
    """

    splade_pooling: SpladePooling = "max"
    log1p_twice: bool = False
    """Whether log1p is applied twice, as in OpenSearch's third generation of models."""
    max_active_dims: int | None = None
    """Number of greatest weights that are returned, ``None`` for all."""
    table: Path | None = None
    """Folder of the SparseStaticEmbedding module, if there is one."""
    lookup_input_types: frozenset[InputType | None] = frozenset()
    """The input types of texts whose weights are looked up."""
    lookup_length: int | None = None
    """Tokens to which such texts are truncated."""

    tasks = frozenset({"sparse_embed"})

    @property
    def pooling(self) -> str:
        """SPLADE pooling, over the vocabulary; with an autoencoder, the modes of the Pooling module."""
        return "+".join(pooling_modes(self.modules[0].config)) if self.modules else "splade"

    @property
    def sparse_indices(self) -> Literal["tokens", "latents"]:
        """Latents of the autoencoder, if there is one."""
        return "latents" if self.modules else "tokens"

    def sparse_params(self, input_type: InputType | None) -> SparseEmbed | SparseLookup:
        """Return the params by which the sparse vector of a text of this input type is computed."""
        return SparseLookup() if input_type in self.lookup_input_types else SparseEmbed()


def read_sparse(files: FolderFiles, config: ModelConfig) -> Sparse | None:
    """Read SparseEncoder folders and, with ``--task sparse_embed``, bare masked language models."""
    if files.router is not None:
        return _read_router(files, files.router)
    names = {module.name for module in files.modules}
    if files.modules and files.modules[-1].name in AUTOENCODERS:
        return _autoencoder(files)
    if files.encoder_class == "SparseEncoder" or names & SPARSE_MODULES:
        return _splade(files, files.modules)
    is_wanted = config.task == "sparse_embed" and not files.modules and files.is_saved_from("ForMaskedLM")
    return Sparse() if is_wanted else None


def _read_router(files: FolderFiles, router: RouterFiles) -> Sparse:
    require(
        len(files.modules) == 1 and {*router.routes} <= {"query", "document"},
        "The Router has routes other than query and document, which is not supported.",
    )
    tables = {
        route: modules[0].path
        for route, modules in router.routes.items()
        if [module.name for module in modules] == ["SparseStaticEmbedding"]
    }
    splades = [modules for route, modules in router.routes.items() if route not in tables]
    require(
        len(tables) == len(splades) == 1,
        "A Router is supported only if one route is a SparseStaticEmbedding and one a SPLADE.",
    )
    [(route, table)] = tables.items()
    input_types = {each for each in (None, *get_args(InputType)) if router.route_of(each) == route}
    _require_same_tokenizer(table, files.transformer_path)
    return evolve(
        _splade(files, splades[0]),
        table=table,
        lookup_input_types=frozenset(input_types),
        lookup_length=read_json(table / "tokenizer_config.json").get("model_max_length"),
    )


def _splade(files: FolderFiles, modules: Sequence[ModuleFiles]) -> Sparse:
    names = [module.name for module in modules]
    require(
        names[:1] in ([name] for name in TRANSFORMERS) and names[1:] == ["SpladePooling"],
        f"modules.json: a sparse model of {', '.join(names) or 'no modules'} is not supported; a transformer and "
        "SpladePooling are, or a transformer, Pooling and, as the last module, SparseAutoEncoder.",
    )
    if names[0] != "MLMTransformer" or "transformer_task" in files.module_config:
        files.require_task("fill-mask")
    files.reject_input_type_lengths()
    files.reject_processing_kwargs()
    pooling = modules[1].config.get("pooling_strategy", "max")
    activation = modules[1].config.get("activation_function", "relu")
    require(
        pooling in get_args(SpladePooling) and activation in ACTIVATIONS,
        f"SpladePooling by {pooling} of {activation} is not supported.",
    )
    return Sparse(
        splade_pooling=pooling,
        log1p_twice=activation == "log1p_relu",
        max_active_dims=_max_active_dims(files),
    )


def _max_active_dims(files: FolderFiles) -> int | None:
    found: int | None = files.sentence_transformers_config.get("max_active_dims")
    require(
        found is None or (type(found) is int and found >= 1),
        f"{files.path / 'config_sentence_transformers.json'}: max_active_dims is {found!r}; it must be an integer of "
        "at least 1.",
    )
    return found


def _autoencoder(files: FolderFiles) -> Sparse:
    """Read CSR: Wen et al., https://arxiv.org/abs/2503.01776."""
    names = [module.name for module in files.modules]
    require(
        names[:2] == ["Transformer", "Pooling"] and len(AUTOENCODERS.intersection(names)) == 1,
        f"modules.json: {', '.join(names)} is not supported; a SparseAutoEncoder follows Transformer and Pooling.",
    )
    require_vector_modules(files.modules[2:-1])
    require_plain_states(files)
    module = files.modules[-1]
    sizes: dict[str, Any] = {"input_dim": None, "hidden_dim": 512, "k": 8, **module.config}
    numbers = [sizes[name] for name in ("input_dim", "hidden_dim", "k")]
    k = _max_active_dims(files) or sizes["k"]
    require(
        all(type(number) is int and number >= 1 for number in numbers) and k <= sizes["hidden_dim"],
        f"{module.path / 'config.json'}: input_dim, hidden_dim and k are {numbers}; they must be integers of at "
        f"least 1, and at most hidden_dim latents can be active, not {k}.",
    )
    return Sparse(modules=files.modules[1:], conversation=read_conversation(files), max_active_dims=k)


def _require_same_tokenizer(table: Path, transformer: Path) -> None:
    """Raise ``ModelLoadError`` unless both tokenizers are equal but for truncation and padding, which are not used.

    One tokenizer serves all input types.
    """
    unused = {"truncation": None, "padding": None}
    ours, theirs = ({**read_json(folder / "tokenizer.json"), **unused} for folder in (table, transformer))
    require(ours == theirs, "The SparseStaticEmbedding has another tokenizer than the transformer.")


def sparse_text_format(spec: Sparse, _: Tokenizer) -> TextFormat:
    """Return the format, with the input types that are looked up."""
    return TextFormat(
        limits=dict.fromkeys(spec.lookup_input_types, spec.lookup_length) if spec.lookup_length else {},
        lookup_input_types=spec.lookup_input_types,
    )


SPARSE = ModelKind(
    read=read_sparse,
    load="trio_pool_serve.models.sparse.loading:load_sparse",
    text_format=sparse_text_format,
)
