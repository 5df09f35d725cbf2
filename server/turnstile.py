"""New requests one after the other: a burst of them must not keep everybody else waiting.

Whatever arrives at once is otherwise parsed, checked and admitted in one turn of the event loop, in which no token is
sent and no /health answered.
"""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send


class Turnstile:
    """Middleware that lets one request with a body in per turn of the event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lock = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application that middleware is."""
        if scope["type"] == "http" and scope["method"] == "POST":
            async with self._lock:
                await asyncio.sleep(0)
        await self._app(scope, receive, send)
