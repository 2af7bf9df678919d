"""Which exceptions of a handler are answered, and which end the connection's task."""

import pytest
import trio

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.app import create_app
from trio_pool_serve.errors import InvalidRequestError

WRONG = InvalidRequestError("wrong")


async def respond(config, *raised: BaseException) -> HttpResponse:
    """Return the response to a handler in whose nursery several tasks raise; alone, an exception is raised itself."""

    async def handler(request: HttpRequest) -> HttpResponse:
        del request
        if len(raised) == 1:
            raise raised[0]
        raise BaseExceptionGroup("of a nursery", raised)

    middleware = create_app(config).middleware
    return await middleware.respond(HttpRequest({"headers": []}, "/v1/embeddings", 2**20), handler)


@pytest.mark.parametrize("raised", [(WRONG,), (WRONG, WRONG), (WRONG, ExceptionGroup("inner", [WRONG]))])
async def test_an_error_is_answered_alone_and_in_a_group(config, raised):
    assert (await respond(config, *raised)).status == 400


async def test_an_error_beside_a_cancellation_is_answered(config):
    with trio.CancelScope() as scope:
        scope.cancel(reason="the client leaves")
        try:
            await trio.lowlevel.checkpoint()
        except trio.Cancelled as cancelled:
            response = await respond(config, WRONG, cancelled)
            raise
    assert response.status == 400


@pytest.mark.parametrize("raised", [(KeyboardInterrupt(),), (WRONG, KeyboardInterrupt()), (SystemExit(3), WRONG)])
async def test_what_ends_a_process_is_never_answered(config, raised):
    with pytest.raises((KeyboardInterrupt, SystemExit, BaseExceptionGroup)):
        await respond(config, *raised)
