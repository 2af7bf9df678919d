"""BGE-M3: one forward pass computes a dense vector, a sparse vector and one vector per token.

Chen et al., https://arxiv.org/abs/2402.03216. The folder of the dense model also holds two linear layers.
"""

import numpy as np
from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.embedding import Embedding, modules_after_transformer, read_embedding
from trio_pool_serve.models.files.folder_files import FolderFiles, ModuleFiles, read_json
from trio_pool_serve.models.model_kind import ModelKind
from trio_pool_serve.prompts import InputType
from trio_pool_serve.rendering.text.text_format import TextFormat
from trio_pool_serve.types import RenderedPrompt, TokenIds

SPARSE_LAYER = "sparse_linear.pt"
MULTI_VECTOR_LAYER = "colbert_linear.pt"

UNWEIGHTED_TOKENS = {"cls_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Special tokens that a sparse vector omits, with XLM-RoBERTa's names for them as defaults."""


@frozen(kw_only=True)
class BgeM3(Embedding):
    """A dense vector, a sparse vector and one vector per token."""

    unweighted_token_ids: tuple[int, ...]

    tasks = frozenset({"embed", "sparse_embed", "token_embed", "score"})


def read_bge_m3(files: FolderFiles, config: ModelConfig) -> BgeM3 | None:
    """Read folders that have both linear layers."""
    if not all((files.path / name).is_file() for name in (SPARSE_LAYER, MULTI_VECTOR_LAYER)):
        return None
    dense = read_embedding(files, config)
    of_paper = (
        ModuleFiles(name="Pooling", path=files.path, config={"pooling_mode": "cls"}),
        ModuleFiles(name="Normalize", path=files.path),
    )
    return BgeM3(
        modules=modules_after_transformer(files, config, undeclared=of_paper),
        similarity=dense.similarity,
        unweighted_token_ids=_token_ids_without_weight(files),
    )


def _token_ids_without_weight(files: FolderFiles) -> tuple[int, ...]:
    document = read_json(files.transformer_path / "tokenizer.json")
    ids = {token["content"]: int(token["id"]) for token in document.get("added_tokens") or ()}
    tokens = [files.tokenizer_config.get(key) or default for key, default in UNWEIGHTED_TOKENS.items()]
    names = [token["content"] if isinstance(token, dict) else token for token in tokens]
    if missing := [name for name in names if name not in ids]:
        raise ModelLoadError(f"tokenizer.json lacks the special tokens {', '.join(missing)}.")
    return tuple(ids[name] for name in names)


@frozen(kw_only=True)
class SkipFirstToken(TextFormat):
    """A first token ``token_id`` is not kept: its vector is the dense vector of the whole text."""

    token_id: int | None

    def finish(self, token_ids: TokenIds, _: InputType | None) -> RenderedPrompt:
        """Mark all tokens but the first as kept."""
        is_first = len(token_ids) > 0 and token_ids[0] == self.token_id
        return RenderedPrompt(token_ids, kept=np.arange(len(token_ids)) > 0 if is_first else None)


BGE_M3 = ModelKind(
    read=read_bge_m3,
    load="trio_pool_serve.models.bge_m3.loading:load_bge_m3",
    text_format=lambda _, tokenizer: SkipFirstToken(token_id=tokenizer.id_named("cls_token")),
)
