"""The gauges of ``/metrics`` and their meanings; ``docs/metrics.md`` is generated from them."""

from collections.abc import Mapping

from attrs import frozen

Gauges = Mapping[str, Mapping[str, float]]
"""Metric name → label value → value; the label is called ``of``."""


@frozen
class Meaning:
    """The text of one gauge in ``/metrics``, the meanings of its label ``of``, and its other labels."""

    text: str
    of: Mapping[str, str]
    labels: tuple[str, ...] = ()


_ENGINE = {
    "ready": "ready engines",
    "stalled": "stalled engines: ready, but returning no outputs",
    "queued_rows": "rows waiting to be computed",
    "queued_tokens": "tokens of these rows",
    "in_flight_batches": "batches launched and not finished",
    "oldest_in_flight_seconds": "age of the oldest batch in flight",
    "admitted_tokens": "tokens of admitted requests that are not computed yet; estimated before tokenisation",
    "waiting_seconds": "time that all admitted work will take at the measured rates; 0 before the first batch",
    "batch_token_budget": "present limit of tokens per batch, the lowest of all replicas; 0 until the model is loaded",
}

_LIMITER = {
    "download": "downloading models while the server runs",
    "load": "loading models",
    "compile": "compiling models",
    "render": "tokenising, and decoding bodies",
    "media": "decoding images",
    "cluster": "token pooling",
    "postprocess": "encoding responses",
    "launch": "forward passes",
    "ahead": "the next forward pass, launched while others compute",
    "background": "forward passes for the Batch API, at idle priority",
    "copy": "waiting for outputs",
    "files": "files and the database of the Batch API",
}

_WORKERS = {"template": "chat templates of models", "client_template": "chat templates of requests"}

GAUGES: Mapping[str, Meaning] = {
    "model": Meaning(
        "API processes by the state of a model's engine as they see it",
        {
            "loading": "no engine is ready",
            "ready": "the model can be computed",
            "stalled": "its engines return no outputs",
            "dead": "the engine has stopped, and the process will exit",
            "unloaded": "the next request for the model loads it",
        },
        ("model",),
    ),
    "model_memory_bytes": Meaning(
        "Growth of the processes that compute a model during its loading; 0 while it is not loaded",
        {"resident": "resident memory, including mapped files", "device": "tensors in GPU memory"},
        ("model",),
    ),
    "engine": Meaning("Load of a model's engines", _ENGINE, ("model",)),
    "replica": Meaning(
        "Load of each engine process",
        {"failed": "1 if the replica has failed", "restarts": "restarts of its process", **_ENGINE},
        ("model", "replica", "device"),
    ),
    "link": Meaning(
        "Links to engines on other machines, summed over all API processes",
        {
            "connected": "API processes connected to the engine",
            "waiting_rows": "rows sent and not yet returned",
            "waiting_tokens": "tokens of these rows",
            "losses": "lost connections",
        },
        ("address",),
    ),
    "api_processes": Meaning(
        "API processes of other machines, for `trio-pool-serve engine`",
        {"connected": "connected now", "refused": "refused connections: without the key, or of another version"},
    ),
    "process": Meaning(
        "The processes that serve and compute, without the template processes",
        {
            "count": "number of processes",
            "resident_bytes": "their resident memory; shared memory counts for each",
            "start_time_seconds": "start of the first of them, in seconds since the epoch",
        },
    ),
    "log_lines": Meaning(
        "Lines of the log", {"dropped": "lines not written: nothing read stderr, or its disk was full"}
    ),
    "tasks": Meaning("Trio tasks", {"living": "tasks that have not ended"}),
    "connections": Meaning(
        "Connections of clients, and further HTTP/2 requests of each",
        {"open": "open connections", "limit": "their limit"},
    ),
    "request_memory_bytes": Meaning("Bytes that requests hold", {"all": "bodies, images, token vectors"}),
    "request_memory_limit_bytes": Meaning("Bytes that requests may hold", {"all": "`--memory-budget-bytes`"}),
    "limiter_capacity": Meaning("Threads that a kind of work may use", _LIMITER),
    "limiter_borrowed": Meaning("Threads that a kind of work uses", _LIMITER),
    "limiter_waiting": Meaning("Tasks that wait for a thread", _LIMITER),
    "worker_capacity": Meaning("Worker processes that a kind of work may use", _WORKERS),
    "worker_borrowed": Meaning("Worker processes that a kind of work uses", _WORKERS),
    "worker_waiting": Meaning("Tasks that wait for a worker process", _WORKERS),
    "worker_killed": Meaning("Worker processes killed for exceeding their time limit, since the start", _WORKERS),
    "media_cache": Meaning(
        "Cache of prepared images",
        {
            "entries": "cached images",
            "bytes": "their memory",
            "hits": "lookups of images that were cached or being prepared, since the start",
            "misses": "lookups of other images, since the start",
            "in_flight": "images being prepared",
        },
    ),
    "result_cache": Meaning(
        "Cache of results, `--result-cache-bytes`",
        {
            "entries": "inputs with cached outputs",
            "bytes": "their memory, including Python's objects",
            "hits": "hits, since the start",
            "misses": "misses, since the start",
            "evictions": "evicted inputs, since the start",
        },
    ),
    "media_fetches": Meaning(
        "Images fetched over HTTP",
        {"capacity": "limit of concurrent fetches", "borrowed": "running fetches", "waiting": "waiting fetches"},
    ),
    "batches": Meaning(
        "Jobs of the Batch API",
        {
            "unfinished": "jobs that have not ended",
            "waiting": "jobs waiting for their turn",
            "computing": "1 while a job is computed",
            "lines": "lines computed, since the start",
        },
    ),
}
