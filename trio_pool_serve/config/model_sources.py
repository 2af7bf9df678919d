"""The models of a server with their settings, from the command line, tables of the TOML file, and requests."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from attrs import Factory, evolve, frozen

from trio_pool_serve.config.model_config import ModelConfig
from trio_pool_serve.config.pooler_config import pooler_config_of, with_pooler_config
from trio_pool_serve.config.setting import Text, converted, did_you_mean, plain_message
from trio_pool_serve.errors import require

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")

ANY_NAME = "*"
"""A further name of a model that also serves requests that name an unknown model."""

OF_THE_SERVER = frozenset({"served_model_name", "device", "cache_dir"})
"""Settings that tables do not accept. A model is named by its table, and by ``aliases``."""

KEYS: Mapping[str, Any] = {
    "model": Text,
    "aliases": tuple[Text, ...],
    **{name: hint for name, hint in get_type_hints(ModelConfig).items() if name not in OF_THE_SERVER},
}
"""The keys of a model's table, with their types."""

ACCEPTED = ", ".join(KEYS)

EXCLUSIVE = {"default_prompt": "default_prompt_name", "default_prompt_name": "default_prompt"}


@frozen
class ModelSource:
    """One model to serve: its name in the API, a local folder or a hub id, further names, and how it is loaded."""

    name: str
    location: str
    aliases: tuple[str, ...] = ()
    loading: ModelConfig = Factory(ModelConfig)

    @property
    def adapters(self) -> Mapping[str, str]:
        """The folders or hub ids of its adapters by name."""
        pairs = (each.partition("=") for each in self.loading.adapter)
        return {name: location for name, _, location in pairs}

    @property
    def names(self) -> tuple[str, ...]:
        """All its names in the API, without ``ANY_NAME``."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_NAME))

    @property
    def shown_location(self) -> str:
        """The id on the hub, or the name of a model in a local folder, whose path clients must not see."""
        return self.location if HUB_ID.fullmatch(self.location) else self.name


def source_of(model: str, loading: ModelConfig) -> ModelSource:
    """Return the model of an argument, ``NAME=MODEL`` or ``MODEL``. Raises ``ValueError``."""
    name, equals, location = model.partition("=")
    if not equals or Path(model).is_dir():
        name, location = model, model
    require(
        bool(name.strip("/") and location),
        f"`{model}` is not MODEL or NAME=MODEL: the name is empty or /, or the model is empty.",
        ValueError,
    )
    given = loading.served_model_name
    first, *aliases = map(str.strip, given.split(",")) if given else [name]
    return ModelSource(first, location, tuple(aliases), with_pooler_config(loading))


def source_of_table(name: str, table: object, shared: ModelConfig) -> ModelSource:
    """Return the model that a table or a request describes; settings that it lacks are taken from ``shared``.

    Raises ``ValueError``, which names the key.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f'Write a table, such as `model = "org/name"`, not {table!r}.')  # noqa: TRY004  (of the user's file)
    own = {key.replace("-", "_"): value for key, value in table.items()}
    require(len(own) == len(table), "A setting is given twice, with `-` and with `_`.", ValueError)
    if unknown := own.keys() - KEYS:
        if of_server := unknown & OF_THE_SERVER:
            raise ValueError(f"`{min(of_server)}` is not a setting of one model; it is a flag of the server.")
        raise ValueError(f"Unknown key {min(unknown)}{did_you_mean(min(unknown), KEYS, f'; accepted: {ACCEPTED}.')}")
    own = {key: converted(key, value, KEYS[key]) for key, value in own.items()}
    require(
        bool(name.strip("/")) and "model" in own,
        "A model needs a name and `model`, a local folder or the id of a model on the hub.",
        ValueError,
    )
    location, aliases = own.pop("model"), own.pop("aliases", ())
    replaced = {EXCLUSIVE[key]: None for key in own if key in EXCLUSIVE}
    try:
        alone = with_pooler_config(ModelConfig(**own))  # its pooler_config counts as much as its other keys
        own |= {key: getattr(alone, key) for key in pooler_config_of(alone).settings()}
        loading = evolve(with_pooler_config(shared), **{"adapter": (), **replaced, **own})
    except ValueError as error:
        raise ValueError(plain_message(error)) from error
    return ModelSource(name, location, aliases, loading)


@frozen
class ModelTables:
    """The tables ``[models.NAME]`` of a TOML file, by name, in the order of the file."""

    file: str = ""
    by_name: Mapping[str, Any] = Factory(dict)

    def sources(self, shared: ModelConfig) -> list[ModelSource]:
        """Return the models. Raises ``ValueError``, which names the file, the table and the key."""
        found = []
        for name, table in self.by_name.items():
            try:
                found.append(source_of_table(name, table, shared))
            except ValueError as error:
                raise ValueError(f"{self.file}: [models.{name}]: {error}") from error
        return found


def read_toml(path: str) -> tuple[dict[str, Any], ModelTables]:
    """Return the settings of a TOML file, and separately its tables of models.

    Blocking. Raises ``ValueError``, which names the file.
    """
    try:
        settings = tomllib.loads(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"--config: {path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tables = settings.pop("models", {})
    require(isinstance(tables, dict), f"{path}: `models` must consist of tables, [models.NAME].", ValueError)
    return settings, ModelTables(path, tables)
