"""What an exception looks like to a client.

In: any exception that ends a request. Out: an HTTP status and OpenAI's error object, or Anthropic's on its routes. What
is not jaxpage's own is told to the log, never to the client.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import EngineDeadError, RequestError
from jaxpage.server.request_log import record_of

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ErrorDetail(msgspec.Struct, kw_only=True):
    """The inside of OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's error object: the body of every response that is not 2xx, and of an error inside a stream."""

    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct, kw_only=True):
    """The inside of Anthropic's error object."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """Anthropic's error object, and error event."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str


class ApiError(Exception):
    """A request ends with this HTTP status; `code` is OpenAI's machine-readable word for it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers


def shutting_down() -> ApiError:
    """Why a request is refused, or ended early, once the server has been told to stop."""
    return ApiError(
        503,
        "the server is shutting down: send the request to another one",
        code="shutting_down",
        headers={"Connection": "close", "Retry-After": "1"},
    )


def describe(error: Exception) -> tuple[int, ErrorBody]:
    """The HTTP status and the body that tell a client about `error`."""
    match error:
        case ApiError():
            status, message, param, code = error.status, str(error), error.param, error.code
        case RequestError(param="beam_width"):  # which clients know as n
            status, message, param, code = 400, str(error).replace("beam_width", "n"), "n", None
        case RequestError():
            status, message, param, code = 400, str(error), error.param, None
        case EngineDeadError():
            status, message, param, code = 503, str(error), None, "engine_dead"
        case HTTPException():
            status, message, param, code = error.status_code, error.detail, None, None
        case _:
            status, message, param, code = 500, "internal server error: the server's log has the cause", None, None
    return status, ErrorBody(ErrorDetail(message=message, type=_kind_of(status), param=param, code=code))


def describe_to_anthropic(error: Exception, request_id: str) -> tuple[int, AnthropicError]:
    """The same for clients of Anthropic's protocol."""
    status, body = describe(error)
    kind = _ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = AnthropicErrorDetail(type=kind, message=body.error.message)
    return status, AnthropicError(error=detail, request_id=request_id)


def _kind_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def is_unexpected(error: Exception) -> bool:
    """Whether `error` is a fault of ours, whose traceback belongs in the log."""
    return not isinstance(error, ApiError | RequestError | EngineDeadError | HTTPException)


def error_response(error: Exception, request: Request) -> Response:
    """`error` as a whole HTTP response to `request`."""
    body: ErrorBody | AnthropicError
    if (record := record_of(request)).is_anthropic:
        status, body = describe_to_anthropic(error, record.request_id)
    else:
        status, body = describe(error)
    headers = dict(error.headers or {}) if isinstance(error, HTTPException | ApiError) else None
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
