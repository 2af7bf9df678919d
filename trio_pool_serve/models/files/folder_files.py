"""The JSON files and the modules of a model's folder."""

import ast
import json
import os
import re
import stat
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from attrs import Factory, frozen

from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.files.known_keys import require_known
from trio_pool_serve.models.files.native_configs import Native, modules_in_place
from trio_pool_serve.models.files.safetensors_files import FILE, read_shapes


@frozen(kw_only=True)
class ModuleFiles:
    """One entry of ``modules.json``: its class name, its folder and its config."""

    name: str
    path: Path
    config: Mapping[str, Any] = Factory(dict)


@frozen(kw_only=True)
class RouterFiles:
    """A Router module: the modules of each route, and the route of texts without an input type.

    ``mappings`` are the routes of (task, modality); ``None`` stands for any.
    """

    routes: Mapping[str, tuple[ModuleFiles, ...]]
    default_route: str | None
    mappings: Mapping[Any, str] = Factory(dict)

    def route_of(self, task: str | None) -> str | None:
        """Return the route of texts of a task; ``None`` if there is none: an error in sentence-transformers."""
        for key in ((task, "text"), (task, None), (None, "text"), (None, None)):
            if key in self.mappings:
                return self.mappings[key]
        return next((name for name in (task, "text") if name in self.routes), None if task else self.default_route)


@frozen(kw_only=True)
class FolderFiles:
    """The JSON files of a model's folder, parsed."""

    path: Path
    transformer_path: Path
    modules: tuple[ModuleFiles, ...]
    """``modules.json``, the transformer included, and Truncate for ``truncate_dim``; empty for a bare transformer."""
    config: Mapping[str, Any]
    """``config.json`` of the transformer."""
    module_config: Mapping[str, Any]
    """``sentence_bert_config.json``, the config of the transformer module."""
    sentence_transformers_config: Mapping[str, Any]
    """``config_sentence_transformers.json``."""
    tokenizer_config: Mapping[str, Any]
    chat_template: str | None = None
    """``--chat-template``, in place of the folder's own."""
    router: RouterFiles | None = None
    """Set if the first module is a Router; the transformer is then in one of its routes."""
    native: Native | None = None
    """Set if ``config`` is a published one with the names of transformers' class."""

    @property
    def text_config(self) -> Mapping[str, Any]:
        """``config``, or its text part where it has several, with transformers' defaults for some model types."""
        whole: Mapping[str, Any] = self.config.get("vlm_config") or self.config
        part: Mapping[str, Any] | None = whole.get("text_config")
        model_type = str(self.config.get("model_type"))
        if model_type in DEFAULT_TEXT_CONFIGS:
            return {**DEFAULT_TEXT_CONFIGS[model_type], **(part or whole), "model_type": model_type}
        return part or whole

    @property
    def prompts(self) -> Mapping[str, str]:
        """The model's prompt templates, by name."""
        prompts = self.sentence_transformers_config.get("prompts") or {}
        return {name: text for name, text in prompts.items() if text is not None}

    @property
    def architectures(self) -> tuple[str, ...]:
        """The transformers classes that the weights were saved from."""
        return tuple(self.config.get("architectures") or ())

    def is_saved_from(self, suffix: str | tuple[str, ...]) -> bool:
        """Return whether the weights were saved from a class with this suffix, or one of these: ``ForCausalLM``."""
        return any(name.endswith(suffix) for name in self.architectures)

    @property
    def encoder_class(self) -> str | None:
        """sentence-transformers' class that saved the folder, such as ``CrossEncoder``; PyLate's is ``ColBERT``."""
        return self.sentence_transformers_config.get("model_type")

    @property
    def transformer_task(self) -> str:
        """``transformer_task`` of the transformer module."""
        return str(self.module_config.get("transformer_task", "feature-extraction"))

    @property
    def modality_config(self) -> Mapping[str, Mapping[str, Any]]:
        """``modality_config`` of the transformer module: the method and the output for each modality; maybe empty.

        ``message`` is the modality of conversations.
        """
        return self.module_config.get("modality_config") or {}

    @property
    def processing_kwargs(self) -> Mapping[str, Mapping[str, Any]]:
        """``processing_kwargs`` of the transformer module, by section; empty if it has none."""
        return self.module_config.get("processing_kwargs") or {}

    @property
    def own_pooling(self) -> str | None:
        """The pooling type that ``config`` itself declares, as Llama Nemotron's does; ``None`` if it does not."""
        if self.native is None or not self.native.pooling:
            return None
        return self.native.pooling[self.config.get("pooling", "avg")]

    def require_task(self, wanted: str) -> None:
        """Raise ``ModelLoadError`` unless ``wanted`` is the transformer's task."""
        require(
            self.transformer_task == wanted,
            f"The transformer's task is {self.transformer_task!r}; this kind of model needs {wanted}.",
        )

    def require_methods(self, wanted: Mapping[str, tuple[str, str]]) -> None:
        """Raise ``ModelLoadError`` unless each modality in ``wanted`` is computed by that (method, output)."""
        for modality, (method, output) in wanted.items():
            entry = self.modality_config.get(modality) or {}
            found = entry.get("method"), entry.get("method_output_name")
            require(
                found in ((method, output), (method, [output])),
                f"modality_config computes {modality} by {found[0]} and takes its {found[1]}, which is not "
                f"supported; accepted: {method} and {output}.",
            )

    def reject_processing_kwargs(self, **known: Collection[str]) -> None:
        """Raise ``ModelLoadError`` for ``processing_kwargs`` other than the ``known`` ones of each section."""
        kwargs = self.processing_kwargs
        unknown = [
            f"{part}.{name}" for part in kwargs for name in kwargs[part] or () if name not in known.get(part, ())
        ]
        require(
            not unknown,
            f"The transformer's config requires processing_kwargs {', '.join(unknown)}, which is not supported.",
        )

    def reject_input_type_lengths(self) -> None:
        """Raise ``ModelLoadError`` for lengths by input type, which only late-interaction models support."""
        lengths = "query_length", "document_length", "query_expansion"
        if found := [name for name in lengths if self.module_config.get(name)]:
            raise ModelLoadError(f"The transformer's config requires {', '.join(found)}, which is not supported.")


