"""OpenAI's Batch API: ``/v1/batches``."""

import re
from functools import partial
from hashlib import sha256
from typing import Annotated

import msgspec

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.api.routes.stored_files import ExpiresAfter, id_in, list_page, stored_route
from trio_pool_serve.errors import require_request
from trio_pool_serve.runs.batch_api.batch_store import Page
from trio_pool_serve.runs.batch_api.open_batches import FILE_PREFIX, OpenBatches
from trio_pool_serve.runs.batch_api.stored_records import StoredBatch, new_id
from trio_pool_serve.service import Service

BATCHES_PATH = "/v1/batches"

COMPLETION_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")

SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}

MAX_WINDOW_S = 30 * 24 * 3600

MAX_BODY_BYTES = 1024 * 1024

MAX_METADATA = 16

MAX_IDEMPOTENCY_KEY = 255

Key = Annotated[str, msgspec.Meta(max_length=64)]
Value = Annotated[str, msgspec.Meta(max_length=512)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class BatchRequest(msgspec.Struct, frozen=True):
    """The body of a request for a new batch."""

    input_file_id: Name
    endpoint: Name
    completion_window: Name
    metadata: Annotated[dict[Key, Value], msgspec.Meta(max_length=MAX_METADATA)] | None = None
    output_expires_after: ExpiresAfter | None = None

    @property
    def window_s(self) -> int:
        """The completion window in seconds. Raises ``InvalidRequestError``."""
        found = COMPLETION_WINDOW.fullmatch(self.completion_window)
        seconds = int(found[1]) * SECONDS[found[2]] if found else 0
        require_request(
            0 < seconds <= MAX_WINDOW_S,
            "must be minutes, hours or days, such as 24h, up to 30d.",
            at="completion_window",
        )
        return seconds


class BatchesQuery(msgspec.Struct, frozen=True):
    """The query parameters of a list of batches."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    after: str | None = None


def batch_object(batch: StoredBatch) -> dict[str, object]:
    """Return a batch as OpenAI describes it."""
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    position = batch.position
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": list(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.times.get("created_at", 0),
        "expires_at": batch.expires_at,
        **{f"{name}_at": batch.times.get(f"{name}_at") for name in times},
        "request_counts": {"total": batch.total, "completed": position.completed, "failed": position.failed},
        "usage": {
            "input_tokens": position.tokens,
            "total_tokens": position.tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
        },
        "metadata": batch.metadata,
    }


def batch_routes(service: Service) -> Routes:
    """Return the routes of batches over a service."""

    async def create(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        wire = await request.json(BatchRequest, MAX_BODY_BYTES, service.config.time_limits.client_timeout_s)
        window_s = wire.window_s
        idempotency_key = request.header(b"idempotency-key") or None
        require_request(
            idempotency_key is None or len(idempotency_key) <= MAX_IDEMPOTENCY_KEY,
            f"Idempotency-Key exceeds {MAX_IDEMPOTENCY_KEY} characters.",
        )
        paths = batches.runner.routes().paths
        require_request(
            wire.endpoint in paths,
            f"The endpoint {wire.endpoint} is none of {', '.join(sorted(paths))}.",
            param="endpoint",
        )
        expires_after = wire.output_expires_after
        now = int(batches.store.clock())
        batch = StoredBatch(
            id=new_id("batch_"),
            owner=request.owner,
            endpoint=wire.endpoint,
            input_file_id=wire.input_file_id,
            completion_window=wire.completion_window,
            times={"created_at": now},
            expires_at=now + window_s,
            output_id=new_id(FILE_PREFIX),
            error_id=new_id(FILE_PREFIX),
            metadata=wire.metadata,
            models=request.models,
            results_expire_s=None if expires_after is None else expires_after.checked(),
        )
        digest = sha256(msgspec.json.encode(wire, order="deterministic")).digest()
        batch = await batches.add_batch(batch, idempotency_key=idempotency_key, request=digest)
        return HttpResponse.json(batch_object(batch))

    async def batches_of(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        query = request.query(BatchesQuery)
        found, has_more = await batches.store.batches(request.owner, Page(query.limit, query.after))
        return list_page(list(map(batch_object, found)), has_more=has_more)

    async def batch(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        return HttpResponse.json(batch_object(await batches.store.batch(request.owner, id_in(request, BATCHES_PATH))))

    async def cancel(request: HttpRequest, batches: OpenBatches) -> HttpResponse:
        batch_id = id_in(request, BATCHES_PATH, "/cancel")
        return HttpResponse.json(batch_object(await batches.runner.cancel(request.owner, batch_id)))

    stored = partial(stored_route, service)
    return {
        ("POST", BATCHES_PATH): stored(create),
        ("GET", BATCHES_PATH): stored(batches_of),
        ("GET", f"{BATCHES_PATH}/{{name}}"): stored(batch),
        ("POST", f"{BATCHES_PATH}/{{name}}/cancel"): stored(cancel),
    }
