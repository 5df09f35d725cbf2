"""The ASGI application: routes, health, and every error in OpenAI's shape.

In: an engine, loading or ready. Out: a Starlette application; it neither starts nor stops the engine.
"""

import importlib.metadata
import time
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from jaxpage.errors import EngineDeadError, RequestError
from jaxpage.metrics import CONTENT_TYPE
from jaxpage.server.anthropic.messages import count_tokens, create_message
from jaxpage.server.auth import ApiKeys
from jaxpage.server.errors import ApiError, error_response
from jaxpage.server.openai.chat import chat_completions
from jaxpage.server.openai.completions import completions
from jaxpage.server.openai.embeddings import embeddings, score
from jaxpage.server.openai.responses import create_response, delete_response, get_response
from jaxpage.server.openapi import Health, Load, ModelCard, ModelList, Version, openapi
from jaxpage.server.page import page_routes
from jaxpage.server.request_log import REQUEST_ID_HEADER, RequestLog, record_of
from jaxpage.server.service import Service, service_of
from jaxpage.server.vllm.debug import DEBUG_ROUTES
from jaxpage.server.vllm.tokenization import detokenize, tokenize
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

CLIENT_CLOSED_REQUEST = 499
"""Status, never seen by anyone, of a response to a client that has left."""


def build_app(engine: "AsyncEngine", config: ServerConfig) -> Starlette:
    """The application that serves `engine` as `config` says; its `state.service` holds the open requests.

    Raises `ConfigError` if there is no getting at the API keys.
    """
    app = Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/models/{model_id:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/responses", create_response, methods=["POST"]),
            Route("/v1/responses/{response_id}", get_response),
            Route("/v1/responses/{response_id}", delete_response, methods=["DELETE"]),
            Route("/v1/messages", create_message, methods=["POST"]),
            Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
            Route("/v1/embeddings", embeddings, methods=["POST"]),
            Route("/score", score, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/load", load),
            Route("/openapi.json", openapi),
            Route("/version", version),
            Route("/metrics", metrics),
            *(DEBUG_ROUTES if config.enable_debug_routes else ()),
            *(page_routes() if config.web_page else ()),
        ],
        middleware=_middleware(config),
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
    app.state.created = int(time.time())
    return app


def _middleware(config: ServerConfig) -> list[Middleware]:
    """What every request passes, from the outside in: browsers ask without a key what they may do."""
    found = [Middleware(RequestLog, enabled=config.log_requests)]
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=(REQUEST_ID_HEADER,),
            )
        )
    if keys := config.api_keys():
        found.append(Middleware(ApiKeys, keys=keys))
    return found


async def models(request: Request) -> Response:
    """GET /v1/models: the one model under each of its names, once it can be asked."""
    service = service_of(request)
    service.check_available()
    return _json(ModelList(data=[_model_card(request, name) for name in service.model_names]))


async def model(request: Request) -> Response:
    """GET /v1/models/{id}; the id may hold slashes, as a path does."""
    service = service_of(request)
    service.check_available()
    name = request.path_params["model_id"]
    service.check_model(name)
    return _json(_model_card(request, name if name in service.model_names else service.model_name))


async def health(request: Request) -> Response:
    """GET /health and /ping: 200 if and only if a request would be served now."""
    service_of(request).check_available()
    return _json(Health())


async def load(request: Request) -> Response:
    """GET /load: requests that are open, for those who spread load over several servers."""
    return _json(Load(server_load=len(service_of(request).open_generations)))


async def version(request: Request) -> Response:
    """GET /version: jaxpage's."""
    return _json(Version(version=importlib.metadata.version("jaxpage")))


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus' text format; answered whatever state the engine is in."""
    service = service_of(request)
    text = service.engine.metrics.render(vllm_names=service.config.vllm_metric_names)
    return Response(text, media_type=CONTENT_TYPE)


def _model_card(request: Request, name: str) -> ModelCard:
    engine = service_of(request).engine
    return ModelCard(
        id=name, created=request.app.state.created, root=engine.model_name, max_model_len=engine.max_model_len
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")


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
