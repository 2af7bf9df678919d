"""Names that are not settings of this server: flags of vLLM and TEI, and settings of earlier versions."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence

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

GONE = {
    "attention": "--backend torch pads every input; the default does not, on a GPU.",
    "compile": "use --backend compile.",
    "cpu-backend": "use --backend.",
    "cuda-graphs": "--backend torch computes without CUDA graphs.",
    "step-tag-id": """use --pooler-config '{"step_tag_id": ID}'.""",
    "returned-token-ids": """use --pooler-config '{"returned_token_ids": [ID, ID]}'.""",
    "truncate-by-default": "use --long-text truncate.",
    "accept-any-model": """use --served-model-name 'NAME,*', or aliases = ["*"] in a model's table of --config.""",
    "client-header": "the header X-Forwarded-For is read from --trusted-proxies.",
    "console": "/console is always served.",
    "max-connections": "an API process has up to 4096 connections, fewer if it may open few files (ulimit -n).",
    "max-connections-per-address": "limit the connections of one address in a proxy or a firewall.",
    "ssl-keyfile-password": "set the variable TRIO_POOL_SERVE_SSL_KEYFILE_PASSWORD.",
    "ssl-cert-reqs": "clients need a certificate if --ssl-ca-certs is set.",
    "head-timeout-s": "use --client-timeout-s.",
    "body-timeout-s": "use --client-timeout-s.",
    "write-timeout-s": "use --client-timeout-s.",
    "template-timeout-s": "a chat template may take 5 seconds.",
    "media-timeout-s": "fetching an image may take 10 seconds.",
    "bulk-batch-s": "batches of long inputs take about 20 ms while small requests arrive.",
    "max-in-flight": "each launching thread has up to two batches in flight.",
    "client-memory-share": "one client may have half of --memory-budget-bytes.",
    "fairness": "inputs always take turns between clients.",
    "stall-timeout-s": "it is a tenth of --batch-timeout-s.",
    "batch-retry-s": "inputs of a failed batch are computed again for up to 10 seconds.",
    "probe-interval-s": "ask /readyz?deep=true to have a short input computed.",
    "engine-link": "engine processes of this machine are always connected by Unix sockets.",
    "replicas-per-gpu": "use --replicas N/gpu.",
    "max-engine-restarts": "an engine process that died 10 times in a row is started again every 5 minutes.",
    "link-timeout-s": "a silent link to another machine is lost after 1.5 seconds.",
    "retry-lost": "inputs are computed by another engine if theirs is lost.",
    "ray-address": "set Ray's own variable RAY_ADDRESS.",
    "cpus-per-replica": "set OMP_NUM_THREADS, the number of CPUs that are reserved for each replica.",
    "scale-up-queue-s": "replicas are added if the queue takes longer than a fifth of --max-queue-s.",
    "scale-down-after-s": "a replica that was not needed for 12 times --max-queue-s is drained.",
    "media-num-workers": "two threads prepare images.",
    "postprocess-num-workers": "one thread encodes responses.",
    "steady-threads": "batches of the Batch API and of bulk commands always have the same number of threads.",
    "idle-batches": "batches of the Batch API always have idle priority where the system offers it.",
    "switch-interval-s": "the interval is 0.5 ms.",
    "niceness": "threads that compute have a lower priority by 10; start the server under `nice` for another base.",
    "enable-tokenizer-info-endpoint": "/tokenizer_info is always served.",
    "allow-private-media": "list hosts and private networks in --allowed-media-domains, such as *,10.0.0.0/8.",
    "max-media-bytes": "an image may have 20 MiB, or --max-body-bytes if that is more.",
    "max-image-pixels": "an image may have 50 million pixels.",
    "max-images-per-input": "an input may have 16 images.",
    "media-cache-bytes": "the cache of images takes up to an eighth of --memory-budget-bytes.",
    "access-log-rate": "100 requests a second are logged, the others are counted.",
    "otlp-endpoint": "set OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT.",
    "batch-api": 'an empty --data-dir "" switches the Files and Batch API off.',
    "max-unfinished-batches": "an API key may have 100 unfinished batches.",
}
"""Settings of earlier versions, with their replacements."""

