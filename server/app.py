"""The ASGI application: routes, health, and every error in OpenAI's shape.

In: an engine, loading or ready. Out: a Starlette application; it neither starts nor stops the engine.
"""

import importlib.metadata
import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jaxpage.errors import EngineDeadError, RequestError
from jaxpage.metrics import CONTENT_TYPE
from jaxpage.server.chat import chat_completions
from jaxpage.server.completions import completions
from jaxpage.server.debug import DEBUG_ROUTES
from jaxpage.server.dialect import ChatOptions
from jaxpage.server.errors import ApiError, error_response
from jaxpage.server.page import page_routes
from jaxpage.server.service import Service, service_of

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499
"""Status, never seen by anyone, of a response to a client that has left."""


def build_app(
    engine: "AsyncEngine",
    model_name: str,
    *,
    enable_debug_routes: bool = False,
    vllm_metric_names: bool = False,
    web_page: bool = True,
    chat_options: ChatOptions | None = None,
) -> Starlette:
    """The application that serves `engine` under the id `model_name`; its `state.service` holds the open requests."""
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{model_id:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/version", version),
            Route("/metrics", metrics),
            *(DEBUG_ROUTES if enable_debug_routes else ()),
            *(page_routes() if web_page else ()),
        ],
        exception_handlers={
            ApiError: _answer_error,
            RequestError: _answer_error,
            EngineDeadError: _answer_error,
            HTTPException: _answer_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_fault,
        },
    )
    app.state.service = Service(engine, model_name, chat_options=chat_options or ChatOptions())
    app.state.created = int(time.time())
    app.state.vllm_metric_names = vllm_metric_names
    return app


async def models(request: Request) -> Response:
    """GET /v1/models: the one model, once it can be asked."""
    service_of(request).check_available()
    return JSONResponse({"object": "list", "data": [_model_card(request)]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; the id may hold slashes, as a path does."""
    service = service_of(request)
    service.check_available()
    service.check_model(request.path_params["model_id"])
    return JSONResponse(_model_card(request))


async def health(request: Request) -> Response:
    """GET /health and /ping: 200 if and only if a request would be served now."""
    service_of(request).check_available()
    return JSONResponse({"status": "ok"})


async def version(request: Request) -> Response:
    """GET /version: jaxpage's."""
    return JSONResponse({"version": importlib.metadata.version("jaxpage")})


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus' text format; answered whatever state the engine is in."""
    text = service_of(request).engine.metrics.render(vllm_names=request.app.state.vllm_metric_names)
    return Response(text, media_type=CONTENT_TYPE)


def _model_card(request: Request) -> dict[str, object]:
    service = service_of(request)
    return {
        "id": service.model_name,
        "object": "model",
        "created": request.app.state.created,
        "owned_by": "jaxpage",
        "max_model_len": service.engine.max_model_len,
    }


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Starlette raises `error` again behind this answer: uvicorn logs the traceback and drops the connection."""
    response = error_response(error)
    response.headers["Connection"] = "close"  # so that no client sends its next request into the dropped one
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
