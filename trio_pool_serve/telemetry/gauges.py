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
    "ready": "engines that are ready",
    "stalled": "engines that are stalled: ready, but nothing comes back from them",
    "queued_rows": "rows that wait to be computed",
    "queued_tokens": "tokens of these rows",
    "in_flight_batches": "batches that are launched and not back",
    "oldest_in_flight_seconds": "age of the oldest of these batches",
    "admitted_tokens": "tokens of requests that are admitted and not computed; estimated before they are tokenised",
    "waiting_seconds": "how long all admitted work will take at the measured rates; 0 before the first batch",
    "batch_token_budget": "most tokens of a batch now: the least of all replicas; 0 until the model is loaded",
}

_LIMITER = {
    "download": "models that are downloaded while the server runs",
    "load": "models that are loaded",
    "render": "tokenising, and bodies that are decoded",
    "media": "images that are decoded",
    "postprocess": "responses that are encoded",
    "launch": "forward passes",
    "ahead": "the forward pass that is computed next, launched while others compute",
    "background": "forward passes of batches of the Batch API, at idle priority",
    "copy": "waits for outputs",
    "files": "files and the database of the Batch API",
}

_WORKERS = {"template": "chat templates of models", "client_template": "chat templates of requests"}

GAUGES: Mapping[str, Meaning] = {
    "model": Meaning(
        "API processes by the state that a model's engine has for them",
        {
            "loading": "no engine is ready",
            "ready": "the model can be computed",
            "stalled": "nothing comes back from its engines",
            "dead": "the engine has stopped, and the process is about to exit",
            "unloaded": "the model is not loaded: the next request for it loads it",
        },
        ("model",),
    ),
    "model_memory_bytes": Meaning(
        "Memory by which the processes that compute a model have grown while they loaded it; 0 while it is not loaded",
        {"resident": "resident memory, mapped files included", "device": "tensors in the memory of GPUs"},
        ("model",),
    ),
    "engine": Meaning("Load of a model's engines", _ENGINE, ("model",)),
    "replica": Meaning(
        "Load of each engine process",
        {"failed": "1 if the replica has failed", "restarts": "how often its process was started again", **_ENGINE},
        ("model", "replica", "device"),
    ),
    "link": Meaning(
        "Links to engines on other machines, the sum of those of all API processes",
        {
            "connected": "API processes that are connected to the engine",
            "waiting_rows": "rows that were sent and have not come back",
            "waiting_tokens": "tokens of these rows",
            "losses": "connections that were lost",
        },
        ("address",),
    ),
    "api_processes": Meaning(
        "API processes of other machines, for `trio-pool-serve engine`",
        {"connected": "connected now", "refused": "connections refused: without the key, or with another version"},
    ),
    "process": Meaning(
        "The processes that serve and compute, without those that render chat templates",
        {
            "count": "how many there are",
            "resident_bytes": "their resident memory; what they share counts for each",
            "start_time_seconds": "when the first of them was started, in seconds since the epoch",
        },
    ),
    "log_lines": Meaning("Lines of the log", {"dropped": "not written: stderr was not read, or its disk was full"}),
    "tasks": Meaning("Trio tasks", {"living": "those that have not ended"}),
    "connections": Meaning("Connections of clients", {"open": "those that are open", "limit": "how many may be"}),
    "request_memory_bytes": Meaning("Bytes that requests hold", {"all": "bodies, images, token vectors"}),
    "request_memory_limit_bytes": Meaning("Bytes that requests may hold", {"all": "`--memory-budget-bytes`"}),
    "limiter_capacity": Meaning("Threads that a kind of work may use", _LIMITER),
    "limiter_borrowed": Meaning("Threads that a kind of work uses", _LIMITER),
    "limiter_waiting": Meaning("Tasks that wait for a thread", _LIMITER),
    "worker_capacity": Meaning("Worker processes that a kind of work may use", _WORKERS),
    "worker_borrowed": Meaning("Worker processes that a kind of work uses", _WORKERS),
    "worker_waiting": Meaning("Tasks that wait for a worker process", _WORKERS),
    "worker_killed": Meaning("Worker processes killed for taking too long, since the start", _WORKERS),
    "media_cache": Meaning(
        "Cache of prepared images",
        {
            "entries": "images that it has",
            "bytes": "their memory",
            "hits": "images that were there, or being prepared, since the start",
            "misses": "images that were not, since the start",
            "in_flight": "images that are being prepared",
        },
    ),
    "result_cache": Meaning(
        "Cache of results, `--result-cache-bytes`",
        {
            "entries": "inputs whose outputs it has",
            "bytes": "their memory, counted with what Python takes for each",
            "hits": "inputs that were there, since the start",
            "misses": "inputs that were looked up and not there, since the start",
            "evictions": "inputs that were dropped for others, since the start",
        },
    ),
    "media_fetches": Meaning(
        "Images that are fetched over HTTP",
        {"capacity": "how many may be at a time", "borrowed": "how many are", "waiting": "how many wait for it"},
    ),
    "batches": Meaning(
        "Batches of the Batch API",
        {
            "unfinished": "those that have not ended",
            "waiting": "those that wait for their turn",
            "computing": "1 while one is computed",
            "lines": "lines that were computed, since the start",
        },
    ),
}
