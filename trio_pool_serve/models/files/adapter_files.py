"""A LoRA adapter's files, as PEFT saves them: low-rank updates of a base model's weights.

Hu et al., https://arxiv.org/abs/2106.09685. Keys, defaults and patterns are as in peft 0.21's ``LoraConfig``.
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import frozen

from trio_pool_serve.errors import require
from trio_pool_serve.models.files.folder_files import read_json, read_text, require_regular_files
from trio_pool_serve.models.files.known_keys import require_known
from trio_pool_serve.models.files.safetensors_files import read_tensors

Matrix: TypeAlias = npt.NDArray[np.float32]

ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_RANK = 4096

PREFIX = "base_model.model."
"""PEFT's wrapper around the base model, in front of every tensor's name."""

FACTOR = re.compile(r"(?P<module>.+)\.(?P<factor>lora_embedding_[AB]|lora_[AB](?=\.weight))(\.weight)?")

SLOW_PATTERN = re.compile(r"\)[*+{]|([*+{].*){3}|([?|].*){8}")
"""Regular expressions that may take exponential time: a repeated group, or many repetitions or choices."""

DTYPES = ("F32", "F16", "BF16", "F64")

INITIALISATIONS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Values of ``init_lora_weights`` that leave the base's weights as they are."""


@frozen(kw_only=True, eq=False)
class LowRankUpdate:
    """The update of a module's weight W [out, in]: an adapter adds ``scale * up @ down``.

    An embedding's W is [ids, dim], and ``scale * (up @ down).T`` is added. Also where a module stores W transposed
    (transformers' ``Conv1D``), ``up`` has the outputs: the module's class decides, as in PEFT, not ``fan_in_fan_out``.
    """

    down: Matrix
    """``lora_A`` [r, in]; of an embedding ``lora_embedding_A`` [r, ids]."""
    up: Matrix
    """``lora_B`` [out, r]; of an embedding ``lora_embedding_B`` [dim, r]."""
    scale: float
    """alpha / r, or alpha / √r with ``use_rslora`` (https://arxiv.org/abs/2312.03732)."""
    is_embedding: bool = False


@frozen(kw_only=True, eq=False)
class AdapterFiles:
    """A LoRA adapter. Names are as the base's modules had them when it was trained."""

    path: Path
    base: str | None
    """``base_model_name_or_path``: a hub id or a folder."""
    updates: Mapping[str, LowRankUpdate]
    """Updates by the module's name in the base, such as ``encoder.layer.0.attention.self.query``."""
    weights: Mapping[str, Matrix]
    """Whole weights that replace the base's, by name: of ``modules_to_save``, and of embeddings."""
    target_modules: tuple[str, ...]
    """Names, or their ends after a dot, of all modules that it updates; empty if it declares them in another way."""
    modules_to_save: tuple[str, ...]
    """Ends of the names of modules whose weights are all in ``weights``; the base may lack some of the modules."""
    digest: str
    """SHA-256 of both files, in hexadecimal."""


def read_adapter(folder: Path) -> AdapterFiles:
    """Return the adapter in a folder, its tensors in float32. Blocks for as long as it takes to read the files.

    Raises ``ModelLoadError`` for an adapter that is not a plain LoRA or whose tensors do not fit its config.
    """
    require_regular_files(folder)
    place = folder / ADAPTER_CONFIG
    config = read_adapter_config(folder)
    path, pickled = folder / WEIGHTS, folder / "adapter_model.bin"
    found = f"only {pickled.name}, which can contain code" if pickled.exists() else "no weights"
    require(path.exists(), f"{folder} contains {found}; the weights of an adapter must be in {WEIGHTS}.")
    stored, content = read_tensors(path, DTYPES)
    tensors = {name.removeprefix(PREFIX): tensor.astype(np.float32) for name, tensor in stored.items()}
    require(len(tensors) == len(stored), f"{path} contains tensors whose names differ only in {PREFIX}.")
    updates, weights = _sorted_out(place, config, tensors)
    return AdapterFiles(
        path=folder,
        base=config.get("base_model_name_or_path") or None,
        updates=updates,
        weights=weights,
        target_modules=_plain_targets(config),
        modules_to_save=tuple(config.get("modules_to_save") or ()),
        digest=sha256(sha256(read_text(place).encode()).digest() + sha256(content).digest()).hexdigest(),
    )


