"""What is known of each HTTP request besides its body: its id, and, when it has ended, a line in the log.

In: every request, before anything else sees it. Out: `X-Request-Id` on every response, and a line of JSON: what was
asked for, how it ended, how many tokens, how long. Never text of prompts or answers.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from jaxpage.server.generation import Generation

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
MAX_LOGGED_PATH = 200
_SCOPE_KEY = "jaxpage.request"
_ID = re.compile(r"[!-~]{1,128}")


@dataclass(frozen=True, slots=True)
class Paths:
    """Some of the server's paths."""

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def __contains__(self, path: str) -> bool:
        return path in self.exact or path.startswith(self.prefixes)


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request."""

    request_id: str
    """The client's own, if it is printable ASCII of up to 128 characters, or a new one."""
    is_anthropic: bool
    """Whether errors, and the id's header, are in Anthropic's words."""
    started: float = field(default_factory=time.perf_counter)
    generation: "Generation | None" = None
    """What it generates, if it does."""


class RequestLog:
    """Middleware that gives requests their record, and logs and counts them."""

    def __init__(
        self, app: ASGIApp, *, enabled: bool, unlogged: Paths, anthropic: Paths, count: Callable[[int], None]
    ) -> None:
        """`count` takes the status of each response, of those that are not logged as well."""
        self._app = app
        self._count = count
        self._unlogged, self._anthropic = unlogged, anthropic
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application that middleware is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = route_path(scope)
        record = RequestRecord(_request_id(scope), path in self._anthropic)
        scope[_SCOPE_KEY] = record
        is_logged = self._enabled and path not in self._unlogged
        header = "Request-Id" if record.is_anthropic else REQUEST_ID_HEADER
        status = 500  # of an exception that passes by here

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[header] = record.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._count(status)
            if is_logged:
                logger.info("%s", json.dumps(_line(scope, record, status), ensure_ascii=True))


def record_of(connection: HTTPConnection) -> RequestRecord:
    """The record of a request."""
    record = connection.scope[_SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER)
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex


def route_path(scope: Scope) -> str:
    """The path without the prefix under which a proxy serves us."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _line(scope: Scope, record: RequestRecord, status: int) -> dict[str, Any]:
    line: dict[str, Any] = {
        "id": record.request_id,
        "method": scope["method"],
        "path": scope["path"][:MAX_LOGGED_PATH],
        "status": status,
    }
    if (generation := record.generation) is not None:
        usage, first = generation.usage, generation.first_output_time
        line |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "generated_tokens": usage.completion_tokens,
            "finish_reason": generation.finish_reason,
            "ttft_s": None if first is None else round(first - record.started, 4),
        }
    return line | {"total_s": round(time.perf_counter() - record.started, 4)}