FOREIGN = {
    # vLLM
    "allowed-origins": "use --cors-allow-origins https://a.example,https://b.example",
    "attention-backend": "kernels are chosen by torch; --backend torch pads every input.",
    "compilation-config": "use --backend compile.",
    "convert": "the model's files say what it is; --task overrides them.",
    "device-ids": "use --device cuda:N, or CUDA_VISIBLE_DEVICES.",
    "disable-uvicorn-access-log": "requests are logged only with --access-log.",
    "download-dir": "set the variable HF_HUB_CACHE.",
    "disable-log-requests": "requests are logged only with --access-log.",
    "disable-log-stats": "statistics are not logged; see /metrics.",
    "enable-log-requests": "requests are logged with --access-log, never with their contents.",
    "enforce-eager": "nothing is compiled by default; --backend torch computes without CUDA graphs.",
    "load-format": "safetensors are loaded, or else pytorch_model.bin.",
    "root-path": "routes have fixed paths; a proxy can rename them.",
    "seed": "nothing is random.",
    "ssl-ciphers": "the cipher suites cannot be chosen.",
    "swap-space": "nothing is kept of a request after its forward pass.",
    "tokenizer-mode": "the tokenizer is the one in the model's folder.",
    "enable-chunked-prefill": "long inputs are batches by themselves.",
    "enable-lora": "adapters need no switch: use --adapter NAME=FOLDER.",
    "lora-dtype": "adapters are computed in the model's data type.",
    "max-cpu-loras": "adapters are kept in memory while they are used, up to 64 of a model.",
    "max-lora-rank": "adapters may have any rank up to 4096.",
    "max-loras": "a batch has one adapter, and any number takes turns.",
    "enable-prefix-caching": "each input is computed by itself; --result-cache-bytes keeps results.",
    "gpu-memory-utilization": "no memory is reserved; --max-batch-tokens bounds a batch.",
    "hf-overrides": "change config.json in a copy of the folder.",
    "hf-token": "set the variable HF_TOKEN.",
    "io-processor-plugin": "use --plugins; a plugin registers a task.",
    "limit-mm-per-prompt": "an input may have 16 images.",
    "max-num-queued-reqs": "use --max-queue-s, the time that a request may wait.",
    "max-num-queued-tokens": "use --max-queue-s, the time that a request may wait.",
    "max-num-seqs": "use --max-batch-tokens.",
    "mm-processor-cache-gb": "the cache of images takes up to an eighth of --memory-budget-bytes.",
    "optimization-level": "use --backend compile.",
    "otlp-traces-endpoint": "set OpenTelemetry's own variable OTEL_EXPORTER_OTLP_ENDPOINT.",
    "override-pooler-config": "use --pooler-config.",
    "quantization": "use --dtype int8 (CPU).",
    "runner": "the model's files say what it is; --task overrides them.",
    "tensor-parallel-size": "a model must fit on one device; --replicas uses several.",
    "tokenizer": "the tokenizer is the one in the model's folder.",
    # TEI
    "dense-path": "dense layers are those that the model's modules.json names.",
    "hf-api-token": "set the variable HF_TOKEN.",
    "huggingface-hub-cache": "set the variable HF_HUB_CACHE.",
    "max-batch-requests": "use --max-batch-tokens.",
    "max-concurrent-requests": "use --max-queue-s, the time that a request may wait.",
    "otlp-service-name": "set the variable OTEL_SERVICE_NAME.",
    "prometheus-port": "/metrics is on the server's own port.",
    "uds-path": "it is for TEI's own processes; --host unix:PATH listens on a Unix socket.",
}
"""Flags of vLLM and TEI without an equivalent, with what to do instead."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the flags in ``ALIASES`` replaced by this server's.

    Raises ``ValueError``, which names every flag that is not a setting of this server, with its replacement.
    """
    refuse_unknown(argument[2:].partition("=")[0] for argument in arguments if argument.startswith("--"))
    translated: list[str] = []
    rest = deque(arguments)
    while rest:
        argument = rest.popleft()
        flag, equals, value = argument.partition("=")
        ours = ALIASES.get(_name(flag[2:]), "") if flag.startswith("--") else ""
        if "{}" in ours:
            value = value if equals else rest.popleft() if rest else ""
            if not value or (not equals and value.startswith("-")):
                raise ValueError(f"{flag} needs a value.")
        elif ours and equals:
            raise ValueError(f"{flag} takes no value.")
        translated.append(ours.replace("{}", value) or argument)
        while ours == ALIASES["lora-modules"] and rest and re.match("[^-=][^=]*=", rest[0]):  # it takes several values
            translated.append(ours.replace("{}", rest.popleft()))
    return translated


def refuse_unknown(names: Iterable[str], written: Callable[[str], str] | None = None) -> None:
    """Raise ``ValueError`` for names that are not settings, with what to use instead.

    ``names`` are flags without their dashes. With ``written``, which returns a name as it was written, they are keys or
    variables.
    """
    reasons = []
    for name in map(_name, names):
        positive, shown = name.removeprefix("no-"), written(name) if written else f"--{name}"
        if positive in GONE:
            reasons.append(f"{shown} is gone: {GONE[positive]}")
        elif positive in FOREIGN:
            reasons.append(f"{shown} is not offered: {FOREIGN[positive]}")
        elif name in ALIASES and written is not None:
            ours = ALIASES[name].removeprefix("--").partition("=")[0] if "=" in ALIASES[name] else "model"
            reasons.append(f"{shown} is not a setting: use {written(ours).rpartition(': ')[2]}.")
    if reasons:
        raise ValueError("\n".join(reasons))


def _name(written: str) -> str:
    return written.lower().replace("_", "-")
