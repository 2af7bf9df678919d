"""The query string of a request."""

from typing import TypeVar
from urllib.parse import parse_qsl

import msgspec

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.errors import InvalidRequestError

Query = TypeVar("Query")

MAX_FIELDS = 32


def decode_query(request: HttpRequest, kind: type[Query]) -> Query:
    """Return the fields of the query string; unknown ones are ignored. Raises ``InvalidRequestError``."""
    try:
        fields = dict(parse_qsl(request.scope["query_string"].decode("latin1"), max_num_fields=MAX_FIELDS))
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidRequestError(f"The query is not understood: {error}.") from error
