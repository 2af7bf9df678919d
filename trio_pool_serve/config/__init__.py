"""All settings of the server, each declared once.

The command line, the environment (``TRIO_POOL_SERVE_*``) and a TOML file fill these classes; ``--help`` and
``docs/settings.md`` are generated from them.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from attrs import Factory, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, matches_re, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.config.help import help_, switch
from trio_pool_serve.config.model_config import Dtype as Dtype
from trio_pool_serve.config.model_config import ModelConfig as ModelConfig
from trio_pool_serve.config.model_config import Pooling as Pooling
from trio_pool_serve.config.pooler_config import with_pooler_config

Placement: TypeAlias = Literal["local", "process"]
KeyScope: TypeAlias = Literal["all", "all-but-metrics", "vllm"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


@Parameter(name="*", group=Group("Network", sort_key=2))
@frozen(kw_only=True)
class NetworkConfig:
    """Where the server listens, and which requests it accepts."""

    host: Annotated[str, help_("Host name or IP address to listen on.")] = "127.0.0.1"
    port: Annotated[int, help_("TCP port to listen on. 0 selects a free port.")] = field(
        default=8000, validator=[ge(0), le(65535)]
    )
    uds: Annotated[
        Path | None,
        help_("Path of a Unix domain socket to listen on. If set, host and port are ignored.", default="none"),
    ] = None
    api_key: Annotated[
        str | None,
        help_("Key that requests must present in the header `Authorization: Bearer KEY`.", default="none"),
    ] = field(default=None, repr=False, validator=optional(min_len(1)))
    api_key_scope: Annotated[
        KeyScope,
        help_(
            "Which routes require the key. all: every one but probes. all-but-metrics: `/metrics` is open too. vllm: "
            "only paths that begin with `/v1` or `/v2`, as in vLLM."
        ),
    ] = field(default="all", validator=in_(get_args(KeyScope)))
    accept_any_model: Annotated[
        bool, switch("Serve requests that name an unknown model by the first model instead of refusing them.")
    ] = False
    cors_allow_origins: Annotated[
        str,
        help_(
            "Comma-separated origins whose web pages may send requests, such as `https://example.org`; `*` allows all.",
            default="none",
        ),
    ] = ""
    max_body_bytes: Annotated[int, help_("Maximum size of a request body in bytes.")] = field(
        default=16 * 2**20, validator=gt(0)
    )
    write_timeout_s: Annotated[
        float, help_("Seconds after which a TCP client that does not read its response is disconnected.")
    ] = field(default=60.0, validator=gt(0))
    strict_requests: Annotated[
        bool, switch("Refuse requests with unknown fields, at the top level, instead of ignoring those.")
    ] = False
    auto_truncate: Annotated[
        bool, help_("Truncate inputs that are too long in TEI requests that do not set `truncate`.")
    ] = True
    truncate_by_default: Annotated[
        bool,
        switch(
            "Truncate inputs that are too long in all requests that do not say otherwise, instead of refusing them."
        ),
    ] = False
    max_inputs_per_request: Annotated[int, help_("Maximum number of inputs in one request.")] = field(
        default=2048, validator=gt(0)
    )


@Parameter(name="*", group=Group("Scheduling", sort_key=3))
@frozen(kw_only=True)
class SchedulingConfig:
    """How inputs are queued and batched."""

    max_batch_tokens: Annotated[
        int | None,
        help_(
            "Maximum number of tokens in a batch, padding included. A longer single input is a batch by itself.",
            default="16384 on a GPU, 2048 on CPU",
        ),
    ] = field(default=None, validator=optional(gt(0)))
    bulk_batch_s: Annotated[
        float,
        help_(
            "Target duration in seconds of a batch of long inputs, or of the later inputs of a large request, while "
            "small requests arrive. A single input may take longer."
        ),
    ] = field(default=0.02, validator=gt(0))
    max_in_flight: Annotated[
        int,
        help_(
            "Maximum number of batches that are launched and not yet copied to the host. 1: one batch after the other."
        ),
    ] = field(default=2, validator=gt(0))
    max_queue_tokens: Annotated[
        int, help_("Maximum number of tokens in admitted requests; further requests get a 429 response.")
    ] = field(default=1_000_000, validator=gt(0))
    batch_timeout_s: Annotated[
        float,
        help_("Maximum duration of a batch in seconds. After it, the device is assumed to hang, and the engine ends."),
    ] = field(default=300.0, validator=gt(0))


@Parameter(name="*", group=Group("Processes", sort_key=4))
@frozen(kw_only=True)
class ProcessesConfig:
    """The processes of the server."""

    engine: Annotated[
        Placement | None,
        help_(
            "Where models compute. local: in the API process. process: in engine processes, behind Unix sockets.",
            default="local for texts on CPU by OpenVINO, on a single core and under plain hypercorn; else process",
        ),
    ] = field(default=None, validator=optional(in_(("local", "process"))))
    replicas: Annotated[
        int | None,
        help_(
            "Number of batches of each model that are computed at a time: in as many engine processes, or threads with "
            "`--engine local`.",
            default="1 on a GPU; on CPU one per core, at most 4",
        ),
    ] = field(default=None, validator=optional(gt(0)))
    api_workers: Annotated[
        int,
        help_("Number of API processes, which share the listening socket. More than 1 requires `--engine process`."),
    ] = field(default=1, validator=gt(0))
    plugins: Annotated[
        str,
        help_(
            "Comma-separated Python modules that API and engine processes import first. They register kinds of "
            "model, tasks, dialects and routes.",
            default="none",
        ),
    ] = field(default="", validator=matches_re(r"([\w.]+(,[\w.]+)*)?"))

    def __attrs_post_init__(self) -> None:
        if self.engine == "local" and self.api_workers > 1:
            raise ValueError("--engine local computes in the API process, of which there is one: --api-workers is 1.")


@Parameter(name="*", group=Group("Threads", sort_key=5))
@frozen(kw_only=True)
class ThreadsConfig:
    """How much blocking work runs concurrently."""

    renderer_num_workers: Annotated[
        int, help_("Number of threads that render prompts; each has its own tokenizer.")
    ] = field(default=2, validator=gt(0))
    media_num_workers: Annotated[int, help_("Number of threads that decode and preprocess images.")] = field(
        default=2, validator=gt(0)
    )
    postprocess_num_workers: Annotated[int, help_("Number of threads that encode responses.")] = field(
        default=1, validator=gt(0)
    )
    switch_interval_s: Annotated[
        float, help_("Seconds for which a thread may hold the GIL while the event loop waits for it.")
    ] = field(default=0.0005, validator=gt(0))
    niceness: Annotated[
        int,
        help_(
            "Niceness of threads and processes that compute, relative to the event loop (Linux). 0: equal priority, "
            "for machines whose cores are kept busy by other programs."
        ),
    ] = field(default=10, validator=and_(ge(0), le(19)))


@Parameter(name="*", group=Group("Time limits", sort_key=6))
@frozen(kw_only=True)
class TimeLimitsConfig:
    """How long requests and their parts may take."""

    request_timeout_s: Annotated[
        float,
        help_("Maximum duration of a request in seconds. The request header `X-Request-Timeout` can only shorten it."),
    ] = field(default=600.0, validator=gt(0))
    body_timeout_s: Annotated[float, help_("Maximum time in seconds to receive a request body.")] = field(
        default=60.0, validator=gt(0)
    )
    template_timeout_s: Annotated[
        float,
        help_("Maximum time in seconds to render a chat template. After it, the process that renders it is killed."),
    ] = field(default=5.0, validator=gt(0))
    media_timeout_s: Annotated[float, help_("Maximum time in seconds to fetch one image, redirects included.")] = field(
        default=10.0, validator=gt(0)
    )
    drain_timeout_s: Annotated[
        float,
        help_("Maximum time in seconds for running requests to finish after SIGTERM. After it, they are aborted."),
    ] = field(default=30.0, validator=gt(0))


@Parameter(name="*", group=Group("Input", sort_key=7))
@frozen(kw_only=True)
class InputConfig:
    """Inputs other than text, and where they may come from."""

    enable_tokenizer_info_endpoint: Annotated[
        bool, switch("Serve `/tokenizer_info`: the tokenizer's settings and the chat template.")
    ] = False
    trust_request_chat_template: Annotated[
        bool,
        switch(
            "Accept chat templates in requests. They are rendered in a separate process with limits on time and memory."
        ),
    ] = False
    enable_prompt_embeds: Annotated[
        bool, switch("Accept token embeddings in place of texts, in the field `prompt_embeds`.")
    ] = False
    allowed_media_path: Annotated[
        Path | None,
        help_(
            "Directory from which requests may load images by `file:` URLs. Symbolic links that lead out of it are not "
            "followed.",
            default="none",
        ),
    ] = None
    allowed_media_domains: Annotated[
        str,
        help_(
            "Comma-separated hosts from which images may be fetched, redirects included. A host does not include its "
            "subdomains: `*.example.org` allows those of `example.org`, but not `example.org` itself.",
            default="any",
        ),
    ] = field(default="", validator=matches_re(r"[\w.*, -]*", re.ASCII))
    allow_private_media: Annotated[
        bool, switch("Also fetch images from addresses that are not on the public internet.")
    ] = False
    max_media_bytes: Annotated[int, help_("Maximum size of an image file in bytes, before base64 encoding.")] = field(
        default=20 * 2**20, validator=gt(0)
    )
    max_image_pixels: Annotated[
        int, help_("Maximum number of pixels of an image; larger ones are refused before they are decoded.")
    ] = field(default=50_000_000, validator=gt(0))
    max_images_per_input: Annotated[int, help_("Maximum number of images in one input.")] = field(
        default=16, validator=gt(0)
    )
    media_cache_bytes: Annotated[int, help_("Size of the cache of preprocessed images in bytes; 0 disables it.")] = (
        field(default=256 * 2**20, validator=ge(0))
    )

    @property
    def media_domains(self) -> frozenset[str]:
        """The hosts of ``allowed_media_domains``, in lower case."""
        names = (name.strip().lower() for name in self.allowed_media_domains.split(","))
        return frozenset(name for name in names if name)


@Parameter(name="*", group=Group("Logging", sort_key=8))
@frozen(kw_only=True)
class LoggingConfig:
    """What is logged to standard error."""

    log_level: Annotated[LogLevel, help_("Minimum severity of logged messages.")] = field(
        default="info", validator=in_(("debug", "info", "warning", "error"))
    )
    access_log: Annotated[bool, switch("Log every request; reduces throughput.")] = False


@frozen
class ModelSource:
    """One model to serve: its name in the API, a local folder or a hub id, and further names."""

    name: str
    location: str
    aliases: tuple[str, ...] = ()


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
    threads: ThreadsConfig = Factory(ThreadsConfig)
    time_limits: TimeLimitsConfig = Factory(TimeLimitsConfig)
    input: InputConfig = Factory(InputConfig)
    logging: LoggingConfig = Factory(LoggingConfig)

    def __attrs_post_init__(self) -> None:
        names = [name for source in self.sources for name in (source.name, *source.aliases)]
        if self.loading.served_model_name is not None and len(self.models) > 1:
            raise ValueError("--served-model-name is for one model; of several, each is named by NAME=PATH.")
        if len(set(names)) < len(names):
            raise ValueError(f"Two models have the same name: {', '.join(names)}.")
        if self.network.truncate_by_default and self.loading.long_text == "chunk":
            raise ValueError("--truncate-by-default leaves no long text that --long-text chunk could embed in windows.")

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
