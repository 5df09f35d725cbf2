"""Who answers a chat: a server at a URL, or anything else that takes OpenAI's requests and gives its answers.

In: a request's path and body. Out: the answer as it comes, or one error whose message is for people.
"""

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol

from jaxpage.errors import RequestError

_SILENCE_SECONDS = 600.0
"""How long a server may say nothing, as while it computes a long prompt."""
_PIECE_BYTES = 65536


class Reply(Protocol):
    """A response whose body comes in pieces."""

    status: int

    def __iter__(self) -> Iterator[bytes]:
        """Gives the body in pieces, as they come."""

    def close(self) -> None:
        """Hang up, if it is still coming."""


class Connection(Protocol):
    """Who takes requests."""

    def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """The answer to one request. Raises `RequestError` if there is none."""


class HttpReply:
    """A server's response."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.status: int = response.status

    def __iter__(self) -> Iterator[bytes]:
        """Gives the body as it comes. Raises `RequestError` when the connection breaks."""
        try:
            while piece := self._response.read1(_PIECE_BYTES):
                yield piece
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the connection broke: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._response.close()


class HttpConnection:
    """A server that speaks OpenAI's protocol."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url`: with or without the /v1 at its end. Raises `RequestError` if it is none."""
        if not url.startswith(("http://", "https://")):
            raise RequestError(f"--url is {url!r}: it must begin with http:// or https://")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "User-Agent": "jaxpage"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def request(self, method: str, path: str, body: bytes = b"") -> HttpReply:
        """The answer, errors included. Raises `RequestError` if the server cannot be reached."""
        url = self._base + path
        try:
            request = urllib.request.Request(url, body or None, self._headers, method=method)
            return HttpReply(urllib.request.urlopen(request, timeout=_SILENCE_SECONDS))
        except urllib.error.HTTPError as error:
            return HttpReply(error)
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise RequestError(f"cannot reach {url}: {reason}") from error


def served_model(connection: Connection) -> str:
    """The first of the models that are served. Raises `RequestError` if there is none."""
    with contextlib.closing(connection.request("GET", "/v1/models")) as reply:
        found = _whole(reply)
    try:
        name = found["data"][0]["id"]
    except (LookupError, TypeError) as error:
        raise RequestError("/v1/models names no model: name one") from error
    return str(name)


def answer(connection: Connection, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """The chunks of a streamed answer to a chat. Raises `RequestError` with the server's words if it fails.

    To close it early stops the answer.
    """
    encoded = json.dumps({**body, "stream": True}).encode()
    with contextlib.closing(connection.request("POST", "/v1/chat/completions", encoded)) as reply:
        if reply.status != 200:
            _whole(reply)
        for line in _lines(reply):
            name, _, data = line.partition(b":")
            if name != b"data":
                continue  # a comment, which keeps the connection open
            if data.strip() == b"[DONE]":
                return
            chunk = _decoded(data)
            if chunk.get("error"):
                raise RequestError(_message(chunk))
            yield chunk
    raise RequestError("the answer broke off")


def _whole(reply: Reply) -> dict[str, Any]:
    """The object in the body. Raises `RequestError` for an error."""
    body = b"".join(reply)
    if reply.status == 200:
        return _decoded(body)
    try:
        message = _message(json.loads(body))
    except ValueError:
        message = body.decode("utf-8", "replace").strip()[:200] or http.client.responses.get(reply.status, "")
    raise RequestError(f"{message} (status {reply.status})")


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return " ".join(str(error.get("message", error) if isinstance(error, dict) else error).split())


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"the server does not speak OpenAI's protocol: it answered {text[:80]!r}")
    return found


def _lines(pieces: Reply) -> Iterator[bytes]:
    """Lines, however they are cut into pieces."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")
