"""``/tokenizer_info`` of vLLM: the tokenizer's settings."""

from typing import Any

from trio_pool_serve.api.http.request import HttpRequest
from trio_pool_serve.api.http.response import HttpResponse
from trio_pool_serve.api.http.route_table import Routes
from trio_pool_serve.service import Service


def tokenizer_info_routes(service: Service) -> Routes:
    """Return the route over a service."""

    async def tokenizer_info(request: HttpRequest) -> HttpResponse:
        with service.models.use(among=request.models) as use:
            model = await service.models.loaded(use.served)
        info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **model.folder.tokenizer_config}
        conversations = model.renderer.conversations
        template = None if conversations is None else conversations.chat.templates.get("default")
        return HttpResponse.json(info if template is None else {**info, "chat_template": template})

    return {("GET", "/tokenizer_info"): tokenizer_info}
