"""Who may use the server, where it has API keys.

In: every request. Out: a 401 for those without one of the keys, as `Authorization: Bearer KEY` or, as Anthropic's
clients send it, `x-api-key: KEY`. Everything is guarded but what the table of routes calls open, so that no other
spelling of a path and no route to come is left open. Preflight requests of browsers carry no key, and need none.
"""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxpage.server.errors import ApiError, error_response
from jaxpage.server.request_log import Paths, route_path


class ApiKeys:
    """Middleware that lets only those pass who have one of `keys`."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: Paths) -> None:
        """`open_paths` are for everyone: load balancers, dashboards, and those who open the page."""
        self._app = app
        self._open_paths = open_paths
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application that middleware is."""
        if (
            scope["type"] != "http"
            or scope["method"] == "OPTIONS"
            or route_path(scope) in self._open_paths
            or self._knows(scope)
        ):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server needs an API key: send a right one as Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error, Request(scope))(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given.encode("latin-1"))  # the bytes that came
        # All are compared, each in constant time: how long it takes tells nothing of any key.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
