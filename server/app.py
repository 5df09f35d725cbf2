"""The ASGI application: the table of routes behind what every request passes, and every error in its protocol's shape.

In: an engine, loading or ready. Out: a Starlette application; it neither starts nor stops the engine.
"""

import time
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxpage.errors import EngineDeadError, RequestError
from jaxpage.server.auth import ApiKeys
from jaxpage.server.errors import ApiError, error_response
from jaxpage.server.request_log import REQUEST_ID_HEADER, RequestLog, record_of
from jaxpage.server.routes import ServedRoute, anthropic_paths, as_starlette, open_paths, routes_of, unlogged_paths
from jaxpage.server.service import Service
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499
"""Status, never seen by anyone, of a response to a client that has left."""


def build_app(engine: "AsyncEngine", config: ServerConfig) -> Starlette:
    """The application that serves `engine` as `config` says; its `state.service` holds the open requests.

    Raises `ConfigError` if there is no getting at the API keys.
    """
    routes = routes_of(config)
    app = Starlette(
        routes=as_starlette(routes),
        middleware=_middleware(engine, config, routes),
        exception_handlers={
            ApiError: _answer_error,
            RequestError: _answer_error,
            EngineDeadError: _answer_error,
            HTTPException: _answer_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_fault,
        },
    )
    app.state.service = Service(engine, config)
    app.state.routes = routes
    app.state.created = int(time.time())
    return app


def _middleware(engine: "AsyncEngine", config: ServerConfig, routes: tuple[ServedRoute, ...]) -> list[Middleware]:
    """What every request passes, from the outside in: browsers ask without a key what they may do."""
    found = [
        Middleware(
            RequestLog,
            enabled=config.log_requests,
            unlogged=unlogged_paths(routes),
            anthropic=anthropic_paths(routes),
            count=engine.metrics.take_response,
        )
    ]
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                allow_private_network=True,
                expose_headers=(REQUEST_ID_HEADER,),
            )
        )
    if keys := config.api_keys():
        found.append(Middleware(ApiKeys, keys=keys, open_paths=open_paths(routes)))
    return found


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request)


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Starlette raises `error` again behind this answer: uvicorn logs the traceback and drops the connection."""
    response = error_response(error, request)
    response.headers[REQUEST_ID_HEADER] = record_of(request).request_id  # this answer passes no middleware
    response.headers["Connection"] = "close"  # so that no client sends its next request into the dropped one
    return response


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
