"""One way to answer for every route that generates: admit, send what comes, close.

In: prompts as token ids, the engine's options, and the protocol's words for what was generated. Out: a response that
admits the prompts when it is sent and has closed what it opened when it is over, however it ends.

    return Answer(http_request, Asked(id, prompts, params, ...), reply, frames)     # at the end of a route

A stream's head goes out with its first token, so that what fails before it still gets a status of its own. A request
that has to wait for its turn gets its head at once, and comment lines while nothing comes: proxies cut silent streams.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.server.errors import describe, is_unexpected
from jaxpage.server.generation import Generation, unless_disconnected
from jaxpage.server.openai.logprobs import Entry, ScoredTokens
from jaxpage.server.openai.protocol import GenerationRequest
from jaxpage.server.request_log import record_of
from jaxpage.server.service import service_of

logger = logging.getLogger(__name__)

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
FEW_CHOICES = 8
"""An answer of more of them is written in a thread."""
DONE = b"data: [DONE]\n\n"
"""The last event of completions and chat."""
COMMENT = b": waiting\n\n"
"""A line that clients of server-sent events skip."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a checked request wants of the engine."""

    id: str
    prompts: Sequence[list[int]]
    params: SamplingParams | BeamSearchParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    structure_field: str | None = None
    """The request's field that says what the text must be."""
    as_client_error: Callable[[RequestError], RequestError] = lambda error: error
    """The engine's refusal in the words of the request's fields."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams | BeamSearchParams,
        as_client_error: Callable[[RequestError], RequestError] = lambda error: error,
    ) -> "Asked":
        """What a request to generate wants."""
        return cls(
            request_id,
            prompts,
            params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            structure_field=request.structure.field if request.structure else None,
            as_client_error=as_client_error,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What is new of a choice, or all of it in one piece: what a route makes its words of."""

    index: int
    text: str
    tokens: ScoredTokens | None
    """Where log-probabilities are asked for."""
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Sequence[Entry] | None = None
    is_first: bool = True
    """Whether nothing of the choice came before."""


type Reply = Callable[[Generation, list[tuple[int, SequenceDelta]]], msgspec.Struct]
"""Makes the whole answer of all choices."""
type Frames = Callable[[Generation], AsyncIterator[bytes]]
"""Makes the server-sent events of a stream, an error's included."""


@contextlib.asynccontextmanager
async def admitted(http_request: Request, asked: Asked) -> AsyncIterator[Generation]:
    """All prompts run meanwhile, or none; what they hold is freed afterwards. Raises what refuses them."""
    service = service_of(http_request)
    try:
        _check_logprobs(asked.params, service.config.max_logprobs)
        try:
            await service.engine.prepare(asked.params)
        except RequestError as error:  # it knows nothing of the request's field
            raise RequestError(str(error), asked.structure_field or error.param) from error
        generation = service.admit(
            asked.id, asked.prompts, asked.params, priority=asked.priority, cache_salt=asked.cache_salt
        )
    except RequestError as error:
        raise asked.as_client_error(error) from error
    record_of(http_request).generation = generation
    with contextlib.closing(generation):
        yield generation


def _check_logprobs(params: SamplingParams | BeamSearchParams | PoolingParams, most: int) -> None:
    """Raises `RequestError` for more alternatives at each token than the server gives: each is an object to write."""
    if most == -1 or not isinstance(params, SamplingParams):
        return
    for name in ("logprobs", "prompt_logprobs"):
        wanted: int | None = getattr(params, name)
        if wanted is not None and (wanted == -1 or wanted > most):
            shown = "-1, the whole vocabulary" if wanted == -1 else wanted
            raise RequestError(
                f"{name} is {shown}, and this server gives {most}: lower it or raise --max-logprobs", name
            )


