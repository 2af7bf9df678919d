"""Recognising a model's folder: its kind, what its files declare, and its maximum length."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import evolve

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.adapter_files import ADAPTER_CONFIG, read_adapter_config
from trio_pool_serve.models.files.chat_settings import (
    given_chat_template,
    names_both_texts,
    read_chat_template,
    read_message_format,
)
from trio_pool_serve.models.files.exported_files import has_torch_weights
from trio_pool_serve.models.files.folder_files import FolderFiles, read_folder_files
from trio_pool_serve.models.files.joined_folder import adapter_in, join_folders
from trio_pool_serve.models.files.model_digest import file_states
from trio_pool_serve.models.files.native_configs import (
    end_token_of,
    modules_in_place,
    native_config,
    native_of,
    without_causal_mask,
)
from trio_pool_serve.models.files.quantized_files import read_quantization
from trio_pool_serve.models.files.task_adapters import PROMPTS, read_task_adapters
from trio_pool_serve.models.loading.architectures import require_supported_type
from trio_pool_serve.models.model_kind import AnyModelFolder, ModelFolder, ModelSpec
from trio_pool_serve.models.registry import recognise
from trio_pool_serve.storage.model_cache import ModelCache
from trio_pool_serve.telemetry.start_display import download_bar, report_step

IGNORED_FILES = [
    "onnx/*", "openvino/*", "coreml/*", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.gguf", "*.tflite", "*.mlmodel",
]  # fmt: skip
"""Weights of other runtimes, which many repositories contain as well."""


DEFAULT_MODEL_CONFIG = ModelConfig()


def locate_model(location: str, config: ModelConfig = DEFAULT_MODEL_CONFIG, *, only_local: bool = False) -> Path:
    """Return the folder of the model at ``location``, a folder or a hub id, which is downloaded unless ``only_local``.

    For a LoRA adapter it is a folder with the files of the adapter and of its base. Blocks, with progress bars.
    Raises ``ModelLoadError``.
    """
    names = f"{config.served_model_name},{location}"
    hint = "" if config.served_model_name is None or "/" in location else f". If it is another name, write {names}"
    path = locate_folder(location, config.revision, only_local=only_local, hint=hint)
    if not path.name or path.name == "..":  # a joined folder has the adapter's name
        path = path.resolve()
    is_adapter, has_weights = (path / ADAPTER_CONFIG).exists(), has_torch_weights(path)
    found = f"no {ADAPTER_CONFIG}" if not is_adapter else "the weights of a base, too" if has_weights else ""
    require(
        config.adapter_base is None or not found,
        f"--adapter-base requires the folder of a LoRA adapter; {path} contains {found}.",
    )
    if not is_adapter:
        return path
    cache = ModelCache.of(config.cache_dir)
    try:
        base = path if has_weights else _locate_base(path, config.adapter_base, only_local=only_local)
        return join_folders(path, base, None if cache is None else cache.folder)
    except OSError as error:
        raise ModelLoadError(f"The adapter in {path} cannot be joined with its base: {error}") from error


def _locate_base(adapter: Path, given: str | None, *, only_local: bool) -> Path:
    """Return the folder of an adapter's base: as given, as the adapter names it, or beside the adapter."""
    config = read_adapter_config(adapter)
    name = given or config.get("base_model_name_or_path") or ""
    require(name != "", f"{adapter / ADAPTER_CONFIG}: base_model_name_or_path is empty; set --adapter-base.")
    beside = adapter.parent / Path(name).name
    is_there = given is not None or Path(name).expanduser().is_dir()
    if not is_there and beside != adapter and (beside / "config.json").is_file():
        return beside
    try:
        return locate_folder(name, None if given else config.get("revision"), only_local=only_local)
    except ModelLoadError as error:
        raise ModelLoadError(f"The base of the adapter {adapter} was not found; set --adapter-base. {error}") from error


