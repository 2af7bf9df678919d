"""Names that are not settings of this server: flags of vLLM and TEI, and settings of earlier versions."""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile

from trio_pool_serve.config.setting import did_you_mean
from trio_pool_serve.errors import require

ALIASES = {
    # TEI
    "model-id": "{}",
    "hostname": "--host={}",
    "tokenization-workers": "--renderer-num-workers={}",
    "max-client-batch-size": "--max-inputs-per-request={}",
    "payload-limit": "--max-body-bytes={}",
    "cors-allow-origin": "--cors-allow-origins={}",
    "json-output": "--log-format=json",
    "auto-truncate": "--long-text=truncate",
    "no-auto-truncate": "--long-text=refuse",
    # vLLM
    "uds": "--host=unix:{}",
    "lora-modules": "--adapter={}",
    "max-num-batched-tokens": "--max-batch-tokens={}",
    "data-parallel-size-local": "--replicas={}",
    "api-server-count": "--api-workers={}",
    "data-parallel-size": "--replicas={}",
    "allowed-local-media-path": "--allowed-media-path={}",
    "shutdown-timeout": "--drain-timeout-s={}",
    "uvicorn-log-level": "--log-level={}",
}
"""Flags with an equivalent of this server; ``{}`` is the value."""

VALUES: Mapping[str, str | None] = {
    # TEI
    "--auto-truncate=true": "--long-text=truncate",
    "--auto-truncate=false": "--long-text=refuse",
    "--json-output=true": "--log-format=json",
    "--json-output=false": "--log-format=text",
    "--pooling=last-token": "--pooling=last",
    # vLLM
    "--convert=auto": None,
    "--convert=embed": "--task=embed",
    "--dtype=float": "--dtype=float32",
    "--dtype=half": "--dtype=float16",
    "--pooling=lasttoken": "--pooling=last",
    "--quantization=fp8": "--dtype=fp8",
    "--runner=auto": None,
    "--runner=pooling": None,
}
"""Values of flags with an equivalent of this server; ``None``: it does that without a flag."""

GONE = {
    "attention": "the default computes without padding on a GPU; --backend torch pads every input.",
    "compile": "use --backend compile.",
    "cpu-backend": "use --backend.",
    "cuda-graphs": "--backend torch computes without CUDA graphs.",
    "step-tag-id": """use --pooler-config '{"step_tag_id": ID}'.""",
    "returned-token-ids": """use --pooler-config '{"returned_token_ids": [ID, ID]}'.""",
    "truncate-by-default": "use --long-text truncate.",
    "accept-any-model": """use --served-model-name 'NAME,*', or aliases = ["*"] in a model's table of --config.""",
    "client-header": "clients are distinguished by X-Forwarded-For of --trusted-proxies.",
    "console": "/console is always served.",
    "max-connections": "an API process accepts up to 4096 connections, or fewer if `ulimit -n` is low.",
    "max-connections-per-address": "limit the connections of one address in a proxy or a firewall.",
    "ssl-keyfile-password": "set the variable TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD.",
    "ssl-cert-reqs": "--ssl-ca-certs makes a client certificate mandatory.",
    "head-timeout-s": "use --client-timeout-s.",
    "body-timeout-s": "use --client-timeout-s.",
    "write-timeout-s": "use --client-timeout-s.",
    "template-timeout-s": "a chat template may take up to 5 seconds.",
    "media-timeout-s": "fetching an image may take up to 10 seconds.",
    "bulk-batch-s": "while small requests arrive, batches of long inputs are limited to about 20 ms.",
    "max-in-flight": "each launch thread has up to two batches in flight.",
    "client-memory-share": "one client may hold half of --memory-budget-bytes.",
    "fairness": "inputs always take turns between clients.",
    "stall-timeout-s": "the timeout is a tenth of --batch-timeout-s.",
    "batch-retry-s": "inputs of a failed batch are computed again for up to 10 seconds.",
    "probe-interval-s": "`/readyz?deep=true` computes a short input.",
    "engine-link": "engine processes of this machine are always connected by Unix sockets.",
    "replicas-per-gpu": "use --replicas N/gpu.",
    "max-engine-restarts": "an engine process that died 10 times in a row is started again every 5 minutes.",
    "link-timeout-s": "a silent link to another machine is lost after 1.5 seconds.",
    "retry-lost": "if an engine is lost, another one computes its inputs.",
    "ray-address": "set Ray's own variable RAY_ADDRESS.",
    "cpus-per-replica": "set OMP_NUM_THREADS to the number of CPUs to reserve for each replica.",
    "scale-up-queue-s": "replicas are added if the queue takes longer than a fifth of --max-queue-s.",
    "scale-down-after-s": "a replica that is not needed for 12 times --max-queue-s is drained.",
    "media-num-workers": "two threads prepare images.",
    "postprocess-num-workers": "one thread encodes responses.",
    "steady-threads": "the Batch API and bulk commands always compute with the same number of threads.",
    "idle-batches": "batches of the Batch API always run at idle priority if the system supports it.",
    "switch-interval-s": "the interval is 0.5 ms.",
    "niceness": "computing threads run at a niceness raised by 10; for another base, start the server under `nice`.",
    "enable-tokenizer-info-endpoint": "/tokenizer_info is always served.",
    "allow-private-media": "list hosts and private networks in --allowed-media-domains, such as *,10.0.0.0/8.",
    "max-media-bytes": "the limit is 20 MiB, or --max-body-bytes if that is more.",
    "max-image-pixels": "the limit is 50 million pixels.",
    "max-images-per-input": "the limit is 16 images.",
    "media-cache-bytes": "the cache of images takes up to an eighth of --memory-budget-bytes.",
    "access-log-rate": "100 requests per second are logged, and the others are counted.",
    "otlp-endpoint": "set OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT.",
    "batch-api": 'an empty --data-dir "" switches the Files and Batch API off.',
    "max-unfinished-batches": "the limit is 100 unfinished batches per API key.",
}
"""Removed settings, with their replacements."""

