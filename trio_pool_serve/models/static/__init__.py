"""Static embeddings: a text's vector is the mean of its tokens' rows in a table.

sentence-transformers' layout is a module StaticEmbedding with the tensor ``embedding.weight``. model2vec's has
``embeddings``, and maybe ``mapping``, the row of each token, and ``weights``, the weight of each token; its folders
without modules.json declare ``normalize`` in config.json. Both are computed as by sentence-transformers'
StaticEmbedding: no special tokens, unknown tokens count, and a text without tokens gets zeros.
"""

from pathlib import Path
from typing import Any, get_args

import msgspec
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.embedding import similarity_of, with_settings
from trio_pool_serve.models.files.folder_files import STATIC_MODULE, FolderFiles, ModuleFiles, read_text
from trio_pool_serve.models.files.pooled_modules import require_vector_modules
from trio_pool_serve.models.files.safetensors_files import FILE, read_shapes
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.text_format import TextFormat

MAX_TOKENS = 2**17
"""Maximum tokens of an input unless tokenizer.json or ``--max-model-len`` sets another: the models have no maximum,
and tokenising this many takes half a second."""


@frozen(kw_only=True)
class Static(ModelSpec):
    """A table of the tokens' vectors, and the modules after it."""

    tasks = frozenset({"embed", "score"})
    scoring = "vectors"
    supports_messages = False
    pools_token_states = True
    by_numpy = True
    reads_tokenizer_file = True

    max_length: int | None = None
    """Tokens to which tokenizer.json truncates texts, ``None`` for all."""

    @property
    def pooling(self) -> str:
        """The mean of the rows, over all tokens."""
        return "mean"

    @property
    def undeclared_max_tokens(self) -> int:
        """``max_length``, else ``MAX_TOKENS``."""
        return self.max_length or MAX_TOKENS


def read_static(files: FolderFiles, config: ModelConfig) -> Static | None:
    """Read folders that begin with a StaticEmbedding, and folders of model2vec. Raises ``ModelLoadError``."""
    is_bare = not files.modules and files.config.get("model_type") == "model2vec"
    if not is_bare and (not files.modules or files.modules[0].name != STATIC_MODULE):
        return None
    require_vector_modules(files.modules[1:])
    normalizes = is_bare and files.config.get("normalize")
    modules = (ModuleFiles(name="Normalize", path=files.path),) if normalizes else files.modules[1:]
    return Static(
        modules=with_settings(modules, config),
        similarity=similarity_of(files),
        vocab_size=_vocab_size(files.transformer_path),
        max_length=_max_length(files.transformer_path / "tokenizer.json"),
    )


def _vocab_size(folder: Path) -> int:
    """Return the number of tokens that have a row. Raises ``ModelLoadError`` if the tensors do not fit together."""
    shapes = read_shapes(folder / FILE)
    names = () if "embedding.weight" in shapes else ("mapping", "weights")
    per_token = {name: shapes[name] for name in names if name in shapes}
    if (table := shapes.get("embedding.weight", shapes.get("embeddings"))) is None:
        raise ModelLoadError(f"{folder / FILE} contains neither a tensor embedding.weight nor embeddings.")
    require(
        len(table) == 2 and 0 not in table,
        f"{folder / FILE}: the shape of the table is {table}; it must be (rows, dimensions).",
    )
    tokens = per_token.get("mapping", table[:1])
    for name, shape in per_token.items():
        require(
            shape == tokens and len(shape) == 1 and shape[0] > 0,
            f"{folder / FILE}: the shape of {name} is {shape}; it must be one number per token.",
        )
    return tokens[0]


def _max_length(path: Path) -> int | None:
    """Return the length to which tokenizer.json truncates. Raises ``ModelLoadError`` if it cannot be read."""
    try:
        # Only this part is decoded: the file may have many megabytes.
        part = msgspec.json.decode(read_text(path), type=dict[str, msgspec.Raw]).get("truncation", msgspec.Raw(b"null"))
        length = (msgspec.json.decode(part, type=dict[str, Any] | None) or {}).get("max_length")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    require(
        length is None or (type(length) is int and length > 0),
        f"{path}: max_length of truncation is {length}; it must be a positive integer.",
    )
    return length


STATIC = ModelKind(
    read=read_static,
    open_runner="trio_pool_serve.models.static.loading:open_static",
    text_format=lambda spec, tokenizer: TextFormat(  # noqa: ARG005
        lookup_input_types=frozenset({None, *get_args(InputType)})
    ),
)
