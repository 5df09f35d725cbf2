"""Routes for those who run the server, served only with --enable-debug-routes.

In: nothing. Out: how the KV cache stands; or the prefix cache emptied, in vLLM's words.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxpage.errors import RequestError
from jaxpage.server.errors import ApiError
from jaxpage.server.service import service_of

VLLM_RESET_OPTIONS = ("reset_running_requests", "reset_external")
"""Query parameters of vLLM's /reset_prefix_cache that ask for more than jaxpage does."""


async def kv_cache(request: Request) -> Response:
    """GET /debug/kv_cache: pool, KV groups, and the block tables of all running requests."""
    service = service_of(request)
    service.check_available()
    return JSONResponse(await service.engine.kv_cache_snapshot())


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache: an empty 200 when all prefixes are forgotten, as from vLLM.

    A 409 when running requests hold blocks and nothing was forgotten, which vLLM answers with the same 200: a client
    that resets after new weights, say, must not take the one for the other.
    """
    service = service_of(request)
    service.check_available()
    for name in VLLM_RESET_OPTIONS:
        if (value := request.query_params.get(name, "false")).lower() not in ("false", "0"):
            raise RequestError(f"{name} is {value!r}, and this server does not support it: leave it out", name)
    if not await service.engine.reset_prefix_cache():
        raise ApiError(
            409, "running requests hold KV blocks: try again when none is running", code="prefix_cache_in_use"
        )
    return Response()


DEBUG_ROUTES = (
    Route("/debug/kv_cache", kv_cache),
    Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
)