FOREIGN = {
    # vLLM
    "allowed-origins": "use --cors-allow-origins https://a.example,https://b.example",
    "attention-backend": "torch chooses the kernels; --backend torch pads every input.",
    "compilation-config": "use --backend compile.",
    "convert": "the model's files determine the task; --task overrides them.",
    "device-ids": "use --device cuda:N, or CUDA_VISIBLE_DEVICES.",
    "disable-uvicorn-access-log": "requests are logged only with --access-log.",
    "download-dir": "set the variable HF_HUB_CACHE.",
    "disable-log-requests": "requests are logged only with --access-log.",
    "disable-log-stats": "statistics are not logged; see /metrics.",
    "enable-log-requests": "--access-log logs requests, without their contents.",
    "enforce-eager": "--backend torch computes without CUDA graphs, and compiles nothing.",
    "load-format": "safetensors are loaded, else pytorch_model.bin.",
    "root-path": "paths of routes are fixed; a proxy can rewrite them.",
    "seed": "results do not depend on a random seed.",
    "ssl-ciphers": "the cipher suites cannot be chosen.",
    "swap-space": "no state of a request outlives its forward pass.",
    "tokenizer-mode": "the tokenizer of the model's folder is used.",
    "enable-chunked-prefill": "an input longer than a batch is computed alone.",
    "enable-lora": "use --adapter NAME=FOLDER; no switch is needed.",
    "lora-dtype": "adapters are computed in the model's data type.",
    "max-cpu-loras": "up to 64 adapters of a model stay in memory while they are used.",
    "max-lora-rank": "any rank up to 4096 is accepted.",
    "max-loras": "any number of adapters take turns, one per batch.",
    "enable-prefix-caching": "prefixes are not cached; --result-cache-bytes caches results of whole inputs.",
    "gpu-memory-utilization": "no memory is reserved; --max-batch-tokens limits a batch.",
    "hf-overrides": "change config.json in a copy of the model's folder.",
    "hf-token": "set the variable HF_TOKEN.",
    "io-processor-plugin": "use --plugins; a plugin can register a task.",
    "limit-mm-per-prompt": "the limit is 16 images per input.",
    "max-num-queued-reqs": "use --max-queue-s, the maximum time in the queue.",
    "max-num-queued-tokens": "use --max-queue-s, the maximum time in the queue.",
    "max-num-seqs": "use --max-batch-tokens.",
    "mm-processor-cache-gb": "the cache of images takes up to an eighth of --memory-budget-bytes.",
    "optimization-level": "use --backend compile.",
    "otlp-traces-endpoint": "set OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT.",
    "override-pooler-config": "use --pooler-config.",
    "quantization": "use --dtype fp8 (GPU) or --dtype int8 (CPU).",
    "runner": "the model's files determine the task; --task overrides them.",
    "tensor-parallel-size": "a model must fit on one device; --replicas uses several devices.",
    "tokenizer": "the tokenizer of the model's folder is used.",
    # TEI
    "dense-path": "the model's modules.json lists the dense layers.",
    "hf-api-token": "set the variable HF_TOKEN.",
    "huggingface-hub-cache": "set the variable HF_HUB_CACHE.",
    "max-batch-requests": "use --max-batch-tokens.",
    "max-concurrent-requests": "use --max-queue-s, the maximum time in the queue.",
    "otlp-service-name": "set the variable OTEL_SERVICE_NAME.",
    "prometheus-port": "/metrics is served on the server's own port.",
    "uds-path": "TEI's processes use it internally; --host unix:PATH listens on a Unix socket.",
}
"""Flags of vLLM and TEI without an equivalent, with advice."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with arguments in ``VALUES`` and flags in ``ALIASES`` replaced by this server's.

    Raises ``ValueError``, which names every flag that is not a setting of this server, with its replacement.
    """
    known = [ours for _, ours in meanings(arguments) if ours is not None]
    refuse_unknown(argument[2:].partition("=")[0] for argument in known if argument.startswith("--"))
    _refuse_several_names(known)
    translated: list[str] = []
    rest = deque(known)
    while rest:
        argument = rest.popleft()
        flag, equals, value = argument.partition("=")
        ours = ALIASES.get(_name(flag[2:]), "") if flag.startswith("--") else ""
        if "{}" in ours:
            value = value if equals else rest.popleft() if rest else ""
            require(bool(value and (equals or value[0] != "-")), f"{flag} needs a value.", ValueError)
        elif ours and equals:
            raise ValueError(f"{flag} takes no value but true or false.")
        translated.append(ours.replace("{}", value) or argument)
        while ours == ALIASES["lora-modules"] and rest and re.match("[^-=][^=]*=", rest[0]):  # it takes several values
            translated.append(ours.replace("{}", rest.popleft()))
    return translated


