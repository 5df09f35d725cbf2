"""The page for people at `/`: a chat, and a live view of the engine.

In: the files of `web/`, as they are: there is no build step. Out: routes that send them, with headers that let the page
load nothing but these files and talk to nobody but this server.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from jaxpage.server.live import LiveView

FOLDER = Path(__file__).parent / "web"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # asks each time, and is told that nothing has changed
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """The page's files, with its headers."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """The file, or that the client has it already."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


async def index(request: Request) -> Response:
    """GET /: the page."""
    return FileResponse(FOLDER / "index.html", headers=HEADERS)


@dataclass(frozen=True, slots=True)
class Page:
    """The handlers of one application; its `live` shares the snapshots that it takes."""

    index: Callable[[Request], Awaitable[Response]]
    live: Callable[[Request], Awaitable[Response]]
    files: StaticFiles


def page_handlers() -> Page:
    """New handlers."""
    return Page(index, LiveView().answer, PageFiles(directory=FOLDER))
