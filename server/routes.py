"""Every route that is served: one line each. To add one, write its handler in a file and its line here.

The application routes by this table; who needs a key, what is logged, and what is documented are read from it, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from starlette.routing import BaseRoute, Mount, Route

from jaxpage.server.anthropic import protocol as anthropic
from jaxpage.server.anthropic.messages import count_tokens, create_message
from jaxpage.server.errors import AnthropicError, ErrorBody
from jaxpage.server.openai import responses_protocol as responses
from jaxpage.server.openai.chat import chat_completions
from jaxpage.server.openai.chat_protocol import ChatChunk, ChatCompletion, ChatRequest
from jaxpage.server.openai.completions import completions
from jaxpage.server.openai.embeddings import (
    EmbeddingList,
    EmbeddingsRequest,
    ScoreList,
    ScoreRequest,
    embeddings,
    score,
)
from jaxpage.server.openai.models import ModelCard, ModelList, model, models
from jaxpage.server.openai.protocol import Completion, CompletionRequest, ModelRequest
from jaxpage.server.openai.responses import create_response, delete_response, get_response
from jaxpage.server.openapi import openapi
from jaxpage.server.page import page_handlers
from jaxpage.server.request_log import Paths
from jaxpage.server.vllm import debug
from jaxpage.server.vllm.status import Health, Load, Version, health, load, metrics, version
from jaxpage.server.vllm.tokenization import DetokenizeRequest, Text, TokenizeRequest, Tokens, detokenize, tokenize
from jaxpage.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class ServedRoute:
    """One method of one path, and all that is true of it."""

    method: str
    path: str
    """As Starlette has paths, with parameters in braces."""
    handler: Any
    """A function from a request to a response, or an ASGI application for all that is below the path."""
    summary: str = ""
    answer: Any = None
    """Type of a whole answer; None: the route is not in the document."""
    body: type[ModelRequest] | None = None
    event: Any = None
    """Type of a stream's events, or a union of types, where there are streams."""
    error: type = ErrorBody
    is_open: bool = False
    """Whether it is served without a key."""
    is_logged: bool = True
    """Whether a request is a line in the log; what machines, or the page, ask again and again is not."""
    holds_path: bool = False
    """Whether the handler answers for all that is below the path."""


_ASKED_OFTEN: dict[str, Any] = {"is_open": True, "is_logged": False}

API = (
    ServedRoute("GET", "/v1/models", models, "The model under its names", ModelList),
    ServedRoute("GET", "/v1/models/", models),
    ServedRoute("GET", "/v1/models/{model_id:path}", model, "The model under one name", ModelCard),
    ServedRoute("POST", "/v1/completions", completions, "Complete prompts", Completion, CompletionRequest, Completion),
    ServedRoute(
        "POST", "/v1/chat/completions", chat_completions, "Answer in a chat", ChatCompletion, ChatRequest, ChatChunk
    ),
    ServedRoute(
        "POST",
        "/v1/responses",
        create_response,
        "Answer, and remember the conversation",
        responses.ResponseObject,
        responses.ResponsesRequest,
        responses.StreamEvent,
    ),
    ServedRoute("GET", "/v1/responses/{response_id}", get_response, "A stored response", responses.ResponseObject),
    ServedRoute(
        "DELETE", "/v1/responses/{response_id}", delete_response, "Forget a response", responses.DeletedResponse
    ),
    ServedRoute(
        "POST",
        "/v1/messages",
        create_message,
        "Answer in Anthropic's protocol",
        anthropic.Message,
        anthropic.MessagesRequest,
        anthropic.MessageEvent,
        AnthropicError,
    ),
    ServedRoute(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count what a conversation would take",
        anthropic.TokenCount,
        anthropic.CountTokensRequest,
        error=AnthropicError,
    ),
    ServedRoute("POST", "/v1/embeddings", embeddings, "Prompts as points in space", EmbeddingList, EmbeddingsRequest),
    ServedRoute("POST", "/score", score, "How near texts are to each other", ScoreList, ScoreRequest),
    ServedRoute("POST", "/v1/score", score, "How near texts are to each other", ScoreList, ScoreRequest),
    ServedRoute("POST", "/tokenize", tokenize, "Token ids of a prompt or a chat", Tokens, TokenizeRequest),
    ServedRoute("POST", "/detokenize", detokenize, "Text of token ids", Text, DetokenizeRequest),
    ServedRoute("GET", "/health", health, "Whether a request would be served now", Health, **_ASKED_OFTEN),
    ServedRoute("GET", "/ping", health, "Whether a request would be served now", Health, **_ASKED_OFTEN),
    ServedRoute("POST", "/ping", health, "Whether a request would be served now", Health, **_ASKED_OFTEN),
    ServedRoute("GET", "/load", load, "How many requests are open", Load, **_ASKED_OFTEN),
    ServedRoute("GET", "/version", version, "The server's version", Version, **_ASKED_OFTEN),
    ServedRoute("GET", "/metrics", metrics, **_ASKED_OFTEN),
    ServedRoute("GET", "/openapi.json", openapi, is_open=True),
)
DEBUG = (
    ServedRoute("GET", "/debug/kv_cache", debug.kv_cache),
    ServedRoute("POST", "/debug/profile", debug.profile),
    ServedRoute("POST", "/reset_prefix_cache", debug.reset_prefix_cache),
    ServedRoute("POST", "/pause", debug.pause),
    ServedRoute("POST", "/resume", debug.resume),
    ServedRoute("GET", "/is_paused", debug.is_paused),
    ServedRoute("POST", "/sleep", debug.sleep),
    ServedRoute("POST", "/wake_up", debug.wake_up),
    ServedRoute("GET", "/is_sleeping", debug.is_sleeping),
)
"""For those who run the server."""


def routes_of(config: ServerConfig) -> tuple[ServedRoute, ...]:
    """The routes that a server with these options has."""
    found = [*API, *(DEBUG if config.enable_debug_routes else ())]
    if config.web_page:
        page = page_handlers()
        found += [
            ServedRoute("GET", "/", page.index, **_ASKED_OFTEN),
            ServedRoute("GET", "/live", page.live, is_logged=False),
            ServedRoute("GET", "/web", page.files, holds_path=True, **_ASKED_OFTEN),
        ]
    return tuple(found)


def as_starlette(routes: Iterable[ServedRoute]) -> list[BaseRoute]:
    """The routes for an application."""
    return [
        Mount(one.path, one.handler) if one.holds_path else Route(one.path, one.handler, methods=[one.method])
        for one in routes
    ]


def open_paths(routes: Iterable[ServedRoute]) -> Paths:
    """Paths that need no key."""
    return _paths(one for one in routes if one.is_open)


def unlogged_paths(routes: Iterable[ServedRoute]) -> Paths:
    """Paths whose requests are no line in the log."""
    return _paths(one for one in routes if not one.is_logged)


def anthropic_paths(routes: Iterable[ServedRoute]) -> Paths:
    """Paths whose errors, and names of headers, are Anthropic's; also those below them."""
    paths = [one.path for one in routes if one.error is AnthropicError]
    return Paths(frozenset(paths), tuple(f"{path}/" for path in paths))


def _paths(routes: Iterable[ServedRoute]) -> Paths:
    routes = tuple(routes)
    exact = frozenset(one.path for one in routes if not one.holds_path)
    return Paths(exact, tuple(f"{one.path}/" for one in routes if one.holds_path))
