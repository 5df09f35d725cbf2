"""The client's side of the wire: the requests that are open, what is new of them, calls, and the engine's death.

It does no input or output of its own. `LLM` and `AsyncEngine` open requests with a reader, send what `Client` gives
them to send, and hand it whatever the engine says: one waits for that, the other awaits it.

An error of one request is the same in both: where the engine or its text fails, the request ends with finish reason
"error" and the text so far, the failure is logged, and the others go on. An error of the engine ends all requests and
calls with `EngineDeadError`.
"""

import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from jaxpage import clock, wire
from jaxpage.errors import ConfigError, EngineDeadError, JaxpageError, ModelLoadError, RequestError
from jaxpage.outputs import RequestDelta
from jaxpage.requests.open_request import OpenRequest

if TYPE_CHECKING:
    from jaxpage.metrics import Metrics

logger = logging.getLogger(__name__)


class Reader(Protocol):
    """Who reads what is new of a request."""

    def push(self, delta: RequestDelta) -> None:
        """There is more of it; the last delta is `finished`."""

    def fail(self, error: JaxpageError) -> None:
        """The engine is dead, and nothing more comes."""


class Answer(Protocol):
    """Where a call's result is waited for: a future, of asyncio or of concurrent.futures."""

    def done(self) -> bool:
        """Whether nobody waits any more."""

    def set_result(self, result: Any, /) -> None:
        """It has been run."""

    def set_exception(self, exception: BaseException, /) -> None:
        """It could not be run."""


class Client:
    """What one engine's client knows. Belongs to one thread."""

    def __init__(self, send: Callable[[wire.ToEngine], None], metrics: "Metrics | None" = None) -> None:
        """`send` hands a message to the engine at once; `metrics`: what is served is counted there."""
        self._send = send
        self._metrics = metrics
        self._limits: wire.Ready | None = None
        self._death: JaxpageError | None = None
        self._open: dict[str, tuple[OpenRequest, Reader]] = {}
        self._by_sequence: dict[str, tuple[OpenRequest, Reader]] = {}
        """The same, by what the engine calls the sequences that have not ended."""
        self._answers: dict[int, Answer] = {}
        self._call_ids = itertools.count()
        self.stats: dict[str, float] = {}
        """The engine's newest word on how it stands; see `EngineCore.stats`."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine has said that it serves."""
        return self._limits is not None

    @property
    def death(self) -> JaxpageError | None:
        """What the engine has died of, or what has kept it from starting."""
        return self._death

    @property
    def limits(self) -> wire.Ready:
        """Within which requests are served. Raises `EngineDeadError` when the engine is gone or not ready yet."""
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._limits is None:
            raise EngineDeadError("the engine is still loading: await wait_ready() first")
        return self._limits

    @property
    def open_ids(self) -> set[str]:
        """Ids of the requests that have not ended."""
        return set(self._open)

    def open(self, request: OpenRequest, reader: Reader) -> None:
        """Send a checked request to the engine. Raises `EngineDeadError` when that is gone."""
        assert self.limits, "raises unless the engine serves"
        self._send(request.message)  # what cannot be sent is not open
        self._open[request.request_id] = request, reader
        self._by_sequence.update(dict.fromkeys(request.sequence_ids, (request, reader)))

    def end(self, request_id: str, reason: str) -> None:
        """End a request from outside ("abort" or "error"), which gives it a last delta; unknown ids are ignored."""
        if (found := self._open.pop(request_id, None)) is None:
            return
        request, reader = found
        for sequence_id in request.sequence_ids:
            self._by_sequence.pop(sequence_id, None)
        reader.push(request.end(reason))
        self._measure_end(request, reason)
        self._send(wire.AbortRequests(request.sequence_ids))

    def call(self, answer: Answer, utility: str, *args: Any) -> None:
        """Run one of the engine's utilities; `answer` gets its result, its `RequestError`, or `EngineDeadError`."""
        assert self.limits, "raises unless the engine serves"
        call_id = next(self._call_ids)
        self._answers[call_id] = answer
        self._send(wire.Call(call_id, utility, list(args)))

    def take(self, message: wire.FromEngine) -> None:
        """Take in what the engine says; what comes after its death is ignored."""
        if self._death is not None:
            return
        match message:
            case wire.Ready() as limits:
                self._limits, self.stats = limits, limits.stats
                if self._metrics is not None:
                    self._metrics.take_stats(limits.stats, [])
            case wire.Outputs():
                self.stats = message.stats
                if self._metrics is not None:
                    self._metrics.take_stats(message.stats, message.step_tokens)
                self._deliver(message)
            case wire.Returned(call_id, result, error):
                answer = self._answers.pop(call_id)
                if answer.done():  # given up
                    return
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(RequestError(error))
            case wire.Dead():
                self.die(error_of(message))

    def die(self, error: JaxpageError) -> None:
        """End every open request and call: the engine is gone because of `error`. The first death counts."""
        if self._death is not None:
            return
        self._death = error
        for _, reader in self._open.values():
            reader.fail(EngineDeadError(str(error)))
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(str(error)))
        self._open.clear()
        self._by_sequence.clear()
        self._answers.clear()

    def _deliver(self, message: wire.Outputs) -> None:
        """Hand a step's outputs to their readers."""
        for sequence_id, seconds in message.started:
            if (found := self._by_sequence.get(sequence_id)) is not None:
                found[0].start(seconds)
        stopped = []
        now = clock.now()
        for output in message.outputs:
            if (found := self._by_sequence.get(output.sequence_id)) is None:
                continue  # aborted meanwhile
            request, reader = found
            try:
                delta, must_abort = request.take(output, message.weight_version)
            except Exception:  # whatever its text does to us, the others go on
                logger.exception("request %s fails", request.request_id)
                self.end(request.request_id, "error")
                continue
            self._measure(request, output, now)
            if must_abort:
                stopped.append(output.sequence_id)
            if must_abort or output.finish_reason is not None:
                del self._by_sequence[output.sequence_id]
            if delta.finished:
                del self._open[request.request_id]
                # The first sequence's: the engine does not know of stop strings.
                self._measure_end(request, request.finish_reason or "length")
            reader.push(delta)
        if stopped:
            self._send(wire.AbortRequests(stopped))

    def _measure(self, request: OpenRequest, output: wire.SequenceOutput, now: float) -> None:
        if self._metrics is None:
            return
        new = request.note_tokens(output, now)
        if new.is_first:
            self._metrics.take_first_token(request.metrics, len(request.message.prompt_token_ids))
        self._metrics.take_tokens(new.num_tokens, new.gap)

    def _measure_end(self, request: OpenRequest, reason: str) -> None:
        if self._metrics is not None:
            num_prompt_tokens = len(request.message.prompt_token_ids)
            self._metrics.take_end(request.metrics, reason, num_prompt_tokens, request.num_generated_tokens)


def error_of(dead: wire.Dead) -> JaxpageError:
    """The exception that a `Dead` message stands for."""
    kinds: dict[str, type[JaxpageError]] = {kind.__name__: kind for kind in (ModelLoadError, ConfigError)}
    return kinds.get(dead.kind, EngineDeadError)(dead.message)
