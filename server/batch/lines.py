"""Lines of batch files, as OpenAI's batch API reads and writes them.

In: lines of an input file, and an output file of an earlier run. Out: requests, results as lines, and which requests
have a result already. https://platform.openai.com/docs/guides/batch
"""

import os
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxpage.errors import ConfigError

_BEGIN = b'{"id":'
"""How a result's line begins."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A line that can be sent."""

    custom_id: str
    url: str
    body: bytes
    """JSON, as it stands in the line."""


class BatchResponse(msgspec.Struct):
    """What the server answered, an error included."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why a line was not sent."""

    code: str
    message: str


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of the output file; `custom_id` is null where the input line has none that can be read."""

    id: str
    custom_id: str | None
    response: BatchResponse | None
    error: BatchError | None

    @property
    def succeeded(self) -> bool:
        """Whether the server answered with a success."""
        return self.error is None and self.response is not None and 200 <= self.response.status_code < 300

    @classmethod
    def of(
        cls, custom_id: str | None, *, response: BatchResponse | None = None, error: BatchError | None = None
    ) -> "BatchResult":
        """A new result, with an id of its own."""
        return cls(id=f"batch_req_{uuid.uuid4().hex}", custom_id=custom_id, response=response, error=error)


class LineError(Exception):
    """A line that is no request; `code` is OpenAI's word for why."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id

    def result(self) -> BatchResult:
        """What the output file says of it."""
        return BatchResult.of(self.custom_id, error=BatchError(self.code, str(self)))


def numbered(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines that hold something, with their numbers in the file."""
    for number, line in enumerate(lines, 1):
        if text := line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
            yield number, text


def parse_request(number: int, line: bytes) -> BatchRequest:
    """The request in line `number`. Raises `LineError` that names what is wrong with it."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError("invalid_json_line", f"line {number} is no JSON object: {error}") from error
    custom_id = _text(fields, "custom_id", number, None)
    method = _text(fields, "method", number, custom_id)
    if method != "POST":
        raise LineError("invalid_method", f"line {number} has the method {method!r}: it must be 'POST'", custom_id)
    url = _text(fields, "url", number, custom_id)
    if url not in URLS:
        raise LineError(
            "invalid_url", f"line {number} has the url {url!r}: it must be one of {', '.join(URLS)}", custom_id
        )
    if "body" not in fields:
        raise _missing("body", number, custom_id)
    body = bytes(fields["body"])
    if _asks_for_a_stream(body):
        raise LineError("invalid_request", f"line {number} asks for a stream: leave out body.stream", custom_id)
    return BatchRequest(custom_id, url, body)


def _text(fields: dict[str, msgspec.Raw], name: str, number: int, custom_id: str | None) -> str:
    if name not in fields:
        raise _missing(name, number, custom_id)
    try:
        return msgspec.json.decode(fields[name], type=str)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"line {number} has a {name} that is no text: write it as a JSON string"
        raise LineError("invalid_type", message, custom_id) from error


def _missing(name: str, number: int, custom_id: str | None) -> LineError:
    message = f"line {number} has no {name}: a line holds custom_id, method, url and body"
    return LineError("missing_required_parameter", message, custom_id)


def _asks_for_a_stream(body: bytes) -> bool:
    """What else may be wrong with a body is the server's to say."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any]).get("stream") is True
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def keep_successes(output: Path) -> set[str]:
    """Ids of the requests that an earlier run has brought to a success; `output` is left with those results alone.

    Failures, and a last line that was cut, are dropped, as they are run again. Raises `ConfigError`, and changes
    nothing, if another line is no result: the file is something else.
    """
    succeeded: set[str] = set()
    with tempfile.NamedTemporaryFile(dir=output.parent, prefix=f".{output.name}-", delete=False) as kept:
        try:
            with output.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    result = _result_in(line, number, output)
                    if result is not None and result.succeeded:
                        kept.write(line.removesuffix(b"\n") + b"\n")
                        succeeded.add(result.custom_id or "")
            kept.flush()
            os.fsync(kept.fileno())
            os.chmod(kept.name, output.stat().st_mode & 0o7777)
            os.replace(kept.name, output)
        finally:
            Path(kept.name).unlink(missing_ok=True)
    return succeeded


def _result_in(line: bytes, number: int, output: Path) -> BatchResult | None:
    """The result in a line; None for one that was cut."""
    try:
        return msgspec.json.decode(line, type=BatchResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        begins_like_one = line.startswith(_BEGIN[: len(line)])
        if begins_like_one and not line.endswith(b"\n"):
            return None
        raise ConfigError(
            f"{output} holds no batch result in line {number} ({error}): it is some other file, choose another output"
        ) from error
