"""Every setting, declared once.

The command line, the environment (``TRIO_POOL_SERVE_*``) and a TOML file all fill these classes, and
``--help`` is made from them: a field's docstring-like ``help`` is all there is to say about it.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from attrs import Factory, field, frozen
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, matches_re, min_len, optional
from cyclopts import Group, Parameter

from trio_pool_serve.types import PoolingTask

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Placement: TypeAlias = Literal["local", "process"]
Attention: TypeAlias = Literal["auto", "padded"]
LongText: TypeAlias = Literal["refuse", "chunk"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


def _help(text: str) -> Parameter:
    return Parameter(help=text)


def _switch(text: str) -> Parameter:
    return Parameter(help=text, negative=())


@Parameter(name="*", group=Group("Model", sort_key=1))
@frozen(kw_only=True)
class ModelConfig:
    """Which model, and how it is loaded."""

    served_model_name: Annotated[
        str | None, _help("Name that clients ask for and answers carry. [default: MODEL as given]")
    ] = field(default=None, validator=optional(min_len(1)))
    revision: Annotated[str | None, _help("Branch, tag or commit of a hub model. [default: main]")] = None
    trust_remote_code: Annotated[bool, _switch("Run Python code that comes with the model.")] = False
    dtype: Annotated[
        Dtype,
        _help(
            "Type the model computes in. auto: bfloat16 where the processor or GPU computes it natively, else float32."
        ),
    ] = field(default="auto", validator=in_(("auto", "float32", "bfloat16", "float16")))
    device: Annotated[
        str,
        _help("Device to compute on: auto, cpu, cuda or cuda:N. auto: the first GPU, else the processor."),
    ] = "auto"
    attention: Annotated[
        Attention,
        _help(
            "How rows of different lengths are computed. auto: without padding on a GPU in half precision, for models "
            "that are found to give the same. padded: each row as long as the longest, as elsewhere."
        ),
    ] = field(default="auto", validator=in_(("auto", "padded")))
    cuda_graphs: Annotated[
        bool, _help("Replay small batches as CUDA graphs, which are captured when the model is loaded.")
    ] = True
    compile: Annotated[
        bool,
        _switch(
            "Compile the model with torch.compile when it is loaded, which takes a minute or more and needs a C++ "
            "compiler; in place of attention without padding and of CUDA graphs."
        ),
    ] = False
    max_model_len: Annotated[
        int | None,
        _help("Longest input, tokens, special tokens included. [default: what the model's files say]"),
    ] = field(default=None, validator=optional(gt(0)))
    long_text: Annotated[
        LongText,
        _help(
            "What to do with a text longer than that which is to be embedded, and not to be truncated. chunk: embed it "
            "in windows; its vector is their mean, weighed by their tokens."
        ),
    ] = field(default="refuse", validator=in_(("refuse", "chunk")))
    task: Annotated[
        PoolingTask | None,
        _help(
            "What the model is served for: another than its files say is refused. score: a causal language model whose "
            "files say nothing is asked for yes or no, as Qwen3-Reranker is. [default: what the model's files say]"
        ),
    ] = field(default=None, validator=optional(in_(get_args(PoolingTask))))
    step_tag_id: Annotated[
        int | None,
        _help("Token that ends a step, for process reward models. [default: what the model's files say]"),
    ] = field(default=None, validator=optional(ge(0)))
    returned_token_ids: Annotated[
        tuple[int, ...],
        Parameter(
            help="Tokens that a language model judges steps by, as JSON: `[648,387]`. Needs `--step-tag-id`. "
            "[default: none]",
            negative=(),
        ),
    ] = field(default=(), validator=deep_iterable(ge(0)))


@Parameter(name="*", group=Group("Network", sort_key=2))
@frozen(kw_only=True)
class NetworkConfig:
    """Where the server listens, and what it accepts."""

    host: Annotated[str, _help("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _help("TCP port to listen on; 0 picks a free one.")] = field(
        default=8000, validator=[ge(0), le(65535)]
    )
    uds: Annotated[Path | None, _help("Unix socket to listen on instead of host and port.")] = None
    api_key: Annotated[
        str | None,
        _help("Key that clients must send as `Authorization: Bearer KEY`. [default: none asked for]"),
    ] = field(default=None, repr=False, validator=optional(min_len(1)))
    max_body_bytes: Annotated[int, _help("Largest request body, bytes.")] = field(default=16 * 2**20, validator=gt(0))
    write_timeout_s: Annotated[
        float, _help("Seconds after which a TCP client that reads nothing of its answer is disconnected.")
    ] = field(default=60.0, validator=gt(0))
    strict_requests: Annotated[bool, _switch("Refuse request fields that nobody knows, instead of ignoring them.")] = (
        False
    )
    auto_truncate: Annotated[
        bool, _help("Truncate inputs that are too long where a TEI client does not say whether to.")
    ] = True
    max_inputs_per_request: Annotated[int, _help("Most inputs in one request.")] = field(default=2048, validator=gt(0))


@Parameter(name="*", group=Group("Scheduling", sort_key=3))
@frozen(kw_only=True)
class SchedulingConfig:
    """How work reaches the device."""

    max_batch_tokens: Annotated[
        int | None,
        _help(
            "Most tokens per batch, padding included; a longer single input rides alone. "
            "[default: by device: 16384 on a GPU, 2048 on a processor]"
        ),
    ] = field(default=None, validator=optional(gt(0)))
    bulk_batch_s: Annotated[
        float,
        _help(
            "Seconds that a batch of long inputs, or of the rest of a large request, may take while small requests "
            "come; a single input may take longer."
        ),
    ] = field(default=0.02, validator=gt(0))
    max_in_flight: Annotated[
        int, _help("Batches launched and not yet copied back. 1 makes the device loop serial.")
    ] = field(default=2, validator=gt(0))
    max_queue_tokens: Annotated[int, _help("Tokens of admitted requests past which further ones are answered 429.")] = (
        field(default=1_000_000, validator=gt(0))
    )
    batch_timeout_s: Annotated[
        float, _help("Seconds after which a batch that has not come back means that the device is wedged.")
    ] = field(default=300.0, validator=gt(0))


@Parameter(name="*", group=Group("Processes", sort_key=4))
@frozen(kw_only=True)
class ProcessesConfig:
    """Which processes the server is made of."""

    engine: Annotated[
        Placement | None,
        _help(
            "Where models compute. local: in the process that answers requests. process: in processes of their own, "
            "behind Unix sockets. [default: process on two cores and more, local on one and under plain hypercorn]"
        ),
    ] = field(default=None, validator=optional(in_(("local", "process"))))
    replicas: Annotated[
        int | None,
        _help(
            "Engine processes per model, with --engine process. [default: 1 on a GPU; on a processor one per core, at "
            "most 4]"
        ),
    ] = field(default=None, validator=optional(gt(0)))
    api_workers: Annotated[
        int, _help("Processes that answer requests, on one listening socket. More than 1 need --engine process.")
    ] = field(default=1, validator=gt(0))

    def __attrs_post_init__(self) -> None:
        if self.engine == "local" and self.api_workers > 1:
            raise ValueError("--engine local computes in the one process that answers requests: --api-workers is 1.")


@Parameter(name="*", group=Group("Threads", sort_key=5))
@frozen(kw_only=True)
class ThreadsConfig:
    """How much blocking work runs at once."""

    renderer_num_workers: Annotated[int, _help("Prompts rendered at once; each has a tokenizer of its own.")] = field(
        default=2, validator=gt(0)
    )
    media_num_workers: Annotated[int, _help("Images decoded and prepared at once.")] = field(default=2, validator=gt(0))
    postprocess_num_workers: Annotated[int, _help("Answers encoded at once.")] = field(default=1, validator=gt(0))
    switch_interval_s: Annotated[
        float, _help("Seconds a thread may keep the interpreter lock while the loop wants it.")
    ] = field(default=0.0005, validator=gt(0))
    niceness: Annotated[
        int,
        _help(
            "By how much threads and processes that work are nicer to others than the event loop is (Linux). With 0 "
            "all are alike: for machines where other programs keep the processors busy."
        ),
    ] = field(default=10, validator=and_(ge(0), le(19)))


@Parameter(name="*", group=Group("Time limits", sort_key=6))
@frozen(kw_only=True)
class TimeLimitsConfig:
    """How long things may take."""

    request_timeout_s: Annotated[
        float, _help("Seconds a request may take; a client's own X-Request-Timeout can only shorten it.")
    ] = field(default=600.0, validator=gt(0))
    body_timeout_s: Annotated[float, _help("Seconds a request's body may take to arrive.")] = field(
        default=60.0, validator=gt(0)
    )
    template_timeout_s: Annotated[
        float, _help("Seconds that a chat template may take; the process that renders it is killed then.")
    ] = field(default=5.0, validator=gt(0))
    media_timeout_s: Annotated[float, _help("Seconds that fetching one image may take, redirects included.")] = field(
        default=10.0, validator=gt(0)
    )
    drain_timeout_s: Annotated[
        float, _help("Seconds given to running requests after SIGTERM before they are cut off.")
    ] = field(default=30.0, validator=gt(0))


@Parameter(name="*", group=Group("Input", sort_key=7))
@frozen(kw_only=True)
class InputConfig:
    """Which inputs beside texts are taken, and from where."""

    trust_request_chat_template: Annotated[
        bool, _switch("Render chat templates that come with a request; they run in a process that can be killed.")
    ] = False
    enable_prompt_embeds: Annotated[bool, _switch("Take token embeddings in place of texts, as `prompt_embeds`.")] = (
        False
    )
    allowed_media_path: Annotated[
        Path | None,
        _help(
            "Folder whose images requests may name by `file:` URLs; links that lead out of it do not. [default: none]"
        ),
    ] = None
    allowed_media_domains: Annotated[
        str,
        _help(
            "Hosts that images are fetched from, separated by commas, redirects included. A host does not stand for "
            "its subdomains; `*.example.org` stands for those, and not for `example.org`. [default: any]"
        ),
    ] = field(default="", validator=matches_re(r"[\w.*, -]*", re.ASCII))
    allow_private_media: Annotated[
        bool, _switch("Fetch images from addresses too that are not of the public internet.")
    ] = False
    max_media_bytes: Annotated[int, _help("Largest image, bytes, as it is stored or sent, without base64.")] = field(
        default=20 * 2**20, validator=gt(0)
    )
    max_image_pixels: Annotated[int, _help("Largest image, pixels; more are refused before they are decoded.")] = field(
        default=50_000_000, validator=gt(0)
    )
    max_images_per_input: Annotated[int, _help("Most images in one input.")] = field(default=16, validator=gt(0))
    media_cache_bytes: Annotated[int, _help("Memory for prepared images that may be asked for again; 0: none.")] = (
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
    """What is said on standard error."""

    log_level: Annotated[LogLevel, _help("Least severity that is logged.")] = field(
        default="info", validator=in_(("debug", "info", "warning", "error"))
    )
    access_log: Annotated[bool, _switch("Log every request; costs throughput.")] = False


@frozen
class ModelSource:
    """One model to serve: the name that clients ask for, and a local folder or a hub id."""

    name: str
    location: str


@frozen(kw_only=True)
class Config:
    """All settings of one server.

    ``models`` are local folders or hub ids, each perhaps behind a name: ``NAME=PATH``. The first answers those
    who name none.
    """

    models: tuple[str, ...] = field(validator=[min_len(1), deep_iterable(min_len(1))])
    loading: ModelConfig = Factory(ModelConfig)
    network: NetworkConfig = Factory(NetworkConfig)
    scheduling: SchedulingConfig = Factory(SchedulingConfig)
    processes: ProcessesConfig = Factory(ProcessesConfig)
    threads: ThreadsConfig = Factory(ThreadsConfig)
    time_limits: TimeLimitsConfig = Factory(TimeLimitsConfig)
    input: InputConfig = Factory(InputConfig)
    logging: LoggingConfig = Factory(LoggingConfig)

    def __attrs_post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if self.loading.served_model_name is not None and len(names) > 1:
            raise ValueError("--served-model-name is for one model; of several, each is named by NAME=PATH.")
        if len(set(names)) < len(names):
            raise ValueError(f"Two models have the same name: {', '.join(names)}.")

    @property
    def sources(self) -> tuple[ModelSource, ...]:
        """The models, with the names clients ask for."""
        return tuple(_source(model, self.loading.served_model_name) for model in self.models)


def _source(model: str, served_model_name: str | None) -> ModelSource:
    name, equals, location = model.partition("=")
    if not equals or Path(model).is_dir():
        name, location = model, model
    return ModelSource(served_model_name or name, location)


def encode_config(config: Config) -> bytes:
    """Return settings for another process, as JSON."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(encoded: bytes) -> Config:
    """Return the settings that ``encode_config`` was given."""
    return msgspec.json.decode(encoded, type=Config, dec_hook=lambda kind, value: kind(value))