def locate_folder(model: str, revision: str | None = None, *, only_local: bool = False, hint: str = "") -> Path:
    """Return the local folder of a model or an adapter, as ``locate_model``, but alone and as it is.

    An error about the hub ends with ``hint``.
    """
    path = Path(os.path.expanduser(model))  # noqa: PTH111  (``Path.expanduser`` raises for unknown users)
    require(not path.is_file(), f"{path} is a file; a model is the folder that contains its files: {path.parent}.")
    if path.is_dir():
        require(os.access(path, os.R_OK | os.X_OK, effective_ids=True), f"{path} cannot be read: Permission denied.")
        return path
    # Imported here: a local folder does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    step = f"fetching {model}"
    report_step("" if only_local else step)
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            ignore_patterns=IGNORED_FILES,
            local_files_only=only_local,
            tqdm_class=download_bar(step),
        )
    except HFValidationError as error:
        raise ModelLoadError(f"{model} is neither a folder nor the id of a hub model{hint}.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error)
        if isinstance(error, LocalEntryNotFoundError):  # the lines after the first advise on code
            reason = reason.partition("\n")[0].removeprefix("Got: ")
        raise ModelLoadError(
            f"{model} is not a folder, and cannot be downloaded from the hub: {reason}{hint}"
        ) from error
    report_step("")
    return Path(folder)


UNLIMITED = 10**6
"""Lengths from here on mean "no limit": tokenizer_config.json writes that as a number far above any real limit."""

POSITIONS_AFTER_PADDING = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "roberta-prelayernorm", "longformer", "ibert",
    "mra", "data2vec-text", "xmod", "esm",
})  # fmt: skip
"""Model types that number positions from ``pad_token_id + 1``, and so accept that many fewer tokens."""

RELATIVE_POSITIONS = frozenset({"t5", "mt5", "umt5"})
"""Model types whose ``n_positions`` is the length they were trained on, not a limit."""


def open_model_folder(location: str, config: ModelConfig) -> AnyModelFolder:
    """Read the folder of the model at ``location``, as ``locate_model``.

    Blocks. Raises ``ModelLoadError``.
    """
    return read_model_folder(locate_model(location, config), config)


def read_model_folder(path: Path, config: ModelConfig = DEFAULT_MODEL_CONFIG) -> AnyModelFolder:
    """Read a model's folder.

    Raises ``ModelLoadError`` when the folder holds no model, requires something unsupported, or cannot be served
    with ``config``.
    """
    try:
        states = file_states(path)
        folder = _folder_of(read_folder_files(path, given_chat_template(config.chat_template)), config, states)
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelLoadError(f"A file in {path} contains a value of an unexpected type: {error!r}") from error
    is_one = not (folder.routes or folder.spec.reads_tokenizer_file)
    require(is_one or adapter_in(path) is None, f"{path}: an adapter needs a base that is one transformer.")
    return folder


