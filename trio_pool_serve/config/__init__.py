"""All settings of the server, each declared once.

The command line, the environment (``TRIO_POOL_SERVE_*``) and a TOML file fill these classes; ``--help`` and
``docs/settings.md`` are generated from them.
"""

import importlib

import msgspec
from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, min_len

from trio_pool_serve.config.computing_config import (
    HostsConfig,
    Placement,
    ProcessesConfig,
    SchedulingConfig,
    ThreadsConfig,
)
from trio_pool_serve.config.model_config import Dtype, ModelChangesConfig, ModelConfig, Pooling
from trio_pool_serve.config.model_sources import ANY_NAME, ModelSource, ModelTables, source_of
from trio_pool_serve.config.network_config import KeyScope, NetworkConfig
from trio_pool_serve.config.requests_config import (
    BatchConfig,
    InputConfig,
    LogFormat,
    LoggingConfig,
    LogLevel,
    TimeLimitsConfig,
)
from trio_pool_serve.config.setting import entries_of
from trio_pool_serve.errors import require

__all__ = (
    "ANY_NAME", "BatchConfig", "Config", "Dtype", "HostsConfig", "InputConfig", "KeyScope", "LogFormat", "LogLevel",
    "LoggingConfig", "ModelChangesConfig", "ModelConfig", "ModelSource", "ModelTables", "NetworkConfig", "NoModelError",
    "Placement", "Pooling", "ProcessesConfig", "SchedulingConfig", "ThreadsConfig", "TimeLimitsConfig",
    "decode_config", "encode_config", "import_plugins", "imported_plugins",
)  # fmt: skip


class NoModelError(ValueError):
    """The settings name no model."""


@frozen(kw_only=True)
class Config:
    """All settings of one server.

    ``models`` are local folders or hub ids, optionally preceded by a name: ``NAME=PATH``. The models of ``tables``
    follow them. Requests that name no model use the first one. ``loading`` applies to each model except where its table
    has a setting of its own.
    """

    models: tuple[str, ...] = field(default=(), validator=deep_iterable(min_len(1)))
    tables: ModelTables = Factory(ModelTables)
    loading: ModelConfig = Factory(ModelConfig)
    network: NetworkConfig = Factory(NetworkConfig)
    scheduling: SchedulingConfig = Factory(SchedulingConfig)
    processes: ProcessesConfig = Factory(ProcessesConfig)
    hosts: HostsConfig = Factory(HostsConfig)
    threads: ThreadsConfig = Factory(ThreadsConfig)
    time_limits: TimeLimitsConfig = Factory(TimeLimitsConfig)
    input: InputConfig = Factory(InputConfig)
    logging: LoggingConfig = Factory(LoggingConfig)
    batch: BatchConfig = Factory(BatchConfig)
    model_changes: ModelChangesConfig = Factory(ModelChangesConfig)

    def __attrs_post_init__(self) -> None:
        is_one = len(self.models) == 1 or not (self.models or self.tables.by_name)
        require(
            is_one or self.loading.served_model_name is None,
            "--served-model-name names one model. Name several models by NAME=MODEL.",
            ValueError,
        )
        require(
            is_one or not self.loading.adapter,
            "--adapter is for one model. With several models, set adapters in their tables [models.NAME].",
            ValueError,
        )
        self._check_names()
        engine, hosts, local_only = self.processes.engine, self.hosts.engine_hosts, self.model_changes.flag
        require(
            not hosts or engine != "local",
            "--engine-hosts excludes --engine local; for local engines, too, use --engine process.",
            ValueError,
        )
        require(
            local_only is None or (engine in (None, "local") and self.processes.api_workers <= 1 and not hosts),
            f"{local_only} requires models that compute in the API process: --engine local, one API worker, and no "
            "--engine-hosts.",
            ValueError,
        )

    def _check_names(self) -> None:
        taken: dict[str, ModelSource] = {}
        for source in self.sources:
            require(
                source.name != ANY_NAME,
                "`*` stands for all other names. Give the model a name of its own too: NAME,*.",
                ValueError,
            )
            require(
                ANY_NAME not in source.adapters,
                "`*` stands for all other names. Give the adapter a name of its own: NAME=FOLDER.",
                ValueError,
            )
            require(
                len(source.adapters) == len(source.loading.adapter),
                f"Two adapters of {source.name} have the same name.",
                ValueError,
            )
            for name in (source.name, *source.aliases, *source.adapters):
                if name in taken:
                    where = f"{self.tables.file}: " if self.tables.file else ""
                    raise ValueError(
                        f"{where}Two models have the same name `{name}`: {taken[name].location} and {source.location}."
                    )
                taken[name] = source
        require(
            bool(taken),
            "No model given: name a local folder or the id of a model on the hub, or write tables [models.NAME] "
            "in the file of --config.",
            NoModelError,
        )

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """The models with their names in the API and their settings. Raises ``ValueError``."""
        return (*(source_of(model, self.loading) for model in self.models), *self.tables.sources(self.loading))


def encode_config(config: Config) -> bytes:
    """Return the settings as JSON, for another process."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(encoded: bytes) -> Config:
    """Return the settings from the JSON of ``encode_config``."""
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, value: kind(value))


imported_plugins: list[str] = []
"""Names of the modules of ``--plugins`` imported by this process."""


def import_plugins(config: Config) -> None:
    """Import the modules of ``--plugins``. Raises ``ValueError`` if a module cannot be imported."""
    for name in entries_of(config.processes.plugins):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"--plugins: {name} cannot be imported: {type(error).__name__}: {error}") from error
        imported_plugins.append(name)