DEFAULT_TEXT_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "clip": {"vocab_size": 49408, "max_position_embeddings": 77, "pad_token_id": 1},
    "siglip": {"vocab_size": 32000, "max_position_embeddings": 64, "pad_token_id": 1},
    "siglip2": {"vocab_size": 32000, "max_position_embeddings": 64, "pad_token_id": 1},
    "colpali": {"vocab_size": 257152, "max_position_embeddings": 8192, "pad_token_id": 0},
    "colqwen2": {"vocab_size": 152064, "max_position_embeddings": 32768},
    "canine": {"vocab_size": 0x110000},  # hashes of characters, in place of a table
}
"""Defaults of the text part by model type: the published files leave nearly all of it out."""

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""The names that sentence-transformers has given to the transformer module's config over time."""

TRANSFORMERS = ("Transformer", "MLMTransformer", "CLIPModel")
"""Module classes that are a transformer; their config.json is transformers' own."""

STATIC_MODULE = "StaticEmbedding"
"""The class of a module that is no transformer but a table of the tokens' vectors; it reads tokenizer.json only."""

PACKAGES = ("sentence_transformers", "pylate")
"""Packages whose modules are known. PyLate's are sentence-transformers' under another name."""


def read_folder_files(path: Path, chat_template: str | None = None) -> FolderFiles:
    """Read a folder's files. Raises ``ModelLoadError`` if it holds no model or a file is not JSON."""
    require(path.is_dir(), f"{path} is not a folder.")
    if re.search("[\udc80-\udcff]", whole_path := str(path.resolve())):  # libraries cannot open it
        raise ModelLoadError(f"The path {whole_path!a} is not UTF-8.")
    require_regular_files(path)
    modules = read_modules(path)
    whole = read_json(path / "config_sentence_transformers.json")
    # Other kinds of sentence-transformers' models do not read it.
    if modules and (kept := whole.get("truncate_dim")) and whole.get("model_type") in (None, "SentenceTransformer"):
        require(
            type(kept) is int and kept >= 1, f"{path / 'config_sentence_transformers.json'}: truncate_dim is {kept!r}."
        )
        modules += (ModuleFiles(name="Truncate", path=path, config={"dimensions": kept}),)
    router = read_router(modules[0].path) if modules and modules[0].name == "Router" else None
    return _files_of(path, modules, whole, chat_template, router)


