"""Who may ask."""

import hmac

from trio_pool_serve.api.http.exchange import Exchange
from trio_pool_serve.api.routes.probes import LIVENESS_PATHS, READINESS_PATH
from trio_pool_serve.errors import AuthenticationError

OPEN_PATHS = frozenset({*LIVENESS_PATHS, READINESS_PATH})
"""What probes ask: they carry no key, and the answers say nothing but yes or no."""


def require_api_key(exchange: Exchange, api_key: str) -> None:
    """Raise ``AuthenticationError`` unless the request carries the key, on every route but the probes'."""
    if exchange.path in OPEN_PATHS:
        return
    given = exchange.header(b"authorization") or ""
    scheme, _, key = given.partition(" ")
    # Some clients send the key without a scheme.
    given = key.strip() if scheme.lower() == "bearer" else given
    if not hmac.compare_digest(given.encode(), api_key.encode()):
        raise AuthenticationError("The API key is missing or wrong.")
