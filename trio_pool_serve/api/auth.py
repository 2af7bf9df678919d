"""Who may ask."""

import hmac

from quart import Quart, request

from trio_pool_serve.api.operations import LIVENESS_PATHS, READINESS_PATH
from trio_pool_serve.errors import AuthenticationError

OPEN_PATHS = frozenset({*LIVENESS_PATHS, READINESS_PATH})
"""What probes ask: they carry no key, and the answers say nothing but yes or no."""


def require_api_key(app: Quart, api_key: str) -> None:
    """Have every route but the probes' ask for the key, unknown routes included."""
    expected = api_key.encode()

    @app.before_request
    async def check_api_key() -> None:
        if request.path in OPEN_PATHS:
            return
        given = request.headers.get("Authorization", "")
        scheme, _, key = given.partition(" ")
        # Some clients send the key without a scheme.
        given = key.strip() if scheme.lower() == "bearer" else given
        if not hmac.compare_digest(given.encode(), expected):
            raise AuthenticationError("The API key is missing or wrong.")
