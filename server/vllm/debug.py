"""Routes for those who run the server, served only with --enable-debug-routes.

In: a few query parameters. Out: how the KV cache stands, a profile; or the engine paused, put to sleep, its prefix
cache emptied, in vLLM's words.
"""

import tempfile
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxpage.errors import RequestError
from jaxpage.server.errors import ApiError
from jaxpage.server.service import service_of

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

MAX_PROFILE_SECONDS = 60
"""Longest profile: a trace of a busy engine grows by megabytes a second."""
VLLM_RESET_OPTIONS = ("reset_running_requests", "reset_external")
"""Query parameters of vLLM's /reset_prefix_cache that ask for more than jaxpage does."""


def _engine(request: Request) -> "AsyncEngine":
    """The engine, if it serves. Raises a 503 otherwise."""
    service = service_of(request)
    service.check_available()
    return service.engine


async def kv_cache(request: Request) -> Response:
    """GET /debug/kv_cache: pool, KV groups, and the block tables of all running requests."""
    return JSONResponse(await _engine(request).kv_cache_snapshot())


async def reset_prefix_cache(request: Request) -> Response:
    """POST /reset_prefix_cache: an empty 200 when all prefixes are forgotten, as from vLLM.

    A 409 when running requests hold blocks and nothing was forgotten, which vLLM answers with the same 200: a client
    that resets after new weights, say, must not take the one for the other.
    """
    engine = _engine(request)
    for name in VLLM_RESET_OPTIONS:
        if (value := request.query_params.get(name, "false")).lower() not in ("false", "0"):
            raise RequestError(f"{name} is {value!r}, and this server does not support it: leave it out", name)
    if not await engine.reset_prefix_cache():
        raise ApiError(
            409, "running requests hold KV blocks: try again when none is running", code="prefix_cache_in_use"
        )
    return Response()


async def pause(request: Request) -> Response:
    """POST /pause?mode=abort|wait|keep: stop generating; requests that come meanwhile wait for /resume."""
    await _engine(request).pause(request.query_params.get("mode", "abort"))
    return JSONResponse({"status": "paused"})


async def resume(request: Request) -> Response:
    """POST /resume: go on after /pause."""
    await _engine(request).resume()
    return JSONResponse({"status": "resumed"})


async def is_paused(request: Request) -> Response:
    """GET /is_paused."""
    return JSONResponse({"is_paused": await _engine(request).is_paused()})


async def sleep(request: Request) -> Response:
    """POST /sleep?level=0|1: free the KV cache; on level 1, as by default, move the weights to host memory, too."""
    engine = _engine(request)
    if (level := request.query_params.get("level", "1")) not in ("0", "1"):
        raise RequestError(f"level is {level!r}: it must be 0 (keep the weights) or 1 (move them to the host)", "level")
    await engine.sleep(offload_weights=level == "1")
    return Response()


async def wake_up(request: Request) -> Response:
    """POST /wake_up: take the device's memory again, and go on."""
    await _engine(request).wake_up()
    return Response()


async def is_sleeping(request: Request) -> Response:
    """GET /is_sleeping."""
    return JSONResponse({"is_sleeping": await _engine(request).is_sleeping()})


async def profile(request: Request) -> Response:
    """POST /debug/profile?seconds=S: trace the engine, and say in which new folder of the server the trace is."""
    engine = _engine(request)
    given = request.query_params.get("seconds", "2")
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_PROFILE_SECONDS:
        raise RequestError(f"seconds is {given!r}: it must be a number in (0, {MAX_PROFILE_SECONDS}]", "seconds")
    folder = tempfile.mkdtemp(prefix="jaxpage-profile-")
    await engine.profile(seconds, folder)
    return JSONResponse({"folder": folder})