def read_adapter_config(folder: Path) -> Mapping[str, Any]:
    """Return ``adapter_config.json``. Raises ``ModelLoadError`` unless a plain LoRA is all that it declares."""
    place, config = folder / ADAPTER_CONFIG, read_json(folder / ADAPTER_CONFIG)
    saved = config.get("modules_to_save") or []
    checks: Mapping[str, tuple[bool, str]] = {
        "peft_type": (config.get("peft_type") == "LORA", "'LORA'"),
        "bias": (config.get("bias", "none") == "none", "'none'"),
        "init_lora_weights": (
            config.get("init_lora_weights", True) in INITIALISATIONS,
            ", ".join(map(repr, INITIALISATIONS)) + "; others change the base's weights",
        ),
        "r": (_is_rank(config.get("r", 8)), f"a whole number from 1 to {MAX_RANK}"),
        "lora_alpha": (_is_number(config.get("lora_alpha", 8)), "a number"),
        "rank_pattern": (_is_pattern(config.get("rank_pattern"), _is_rank), "simple patterns, with ranks"),
        "alpha_pattern": (_is_pattern(config.get("alpha_pattern"), _is_number), "simple patterns, with numbers"),
        "modules_to_save": (
            isinstance(saved, list) and all(isinstance(name, str) for name in saved), "names of modules"
        ),
        "base_model_name_or_path": (isinstance(config.get("base_model_name_or_path"), str | None), "a name or a path"),
        "revision": (isinstance(config.get("revision"), str | None), "a name"),
    }  # fmt: skip
    for key, (is_accepted, accepted) in checks.items():
        require(is_accepted, f"{place}: {key} is {config.get(key)!r:.200}; accepted: {accepted}.")
    require_known("LoRA", str(place), {key: value for key, value in config.items() if value})
    return config


def _is_rank(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_RANK


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e9  # NaN is not


def _is_pattern(value: object, is_accepted: Any) -> bool:
    """Return whether a mapping's values are accepted, and its keys regular expressions that are fast."""
    with suppress(re.error):
        return not value or (
            isinstance(value, dict)
            and all(map(is_accepted, value.values()))
            and not any(SLOW_PATTERN.search(pattern) for pattern in value)
            and all(re.compile(pattern) for pattern in value)
        )
    return False


def _plain_targets(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``target_modules`` if it is a list of names that no other key restricts."""
    is_restricted = any(config.get(key) is not None for key in ("exclude_modules", "layers_to_transform"))
    targets = config.get("target_modules")
    return () if is_restricted or not isinstance(targets, list) else tuple(map(str, targets))


def _of_module(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module's name, or its end after a dot, as PEFT does."""
    matching = (value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(matching, default)


def _sorted_out(
    place: Path, config: Mapping[str, Any], tensors: Mapping[str, Matrix]
) -> tuple[Mapping[str, LowRankUpdate], Mapping[str, Matrix]]:
    """Return the updates by module, and the other weights by name."""
    factors: dict[str, dict[str, Matrix]] = {}
    weights: dict[str, Matrix] = {}
    for name, tensor in tensors.items():
        if match := FACTOR.fullmatch(name):
            factors.setdefault(match["module"], {})[match["factor"]] = tensor
        else:  # PEFT also stores embeddings that it updates, or whose size has changed
            require("lora_" not in name, f"{place.parent / WEIGHTS}: {name} is not a tensor of a plain LoRA adapter.")
            weights[name.replace(".base_layer.", ".")] = tensor
    require(bool(tensors), f"{place.parent / WEIGHTS} contains no tensors.")
    return {module: _update(place, config, module, pair) for module, pair in factors.items()}, weights


def _update(place: Path, config: Mapping[str, Any], module: str, pair: Mapping[str, Matrix]) -> LowRankUpdate:
    kind, where = "lora_embedding" if "lora_embedding_A" in pair else "lora", f"{place.parent / WEIGHTS}: {module}"
    wanted = {f"{kind}_A", f"{kind}_B"}
    require(pair.keys() >= wanted, f"{where} lacks {', '.join(sorted(wanted - pair.keys()))}.")
    require(pair.keys() == wanted, f"{where} has both {' and '.join(sorted(pair))}.")
    down, up = pair[f"{kind}_A"], pair[f"{kind}_B"]
    r = _of_module(config.get("rank_pattern"), module, config.get("r", 8))
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    require(
        (down.ndim, up.ndim, *down.shape[:1], *up.shape[1:]) == (2, 2, r, r),
        f"{where} has {kind}_A {list(down.shape)} and {kind}_B {list(up.shape)}; with r = {r} in {place.name} "
        f"they must be [{r}, in] and [out, {r}].",
    )
    scale = alpha / (math.sqrt(r) if config.get("use_rslora") else r)
    return LowRankUpdate(down=down, up=up, scale=scale, is_embedding=kind == "lora_embedding")