def meanings(arguments: Sequence[str]) -> list[tuple[str, str | None]]:
    """Return each argument with its meaning. A flag is joined by ``=`` with a value in ``VALUES``, true or false."""
    joined: list[str] = []
    for flag, argument in pairwise(("", *arguments)):
        is_bool = flag.startswith("--") and "=" not in flag and argument.lower() in ("true", "false")
        if is_bool or _name(f"{flag}={argument}") in VALUES:
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return [(each, VALUES.get(_name(each), each)) for each in joined]


def notes_of(arguments: Sequence[str]) -> list[str]:
    """Return a line for the log about each argument in ``VALUES``."""
    return [
        f"{written} is accepted: " + (f"here it is {ours}" if ours else "the model's files determine the task")
        for written, ours in meanings(arguments)
        if ours != written
    ]


def _refuse_several_names(arguments: Sequence[str]) -> None:
    """Raise ``ValueError`` for several words after ``--served-model-name``, the last of which may be MODEL."""
    pieces = [piece for argument in arguments for piece in re.split("(?i)(?<=^--served.model.name)=", argument)]
    flags = [*(_name(piece).partition("=")[0] for piece in pieces), "--served-model-name"]  # it is found
    following = pieces[flags.index("--served-model-name") + 1 :]
    words = list(takewhile(lambda word: not word.startswith("-"), following))
    names = words if {"--model", "--model-id"} & {*flags} or not flags[0].startswith("-") else words[:-1]
    require(
        len(names) <= 1, f"Separate the names of --served-model-name by commas: write {','.join(names)}.", ValueError
    )


def refuse_unknown(
    names: Iterable[str], written: Callable[[str], str] | None = None, known: Collection[str] | None = None
) -> None:
    """Raise ``ValueError`` for names that are not settings, with their replacements.

    ``names`` are flags without their dashes. With ``written``, which returns a name as it was written, they are keys or
    variables. Without ``known``, the names of all settings, unknown names are left to the parser of flags.
    """
    reasons = []
    for name in map(_name, names):
        positive, shown = name.removeprefix("no-"), written(name) if written else f"--{name}"
        if positive in GONE:
            reasons.append(f"{shown} was removed: {GONE[positive]}")
        elif positive in FOREIGN:
            reasons.append(f"{shown} is not supported: {FOREIGN[positive]}")
        elif name in ALIASES and written is not None:
            ours = ALIASES[name].removeprefix("--").partition("=")[0] if "=" in ALIASES[name] else "model"
            reasons.append(f"{shown} is not a setting: use {written(ours).rpartition(': ')[2]}.")
        elif known is not None and written is not None and name not in known:
            otherwise = ". docs/settings.md lists all settings."
            end = did_you_mean(name, known, otherwise, lambda each: written(each).rpartition(": ")[2])
            reasons.append(f"{shown} is not a setting{end}")
    require(not reasons, "\n".join(reasons), ValueError)


def _name(written: str) -> str:
    return written.lower().replace("_", "-")
