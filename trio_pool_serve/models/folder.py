"""Reading a model's folder: which kind of model it holds, and what its files declare."""

from pathlib import Path
from typing import Any

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError
from trio_pool_serve.models.files.chat_template import read_message_form
from trio_pool_serve.models.files.folder_files import FolderFiles, read_folder_files
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder, ModelKind
from trio_pool_serve.models.model_spec import ModelSpec
from trio_pool_serve.models.registry import KINDS

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


def read_model_folder(path: Path, config: ModelConfig = AS_THE_FILES_SAY) -> AnyModelFolder:
    """Read a model's folder.

    Raises ``ModelLoadError`` when the folder holds no model, asks for something that is not supported, or
    cannot be served as ``config`` asks.
    """
    files = read_folder_files(path)
    kind, spec = _recognise(files, config)
    if config.task is not None and config.task not in spec.tasks:
        can = ", ".join(sorted(spec.tasks))
        raise ModelLoadError(f"--task {config.task}: by its files this model can be served for {can} only.")
    return ModelFolder(
        path=path,
        transformer_path=files.transformer_path,
        transformer_config=files.text_config,
        kind=kind,
        spec=spec,
        max_model_len=_length_limit(files, config.max_model_len, spec.longest_input),
        lower_case=bool(files.module_config.get("do_lower_case")),
        prompts={**files.prompts, **spec.own_prompts},
        default_prompt_name=files.texts.get("default_prompt_name"),
        messages_in_parts=read_message_form(files),
    )


def _recognise(files: FolderFiles, config: ModelConfig) -> tuple[ModelKind[Any], ModelSpec]:
    for kind in KINDS:
        spec = kind.read(files, config)
        if spec is not None:
            return kind, spec
    raise ModelLoadError(f"{files.path} holds a model of no kind that is known.")


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
