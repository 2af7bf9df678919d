"""All settings of the server, each declared once.

The command line, the environment (``TRIO_POOL_SERVE_*``) and a TOML file fill these classes; ``--help`` and
``docs/settings.md`` are generated from them.
"""

import importlib
import re
from pathlib import Path

import msgspec
from attrs import Factory, field, frozen
from attrs.validators import deep_iterable, min_len

from trio_pool_serve.config.batch_config import BatchConfig as BatchConfig
from trio_pool_serve.config.computing_config import Placement as Placement
from trio_pool_serve.config.computing_config import ProcessesConfig as ProcessesConfig
from trio_pool_serve.config.computing_config import SchedulingConfig as SchedulingConfig
from trio_pool_serve.config.computing_config import ThreadsConfig as ThreadsConfig
from trio_pool_serve.config.hosts_config import HostsConfig as HostsConfig
from trio_pool_serve.config.limits_config import InputConfig as InputConfig
from trio_pool_serve.config.limits_config import TimeLimitsConfig as TimeLimitsConfig
from trio_pool_serve.config.logging_config import LogFormat as LogFormat
from trio_pool_serve.config.logging_config import LoggingConfig as LoggingConfig
from trio_pool_serve.config.logging_config import LogLevel as LogLevel
from trio_pool_serve.config.model_changes_config import ModelChangesConfig as ModelChangesConfig
from trio_pool_serve.config.model_config import Dtype as Dtype
from trio_pool_serve.config.model_config import ModelConfig as ModelConfig
from trio_pool_serve.config.model_config import Pooling as Pooling
from trio_pool_serve.config.network_config import KeyScope as KeyScope
from trio_pool_serve.config.network_config import NetworkConfig as NetworkConfig
from trio_pool_serve.config.pooler_config import with_pooler_config
from trio_pool_serve.config.ray_config import RayConfig as RayConfig

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


ANY_NAME = "*"
"""Among the further names of one model: it also serves requests that name an unknown model."""


@frozen
class ModelSource:
    """One model to serve: its name in the API, a local folder or a hub id, and further names."""

    name: str
    location: str
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All its names in the API, without ``ANY_NAME``."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_NAME))

    @property
    def shown_location(self) -> str:
        """The id on the hub; the name of a model whose folder is given by its path, which clients do not see."""
        return self.location if HUB_ID.fullmatch(self.location) else self.name


@frozen(kw_only=True)
class Config:
    """All settings of one server.

    ``models`` are local folders or hub ids, optionally preceded by a name: ``NAME=PATH``. The first is used for
    requests that name no model.
    """

    models: tuple[str, ...] = field(validator=[min_len(1), deep_iterable(min_len(1))])
    loading: ModelConfig = field(factory=ModelConfig, converter=with_pooler_config)
    network: NetworkConfig = Factory(NetworkConfig)
    scheduling: SchedulingConfig = Factory(SchedulingConfig)
    processes: ProcessesConfig = Factory(ProcessesConfig)
    hosts: HostsConfig = Factory(HostsConfig)
    ray: RayConfig = Factory(RayConfig)
    threads: ThreadsConfig = Factory(ThreadsConfig)
    time_limits: TimeLimitsConfig = Factory(TimeLimitsConfig)
    input: InputConfig = Factory(InputConfig)
    logging: LoggingConfig = Factory(LoggingConfig)
    batch: BatchConfig = Factory(BatchConfig)
    model_changes: ModelChangesConfig = Factory(ModelChangesConfig)

    def __attrs_post_init__(self) -> None:
        names = [name for source in self.sources for name in (source.name, *source.aliases)]
        if self.loading.served_model_name is not None and len(self.models) > 1:
            raise ValueError("--served-model-name is for one model; of several, each is named by NAME=PATH.")
        if any(source.name == ANY_NAME for source in self.sources):
            raise ValueError("`*` is no name of its own, but stands for all others: --served-model-name NAME,*.")
        if len(set(names)) < len(names):
            raise ValueError(f"Two models have the same name: {', '.join(names)}.")
        if self.hosts.engine_hosts and self.processes.engine == "local":
            raise ValueError("--engine local computes in the API process: --engine-hosts go with process, or alone.")
        if self.network.truncate_by_default and self.loading.long_text == "chunk":
            raise ValueError("--truncate-by-default leaves no long text that --long-text chunk could embed in windows.")
        self._check_model_changes()

    def _check_model_changes(self) -> None:
        flag = self.model_changes.flag
        if flag is not None and (
            self.processes.engine not in (None, "local") or self.processes.api_workers > 1 or self.hosts.engine_hosts
        ):
            raise ValueError(
                f"{flag} is for models that compute in the API process: it requires --engine local, and neither "
                "--api-workers nor --engine-hosts."
            )

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """The models with their names in the API."""
        return tuple(_source(model, self.loading.served_model_name) for model in self.models)


def _source(model: str, served_model_name: str | None) -> ModelSource:
    name, equals, location = model.partition("=")
    if not equals or Path(model).is_dir():
        name, location = model, model
    first, *aliases = map(str.strip, served_model_name.split(",")) if served_model_name else [name]
    return ModelSource(first, location, tuple(aliases))


def encode_config(config: Config) -> bytes:
    """Return the settings as JSON, to be sent to another process."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(encoded: bytes) -> Config:
    """Return the settings that ``encode_config`` has encoded."""
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, value: kind(value))


def import_plugins(config: Config) -> None:
    """Import the modules of ``--plugins``. Raises ``ValueError`` for one that cannot be imported."""
    for name in filter(None, config.processes.plugins.split(",")):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ValueError(f"--plugins: {name} cannot be imported: {error!r}") from error
