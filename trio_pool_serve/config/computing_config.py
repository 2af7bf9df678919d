"""Settings of scheduling, processes, engines on other machines, and threads."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

from attrs import field, frozen
from attrs.validators import ge, gt, in_, optional

from trio_pool_serve.config.setting import Setting, matches, within
from trio_pool_serve.errors import require

Placement: TypeAlias = Literal["local", "process", "hosts", "ray"]

STALL_SHARE = 0.1
"""Share of ``--batch-timeout-s``: 30 s by default, in which every batch returns unless its device hangs."""

LEAST_SILENCE_S = 5.0
"""On a busy machine, the event loop of a process may be late by seconds, and another process takes seconds to load."""

ZONE = r"[A-Za-z0-9._-]{0,63}"
"""The values of Kubernetes labels."""

REPLICAS = r"[1-9]\d{0,3}(\.\.[1-9]\d{0,3}|/gpu)?"


GPU_BATCH_TOKENS = 16384
"""The default of ``max_batch_tokens`` on a GPU: a batch that fills it."""

CPU_BATCH_TOKENS = 2048
"""The default on CPU: about as many tokens as it computes while a short query may wait."""


@frozen(kw_only=True)
class SchedulingConfig:
    """How inputs are queued and batched."""

    max_batch_tokens: Annotated[
        int | Literal["auto"],
        Setting(
            "Maximum tokens in a batch, including padding. An input that is longer is computed alone. auto: "
            f"{GPU_BATCH_TOKENS} on a GPU, {CPU_BATCH_TOKENS} on CPU. On a GPU, full batches are tried at start-up, "
            "and the number is halved until they fit into its memory."
        ),
    ] = field(default="auto", validator=matches(r"auto|[1-9]\d*", "auto or a number of tokens"))
    max_queue_s: Annotated[
        float,
        Setting(
            "Maximum time of a request in the queue. It is estimated when the request arrives. If it would be longer, "
            "the request gets a 429 response."
        ),
    ] = field(default=5.0, validator=gt(0))
    memory_budget_bytes: Annotated[
        int,
        Setting(
            "Maximum memory that requests hold: bodies of more than 16 KiB, images, token embeddings, vectors, and "
            "responses until they are sent. One client may hold half of it. If the memory is used up, new requests get "
            "a 429 response, and requests that are being computed wait. The image cache takes up to an eighth of it."
        ),
    ] = field(default=2 * 2**30, validator=gt(0))
    result_cache_bytes: Annotated[
        int,
        Setting(
            "Maximum size of the result cache, which answers inputs that were computed before; 0 disables it. The API "
            "processes divide it between them."
        ),
    ] = field(default=0, validator=ge(0))
    batch_timeout_s: Annotated[
        float,
        Setting(
            "Maximum duration of a batch. If a batch takes longer, the device is assumed to hang, and the engine "
            "exits. If a batch has not returned, or an engine process is silent, for a tenth of this time, it counts "
            "as stalled: `/readyz` returns 503, and new inputs go to other replicas. An engine process that is silent "
            f"for so long, and for at least {LEAST_SILENCE_S:g} s, is killed."
        ),
    ] = field(default=300.0, validator=gt(0))

    @property
    def wanted_batch_tokens(self) -> int | None:
        """``max_batch_tokens``; ``None``: the device's default."""
        return None if self.max_batch_tokens == "auto" else self.max_batch_tokens

    @property
    def stall_timeout_s(self) -> float:
        """Seconds after which a batch, or an engine process that is silent, counts as stalled."""
        return self.batch_timeout_s * STALL_SHARE

    @property
    def silence_timeout_s(self) -> float:
        """Seconds of silence after which an engine process is disconnected, and killed by its parent."""
        return max(LEAST_SILENCE_S, self.stall_timeout_s)