def _folder_of(files: FolderFiles, config: ModelConfig, states: Mapping[str, object]) -> AnyModelFolder:
    is_replaced = bool(modules_in_place(files.config, ()))
    runs_code = config.trust_remote_code and "auto_map" in files.config and not is_replaced
    place, published = str(files.transformer_path / "config.json"), files.config
    native = None if runs_code else native_of(place, published)
    if native is not None:
        files = evolve(files, config=native_config(native, place, published), native=native)
        if files.is_saved_from("ForSequenceClassification") and not names_both_texts(read_chat_template(files)):
            files = evolve(files, chat_template=files.chat_template or native.pair_template)
    elif not runs_code:
        files = evolve(files, config=without_causal_mask(published))
    if is_replaced:  # the published code reads no other length
        files = evolve(files, module_config={"max_seq_length": files.config.get("max_position_embeddings")})
    kind, spec = recognise(files, config)
    require(
        spec.pools_token_states or (config.pooling is None and config.normalize is None),
        "--pooling and --normalize (use_activation in --pooler-config) apply only to embedding models.",
    )
    require(
        config.task is None or config.task in spec.tasks,
        f"--task {config.task}: this model's files support only {', '.join(sorted(spec.tasks))}.",
    )
    wanted = (is_replaced and files.config.get("task_names")) or ()
    adapters = {} if adapter_in(files.path) else read_task_adapters(files.transformer_path, files.config, wanted)
    of_tasks = PROMPTS.get(str(files.config.get("model_type")), {}) if adapters else {}
    of_card = {} if files.prompts else of_tasks if native is None else native.prompts
    prompts = {**of_card, **files.prompts, **spec.extra_prompts}
    routes = tuple(_folder_of(each, config, states) for each in spec.route_files)
    try:
        lengths = [each.max_model_len for each in routes] or [_max_model_len(files, config.max_model_len, spec)]
    except ModelLoadError:
        if native is None and not runs_code and not kind.open_runner:
            with suppress(ImportError):
                require_supported_type(place, files.config)  # no length helps a model that cannot be served
        raise
    return ModelFolder(
        path=files.path,
        file_states=states,
        routes=routes,
        transformer_path=files.transformer_path,
        transformer_config=files.text_config,
        kind=kind,
        spec=spec,
        native_config=None if files.config is published else files.config,
        end_token=None if runs_code else end_token_of(published),
        max_model_len=min(lengths),
        quantization=read_quantization(place, files.config),
        lower_case=bool(files.module_config.get("do_lower_case")),
        task_adapters=adapters,
        prompts=prompts,
        default_prompt_name=_default_prompt_name(files, prompts, config),
        default_prompt=config.default_prompt,
        structured_messages=read_message_format(files),
        task=config.task,
        tokenizer_config=files.tokenizer_config,
        chat_template=files.chat_template,
    )


def peek_folder(location: str, config: ModelConfig) -> AnyModelFolder | None:
    """Return the folder of the model at ``location``; ``None`` if its files are not on this machine yet, or wrong.

    Blocks for milliseconds; fetches nothing.
    """
    try:
        return read_model_folder(locate_model(location, config, only_local=True), config)
    except (ModelLoadError, OSError, ValueError):
        return None  # loading the model reports the error


def _default_prompt_name(files: FolderFiles, prompts: Mapping[str, str], config: ModelConfig) -> str | None:
    name, setting, known = config.default_prompt_name, "--default-prompt-name", {*prompts}
    if name is None:
        name, setting = files.sentence_transformers_config.get("default_prompt_name"), "default_prompt_name"
        # sentence-transformers adds the first two, empty, and makes null an empty prompt.
        known |= {"query", "document", *(files.sentence_transformers_config.get("prompts") or ())}
    require(
        not name or name in known,
        f"{setting} is {name!r}; the prompt templates of this model are: {', '.join(sorted(known)) or 'none'}.",
    )
    return name or None


def _max_model_len(files: FolderFiles, configured: int | None, spec: ModelSpec) -> int:
    config = files.text_config
    positions = config.get("max_position_embeddings") or config.get("n_positions") or UNLIMITED
    if positions < 0 or config.get("model_type") in RELATIVE_POSITIONS:  # XLNet: −1 means no limit
        positions = UNLIMITED
    if config.get("model_type") in POSITIONS_AFTER_PADDING:
        positions -= (config.get("pad_token_id") or 0) + 1
    if configured is not None:
        require(
            configured <= positions, f"--max-model-len {configured} exceeds the {positions} positions of the model."
        )
        return configured
    # As in sentence-transformers, max_seq_length replaces the tokenizer's limit even if it is larger.
    text_limit = (
        files.module_config.get("max_seq_length")
        or files.tokenizer_config.get("model_max_length")
        or files.tokenizer_config.get("max_len")
        or spec.undeclared_max_tokens
        or UNLIMITED
    )
    limit = min(max(text_limit, spec.max_input_tokens), positions)
    require(limit < UNLIMITED, "The model's files declare no maximum length; set it with --max-model-len.")
    return int(limit)
