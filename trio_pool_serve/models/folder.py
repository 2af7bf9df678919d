"""A model's folder, as a whole."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.bge_m3.spec import read_bge_m3
from trio_pool_serve.models.classification.spec import read_classifier
from trio_pool_serve.models.dual_encoder.spec import read_dual_encoder
from trio_pool_serve.models.embedding.spec import read_embedding
from trio_pool_serve.models.files.chat_format import read_message_form
from trio_pool_serve.models.files.folder_files import FolderFiles, read_folder_files
from trio_pool_serve.models.generative_reranker.spec import read_generative_reranker
from trio_pool_serve.models.kind import Architecture, ReadArchitecture
from trio_pool_serve.models.late_interaction.spec import read_late_interaction
from trio_pool_serve.models.page_retrieval.spec import read_page_retrieval
from trio_pool_serve.models.process_reward.spec import read_process_reward
from trio_pool_serve.models.sparse.spec import read_sparse
from trio_pool_serve.models.vision_language.spec import read_vision_language

AS_THE_FILES_SAY = ModelConfig()

UNLIMITED = 10**6
"""tokenizer_config.json writes "no limit" as numbers far above any real one."""

POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "xlm-roberta-xl",
        "camembert",
        "mpnet",
        "roberta-prelayernorm",
        "longformer",
        "ibert",
        "mra",
        "data2vec-text",
        "xmod",
        "esm",
    }
)
"""Model types that number positions from ``pad_token_id + 1``, and so take that many tokens less."""


RELATIVE_POSITIONS = frozenset({"t5", "mt5", "umt5"})
"""Model types whose ``n_positions`` is what they were trained on, not what they can take."""


@frozen(kw_only=True)
class ModelFolder:
    """A local folder with a model, and what its files say about serving it."""

    path: Path
    transformer_path: Path
    transformer_config: Mapping[str, Any]
    """``config.json`` of the transformer; its text part, where it has several."""
    architecture: Architecture
    max_model_len: int
    """Longest input, tokens, special tokens included."""
    lower_case: bool = False
    prompts: Mapping[str, str] = Factory(dict)
    default_prompt_name: str | None = None
    messages_in_parts: bool | None = None
    """How its chat template wants texts; ``None`` where the template is to tell."""

    @property
    def model_type(self) -> str:
        """The architecture family, as transformers names it."""
        return str(self.transformer_config.get("model_type", "unknown"))

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding: an id past it cannot be computed."""
        return int(self.transformer_config["vocab_size"])


READERS: tuple[ReadArchitecture, ...] = (
    read_process_reward,
    read_classifier,
    read_generative_reranker,
    read_bge_m3,
    read_page_retrieval,
    read_late_interaction,
    read_sparse,
    read_dual_encoder,
    read_vision_language,
    read_embedding,
)
"""Each kind's reader, asked in this order; the last takes what nobody else has recognised."""


def read_model_folder(path: Path, config: ModelConfig = AS_THE_FILES_SAY) -> ModelFolder:
    """Read a model's folder.

    Raises ``ModelLoadError`` when the folder holds no model, asks for something that is not supported, or
    cannot be served as ``config`` asks.
    """
    files = read_folder_files(path)
    architecture = next(filter(None, (read(files, config) for read in READERS)))
    if config.task is not None and config.task not in architecture.tasks:
        can = ", ".join(sorted(architecture.tasks))
        raise ModelLoadError(f"--task {config.task}: by its files this model can be served for {can} only.")
    return ModelFolder(
        path=path,
        transformer_path=files.transformer_path,
        transformer_config=files.text_config,
        architecture=architecture,
        max_model_len=_length_limit(files, config.max_model_len, architecture.longest_input),
        lower_case=bool(files.module_config.get("do_lower_case")),
        prompts={**files.prompts, **architecture.own_prompts},
        default_prompt_name=files.texts.get("default_prompt_name"),
        messages_in_parts=read_message_form(files),
    )


def _length_limit(files: FolderFiles, asked: int | None, longest_input: int) -> int:
    config = files.text_config
    positions = config.get("max_position_embeddings") or config.get("n_positions") or UNLIMITED
    if positions < 0 or config.get("model_type") in RELATIVE_POSITIONS:  # XLNet says "no limit" by −1
        positions = UNLIMITED
    if config.get("model_type") in POSITIONS_AFTER_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
    if asked is not None:
        if asked > positions:
            raise ModelLoadError(f"--max-model-len {asked} is more than the {positions} positions the model has.")
        return asked
    of_tokenizer = files.tokenizer_config.get("model_max_length") or UNLIMITED
    of_text = min(files.module_config.get("max_seq_length") or UNLIMITED, of_tokenizer)
    limit = min(max(of_text, longest_input), positions)
    if limit >= UNLIMITED:
        raise ModelLoadError("The model's files name no longest input; say one with --max-model-len.")
    return int(limit)