@frozen(kw_only=True)
class ProcessesConfig:
    """The processes of the server."""

    engine: Annotated[
        Placement | None,
        Setting(
            "Where models compute. local: in the API process. process: in engine processes on this machine. hosts: "
            "only on `--engine-hosts`. ray: in engine processes that Ray places on the nodes of a cluster.",
            default="hosts if --engine-hosts is set; local for texts on CPU by OpenVINO, for static embeddings, on a "
            "single core and under plain hypercorn; else process",
        ),
    ] = field(default=None, validator=optional(in_(get_args(Placement))))
    replicas: Annotated[
        int | str | None,
        Setting(
            "Batches of a model computed at a time: N, or N/gpu. Each has its own engine process, "
            "or, with `--engine local`, its own thread. Engine processes are spread over the GPUs of `--device`; "
            "`2/gpu` is 2 on each. With `--engine ray`, N counts the whole cluster, and a range such as `1..8` follows "
            "the queue.",
            default="1/gpu; on CPU 1 per core, up to 4, or more if a trial is faster; 1 with --engine ray",
        ),
    ] = field(
        default=None,
        validator=optional(matches(REPLICAS, "a number, a range such as 1..8, or a number per GPU such as 2/gpu")),
    )
    gpus_per_replica: Annotated[
        float,
        Setting(
            "GPUs that Ray reserves for each replica with `--engine ray`, from 0 to 1. A fraction lets replicas share "
            "a GPU; 0 computes on CPU."
        ),
    ] = field(default=0.0, validator=within(0, 1))
    api_workers: Annotated[
        int,
        Setting("Number of API processes, which share the listening socket. More than 1 excludes `--engine local`."),
    ] = field(default=1, validator=gt(0))
    plugins: Annotated[
        str,
        Setting(
            "Python modules that API and engine processes import first, separated by commas. They can register kinds "
            "of model, tasks, dialects and routes.",
            default="none",
        ),
    ] = field(default="", validator=matches(r"([\w.]+(,[\w.]+)*)?", "a list of Python modules, separated by commas"))

    @property
    def computes_here(self) -> bool:
        """Whether models compute in the API process; otherwise at the other end of links."""
        return self.engine in ("local", None)

    @property
    def replica_range(self) -> tuple[int, int] | None:
        """The least and the most of ``replicas``; ``None`` if that is not set, or a number per GPU."""
        if self.replicas is None or self.replicas_per_gpu is not None:
            return None
        least, _, most = str(self.replicas).partition("..")
        return int(least), int(most or least)

    @property
    def replicas_per_gpu(self) -> int | None:
        """The number of ``replicas`` on each GPU; ``None`` if they are not counted by GPU."""
        number, per_gpu, _ = str(self.replicas).partition("/gpu")
        return int(number) if per_gpu else None

    def __attrs_post_init__(self) -> None:
        require(
            self.engine != "local" or self.api_workers <= 1,
            "--engine local requires --api-workers 1; with several API workers, use --engine process.",
            ValueError,
        )
        require(
            self.engine != "ray" or self.replicas_per_gpu is None,
            f"--replicas {self.replicas} counts the GPUs of this machine. With --engine ray, give a number or a range, "
            "and set --gpus-per-replica.",
            ValueError,
        )
        require(
            self.engine == "ray" or ".." not in str(self.replicas),
            f"--replicas {self.replicas}: a range requires --engine ray.",
            ValueError,
        )
        least, most = self.replica_range or (1, 1)
        require(least <= most, f"--replicas {self.replicas}: write the smaller number first.", ValueError)


@frozen(kw_only=True)
class HostsConfig:
    """Which engines on other machines are used, and how."""

    engine_hosts: Annotated[
        str,
        Setting(
            "Engines on other machines: `HOST:PORT,HOST:PORT`, or a file with one address per line. `trio-pool-serve "
            "engine` starts an engine. A host name with several addresses stands for an engine at each. Send SIGHUP to "
            "reload the file. Only these engines compute; `--engine process` adds local ones.",
            default="none",
        ),
    ] = ""
    key_file: Annotated[
        Path | None,
        Setting(
            "File with the secret key by which an engine and its servers authenticate each other: at least 32 "
            "characters. If the file contains several lines, the first key is used, and the others are accepted too. "
            "Send SIGHUP to reload the file.",
            default="none",
        ),
    ] = None
    zone: Annotated[
        str,
        Setting(
            "Zone of this process. Inputs go to engines in other zones only after they have waited for 50 ms.",
            default="none",
        ),
    ] = field(default="", validator=matches(ZONE, "a zone: up to 63 letters, digits, `.`, `_` and `-`"))


@frozen(kw_only=True)
class ThreadsConfig:
    """How much blocking work runs concurrently."""

    renderer_num_workers: Annotated[
        int, Setting("Number of threads that render prompts; each has its own tokenizer.")
    ] = field(default=2, validator=gt(0))