def files_of_route(files: FolderFiles, route: Sequence[ModuleFiles]) -> FolderFiles:
    """Return the files of one route of a Router and the modules after it, as a model of their own."""
    return _files_of(files.path, (*route, *files.modules[1:]), files.sentence_transformers_config, files.chat_template)


def _files_of(
    path: Path,
    modules: tuple[ModuleFiles, ...],
    whole: Mapping[str, Any],
    chat_template: str | None,
    router: RouterFiles | None = None,
) -> FolderFiles:
    reader = _input_module(modules, router) if modules else ModuleFiles(name="Transformer", path=path)
    transformer_path = reader.path
    adapter = transformer_path / "adapter_config.json"
    require(
        not adapter.exists(),
        f"{adapter}: an adapter is applied at the top of the served folder only, not in a module or in a base.",
    )
    config = read_json(transformer_path / "config.json")
    _require_counts(transformer_path, config)
    is_static = reader.name == STATIC_MODULE or config.get("model_type") == "model2vec"
    require(bool(config) or is_static, f"{transformer_path} holds no config.json: it is not a transformers model.")
    candidates = ((name, read_json(transformer_path / name)) for name in TRANSFORMER_CONFIGS)
    name, module_config = next(filter(itemgetter(1), candidates), ("", {}))
    require_known("Transformer", str(transformer_path / name), module_config)
    return FolderFiles(
        path=path,
        transformer_path=transformer_path,
        modules=modules,
        config=config or {"model_type": "static"},
        module_config=module_config,
        sentence_transformers_config=whole,
        tokenizer_config={} if is_static else read_json(transformer_path / "tokenizer_config.json"),
        chat_template=chat_template,
        router=router,
    )


LAYERS = re.compile(r"(.*_)?(layers?|depths?|blocks?|block_sizes|experts|groups)")
"""Names of numbers in config.json by which transformers makes that many modules, before it reads a weight."""

MAX_LAYERS = 1000
"""Maximum of such a number, unless the weights are that many tensors. ALBERT's layers share their weights."""

MAX_LABELS = 2**20
"""transformers makes a name for each label, whatever the model computes."""