class Answer(Response):
    """The answer to one request, in one piece or as server-sent events."""

    media_type = "application/json"

    def __init__(self, http_request: Request, asked: Asked, reply: Reply, frames: Frames | None = None) -> None:
        """`frames`: for a stream, which is then sent instead of the reply."""
        super().__init__()
        self._http_request, self._asked, self._reply, self._frames = http_request, asked, reply, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admits the request, sends its answer, and closes it. Raises what ends it before anything is sent."""
        async with admitted(self._http_request, self._asked) as generation:
            if self._frames is not None:
                await self._stream(self._frames, generation, receive, send)
                return
            outputs = await unless_disconnected(receive, generation.finished())
            content = await self._written(generation, outputs)
        await Response(content, media_type=self.media_type)(scope, receive, send)

    async def _written(self, generation: Generation, outputs: list[tuple[int, SequenceDelta]]) -> bytes:
        """The answer's bytes; thousands of vectors are millions of numbers to write, and nobody waits for them."""
        if generation.num_choices > FEW_CHOICES and isinstance(self._asked.params, PoolingParams):
            return await asyncio.to_thread(self._whole, generation, outputs)
        return self._whole(generation, outputs)

    def _whole(self, generation: Generation, outputs: list[tuple[int, SequenceDelta]]) -> bytes:
        return msgspec.json.encode(self._reply(generation, outputs))

    async def _stream(self, frames: Frames, generation: Generation, receive: Receive, send: Send) -> None:
        service = service_of(self._http_request)
        interval = service.config.heartbeat_interval or None
        if not service.must_wait(generation):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await unless_disconnected(receive, generation.started())
        sender = _Sender(send, interval)
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, sender.send_all(frames(generation)))


class _Sender:
    """Sends a stream's frames, and a comment whenever nothing was sent for `interval` seconds."""

    def __init__(self, send: Send, interval: float | None) -> None:
        self._send, self._interval = send, interval
        self._last = time.monotonic()

    async def send_all(self, frames: AsyncIterator[bytes]) -> None:
        """Head, frames and end of the response."""
        head = Response(headers=STREAM_HEADERS, media_type="text/event-stream")
        del head.headers["Content-Length"]
        await self._send({"type": "http.response.start", "status": 200, "headers": head.raw_headers})
        beating = asyncio.create_task(self._beat(self._interval)) if self._interval else None
        try:
            async for frame in frames:
                await self._send_piece(frame)
        finally:
            if beating is not None:
                beating.cancel()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        self._last = time.monotonic()

    async def _beat(self, interval: float) -> None:
        while True:
            wait = self._last + interval - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
            else:
                await self._send_piece(COMMENT)


def choice_of(generation: Generation, index: int, output: SequenceDelta, *, is_first: bool = True) -> Choice:
    """What the engine gave of a choice."""
    tokens = None
    if output.logprobs is not None:
        texts = [
            entry[token_id].decoded_token for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        tokens = ScoredTokens(texts, output.logprobs)
    prompt_logprobs = generation.prompt_logprobs(index)
    return Choice(index, output.text, tokens, output.finish_reason, output.stop_reason, prompt_logprobs, is_first)


async def data_frames(chunks: AsyncIterator[msgspec.Struct]) -> AsyncIterator[bytes]:
    """`chunks` as events without names. An exception becomes an error event, as the status line is long gone."""
    try:
        async for chunk in chunks:
            yield _data(chunk)
    except Exception as error:
        _note(error)
        yield _data(describe(error)[1])
    yield DONE


class NamedEvent(Protocol):
    """An event that is sent under its type's name."""

    @property
    def type(self) -> str: ...


async def named_frames(
    events: AsyncIterator[NamedEvent], last_after: Callable[[Exception], NamedEvent]
) -> AsyncIterator[bytes]:
    """`events` under their names; `last_after` makes the last one of an exception."""
    try:
        async for event in events:
            yield _named(event)
    except Exception as error:
        _note(error)
        yield _named(last_after(error))


def _note(error: Exception) -> None:
    if is_unexpected(error):
        logger.exception("a stream ended with an error")


def _data(event: object) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


def _named(event: NamedEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\n" + _data(event)
