"""What the routes share: the engine behind them, who may be served now, and the requests that are open.

In: a route's HTTP request. Out: the typed request in its body, its prompts admitted as a `Generation`, or the reason
why not.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.server.errors import ApiError, shutting_down
from jaxpage.server.generation import Generation
from jaxpage.server.openai.protocol import ModelRequest, decode
from jaxpage.server.openai.response_store import ResponseStore
from jaxpage.server.parsing.dialect import Dialect, dialect_of
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine, RequestStream

RETRY_AFTER_SECONDS = "1"
"""When a client that was refused may ask again."""
LONG_BODY_BYTES = 32 * 2**10
"""From here on a request is encoded in a thread, so that tokens of others do not wait for it."""


@dataclass(slots=True)
class Service:
    """One model served by one engine."""

    engine: "AsyncEngine"
    config: ServerConfig
    draining: bool = False
    """Set when the server has been told to stop: new requests are refused."""
    open_generations: set[Generation] = field(default_factory=set)
    response_store: ResponseStore = field(init=False)
    _dialect: Dialect | None = None

    def __post_init__(self) -> None:
        self.response_store = ResponseStore(self.config.max_stored_responses)

    @property
    def dialect(self) -> Dialect:
        """How the model writes reasoning and calls; known once the engine is ready."""
        if self._dialect is None:
            self._dialect = dialect_of(self.engine, self.config)
        return self._dialect

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's ids in the API, the one that answers carry first."""
        return self.config.served_model_name or (self.engine.model_name,)

    @property
    def model_name(self) -> str:
        """The model's id in answers."""
        return self.model_names[0]

    def check_available(self) -> None:
        """Raises a 503 while the engine loads, once it is dead, and when the server is shutting down."""
        if self.engine.is_dead:
            raise ApiError(503, "the engine is dead: restart the server", code="engine_dead")
        if self.draining:
            raise shutting_down()
        if not self.engine.is_ready:
            raise ApiError(503, f"{self.model_name} is still loading: try again in a moment", code="loading")

    def check_model(self, name: str | None) -> None:
        """Raises a 404 unless `name` is absent or one of the served model's; a trailing slash does not matter."""
        if name is not None and not {name, name.rstrip("/")} & {*self.model_names}:
            message = f"the model {name!r} does not exist: this server serves {', '.join(map(repr, self.model_names))}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def admit(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Start all prompts (token ids), each with all its choices, or none. Whoever admits must close.

        Raises `RequestError` or `EngineDeadError`, and a 429 when too many requests wait already.
        """
        self._check_queue()
        streams: list[RequestStream] = []
        try:
            for index, token_ids in enumerate(prompts):
                stream = self.engine.add_request(
                    token_ids, params, request_id=f"{request_id}-{index}", priority=priority, cache_salt=cache_salt
                )
                streams.append(stream)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        match params:
            case BeamSearchParams():
                n = params.beam_width
            case PoolingParams():
                n = 1
            case _:
                n = params.n
        generation = Generation(streams, n, self.open_generations.discard, self.config.request_timeout)
        self.open_generations.add(generation)
        return generation

    def _check_queue(self) -> None:
        """Raises a 429 once as many sequences are open as may run and wait.

        A request counts with all its sequences once it is open, and is never too large to be let in itself.
        """
        if (most := self.config.max_num_waiting) is None:
            return
        places = self.engine.max_num_seqs + most
        if self._num_unfinished() >= places:
            raise ApiError(
                429,
                f"{self.engine.max_num_seqs} sequences run at once, {most} more may wait, and all places are taken: "
                "try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": RETRY_AFTER_SECONDS},
            )

    def must_wait(self, generation: Generation) -> bool:
        """Whether others fill all places, so that the generation, just admitted, begins only when they end."""
        return self._num_unfinished() - generation.num_choices >= self.engine.max_num_seqs

    def _num_unfinished(self) -> int:
        """Sequences that run or wait; an answer that is done and still being read holds no place."""
        return sum(one.num_choices for one in self.open_generations if one.is_running)

    def end_open_requests(self) -> None:
        """End what is still running with a 503, in a stream with an error event: the server's time is up."""
        for generation in tuple(self.open_generations):
            generation.fail(shutting_down())


def service_of(request: Request) -> Service:
    """The service that the application of `request` was built with."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


async def read_request[RequestT: ModelRequest](
    http_request: Request, request_type: type[RequestT]
) -> tuple[RequestT, bytes]:
    """The checked request in the body, and the body. Raises what keeps it from being served."""
    service = service_of(http_request)
    service.check_available()
    body = await read_body(http_request)
    request = decode(body, request_type)
    service.check_model(request.model)
    return request, body


async def read_body(request: Request) -> bytes:
    """The body of `request`. Raises a 413 if it is too long, after reading on a while so that the client hears it."""
    most = service_of(request).config.max_request_bytes
    size = 0
    chunks: list[bytes] = []
    async for chunk in request.stream():
        size += len(chunk)
        if size <= most:
            chunks.append(chunk)
        elif size > 4 * most:
            break
    if size > most:
        message = f"the body is longer than {most} bytes: shorten it or raise --max-request-bytes"
        raise ApiError(413, message, code="request_too_large")
    return b"".join(chunks)


async def encode[T](body: bytes, work: Callable[[], T]) -> T:
    """The result of `work`, which encodes what `body` holds."""
    return work() if len(body) < LONG_BODY_BYTES else await asyncio.to_thread(work)