def _require_counts(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ``ModelLoadError`` for a number of layers or labels that would take minutes and memory to find wrong."""
    parts = [config]
    for part in parts:  # grows
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            limit = MAX_LABELS if name == "num_labels" else MAX_LAYERS if LAYERS.fullmatch(name) else None
            numbers = [number for number in (value if isinstance(value, list) else [value]) if type(number) is int]
            if limit is not None and (most := max(numbers, default=0)) > limit:
                shards = read_json(folder / f"{FILE}.index.json").get("weight_map")
                limit = max(limit, len(shards or (read_shapes(folder / FILE) if (folder / FILE).exists() else ())))
                require(most <= limit, f"{folder}: {name} is {most} in config.json; its weights allow {limit}.")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file, ``{}`` if there is no such file. Raises ``ModelLoadError``."""
    try:
        document = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    return document


MAX_MODULES = 100


def read_modules(path: Path) -> tuple[ModuleFiles, ...]:
    """Return the modules of a sentence-transformers folder, ``()`` for a bare transformer."""
    listing = path / "modules.json"
    try:
        entries = json.loads(read_text(listing)) if listing.is_file() else []
        own = modules_in_place(read_json(path / "config.json"), [entry["type"] for entry in entries])
        if own or not listing.is_file():
            return tuple(ModuleFiles(name=name, path=path, config=config) for name, config in own.items())
        require(len(entries) <= MAX_MODULES, f"{listing} has {len(entries)} modules; the limit is {MAX_MODULES}.")
        modules = tuple(_module_files(path, entry["type"], entry["path"]) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelLoadError(f"{listing} cannot be read: {error!r}") from error
    found = f", but with {modules[0].name}" if modules else ""
    require(
        bool(modules) and modules[0].name in (*TRANSFORMERS, STATIC_MODULE, "Router"),
        f"{listing} does not begin with a Transformer module{found}.",
    )
    return tuple(module for module in modules if module.name != "Dropout")  # only for training


def read_router(path: Path) -> RouterFiles:
    """Return the routes that a Router's ``router_config.json`` declares."""
    config = read_json(path / "router_config.json") or read_json(path / "config.json")
    try:
        count = len(config["types"]) + sum(map(len, config["structure"].values()))
        require(count <= MAX_MODULES, f"The Router of {path} has {count} modules; the limit is {MAX_MODULES}.")
        modules = {name: _module_files(path, dotted, name) for name, dotted in config["types"].items()}
        routes = {route: tuple(modules[name] for name in names) for route, names in config["structure"].items()}
        parameters = config.get("parameters") or {}
        mappings = {ast.literal_eval(key[:99]): to for key, to in (parameters.get("route_mappings") or {}).items()}
        first = next(iter(routes), None) if parameters.get("allow_empty_key", True) else None
        default = parameters.get("default_route") or first
        unknown = {*mappings.values(), default or first} - {*routes, None}
    except (KeyError, TypeError, AttributeError, ValueError, SyntaxError) as error:
        raise ModelLoadError(f"The Router of {path} cannot be read: {error!r}") from error
    require_known("Router", f"{path}: parameters", parameters)
    require(not unknown, f"The Router of {path} has no route {', '.join(map(repr, unknown))}.")
    return RouterFiles(routes=routes, default_route=default, mappings=mappings)


def _input_module(modules: tuple[ModuleFiles, ...], router: RouterFiles | None) -> ModuleFiles:
    """Return the module that reads texts; of a Router's, a transformer if there is one."""
    candidates = [module for route in router.routes.values() for module in route] if router else modules
    found = [module for name in (TRANSFORMERS, (STATIC_MODULE,)) for module in candidates if module.name in name]
    require(
        bool(found) and (router is not None or len({module.path for module in found}) == 1),
        f"The model contains {len(found)} transformers; only one is supported.",
    )
    return found[0]


def _module_files(root: Path, dotted: str, subfolder: str) -> ModuleFiles:
    package, _, name = dotted.rpartition(".")
    require(
        package.partition(".")[0] in PACKAGES,
        f"The module {dotted} is not one of sentence-transformers' own and cannot be loaded.",
    )
    path = (root / subfolder).resolve()
    require(path.is_relative_to(root.resolve()), f"modules.json points outside the model's folder: {subfolder}")
    require_regular_files(path)
    name = "Router" if name == "Asym" else name  # its name before sentence-transformers 5
    config = read_json(path / "config.json") if name not in (*TRANSFORMERS, "Router") else {}
    require_known(name, str(path / "config.json"), config)
    return ModuleFiles(name=name, path=path, config=config)


def find_token_id(files: FolderFiles, token: str) -> int | None:
    """Return a token's id, ``None`` if the vocabulary lacks it. Raises ``ModelLoadError``."""
    folder = files.transformer_path
    document = read_json(folder / "tokenizer.json")
    decoder: Mapping[str, Mapping[str, Any]] = files.tokenizer_config.get("added_tokens_decoder") or {}
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # unigrams: [piece, weight]
        vocabulary = {piece: index for index, (piece, *_) in enumerate(vocabulary)}
    vocabularies: list[Mapping[Any, Any]] = [
        {entry.get("content"): token_id for token_id, entry in decoder.items()},
        {entry.get("content"): entry.get("id") for entry in document.get("added_tokens") or ()},
        vocabulary,
        read_json(folder / "vocab.json"),
        read_json(folder / "added_tokens.json"),
    ]
    return next((int(ids[token]) for ids in vocabularies if token in ids), None)


MAX_FILE_BYTES = 2**28
"""Maximum of a file that is parsed here. tokenizer.json is the largest, with tens of MB."""


def read_text(path: Path) -> str:
    """Return the text of a regular file. Raises ``OSError`` or ``ValueError``."""
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(opened, "rb") as file:  # noqa: PTH123  (a descriptor, not a path)
        require(stat.S_ISREG(os.fstat(opened).st_mode), "it is not a regular file", OSError)
        content = file.read(MAX_FILE_BYTES + 1)
    require(len(content) <= MAX_FILE_BYTES, f"it exceeds {MAX_FILE_BYTES} bytes", ValueError)
    return content.decode("utf-8")


def require_regular_files(folder: Path) -> None:
    """Raise ``ModelLoadError`` for a FIFO or a device, at most two levels deep: libraries would wait for its bytes."""
    try:
        for path in (*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")):
            require(not path.exists() or path.is_file() or path.is_dir(), f"{path} is neither a file nor a folder.")
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error}") from error
