"""The engine's streams behind one HTTP request, from the first token to the last.

In: the request's streams, one per prompt. Out: one merged stream of what is new, which ends early and frees what it
holds in the engine when the client leaves, when the engine fails or when the server's time is up.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from jaxpage.outputs import RequestDelta, SequenceDelta
from jaxpage.server.errors import ApiError
from jaxpage.server.openai.logprobs import Entry
from jaxpage.server.openai.protocol import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from jaxpage.async_engine import RequestStream

FAILURES = frozenset({"abort", "error"})
"""Finish reasons of a sequence that the engine has not brought to its end."""


class Generation:
    """The choices of one request, prompt-major: output `j` of stream `i` is choice `i * n + j`.

    Each stream is pumped by its own task into a place for what is new of each choice, so a client that reads slowly
    gets larger steps.
    """

    def __init__(
        self,
        streams: Sequence["RequestStream"],
        n: int,
        on_close: Callable[["Generation"], None],
        timeout: float | None = None,
    ) -> None:
        """`timeout`: seconds after which it ends with a 504; None for no such limit."""
        self._streams = streams
        self._n = n
        self._on_close = on_close
        self._timer = timeout and asyncio.get_running_loop().call_later(timeout, self._time_out, timeout)
        self.first_output_time: float | None = None
        """When the first token came, in seconds as `time.perf_counter` counts them."""
        self._new: dict[int, list[SequenceDelta]] = {}
        self._progress: dict[int, tuple[int, str | None]] = {}
        """Tokens and finish reason of each choice."""
        self._num_cached_tokens = [0] * len(streams)
        self._prompt_logprobs: list[list[Entry] | None] = [None] * len(streams)
        self._num_open = len(streams)
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._pumps = [asyncio.create_task(self._pump(index, stream)) for index, stream in enumerate(streams)]

    @property
    def num_choices_of_each(self) -> int:
        """Of each prompt."""
        return self._n

    @property
    def num_choices(self) -> int:
        """Of all prompts."""
        return len(self._streams) * self._n

    @property
    def is_running(self) -> bool:
        """Whether the engine is not done with all prompts."""
        return self._num_open > 0 and self._failure is None

    @property
    def finish_reason(self) -> str | None:
        """Why its choices have ended, each reason once; None while one has not, or never will."""
        reasons = [reason for _, reason in self._progress.values() if reason is not None]
        return ",".join(sorted(set(reasons))) if reasons and len(reasons) == len(self._progress) else None

    @property
    def usage(self) -> Usage:
        """Tokens so far: a prompt counts once, however many choices it has."""
        prompt_tokens = sum(stream.num_prompt_tokens for stream in self._streams)
        completion_tokens = sum(num_tokens for num_tokens, _ in self._progress.values())
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens)),
        )

    def prompt_logprobs(self, index: int) -> list[Entry] | None:
        """Of the prompt of a choice that has begun, where they are asked for."""
        return self._prompt_logprobs[index // self._n]

    async def started(self) -> None:
        """Returns once there is something to send. Raises what has gone wrong before that."""
        await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    async def updates(self) -> AsyncIterator[tuple[int, SequenceDelta]]:
        """Choice index and what is new of it, whenever there is something. Raises what ends the request early."""
        while True:
            self._changed.clear()
            for index in sorted(self._new):
                yield index, SequenceDelta.joined(self._new.pop(index))
            if self._failure is not None:
                raise self._failure
            if not self._num_open and not self._new:
                return
            await self._changed.wait()

    async def finished(self) -> list[tuple[int, SequenceDelta]]:
        """Index of every choice and all of it, in one piece; a beam search may have found fewer than `n`.

        Raises what ends the request early.
        """
        found: dict[int, list[SequenceDelta]] = {}
        async for index, new in self.updates():
            found.setdefault(index, []).append(new)
        return [(index, SequenceDelta.joined(deltas)) for index, deltas in sorted(found.items())]

    def fail(self, error: Exception) -> None:
        """End the request with `error`, unless it has already failed."""
        self._failure = self._failure or error
        self._changed.set()

    def close(self) -> None:
        """Free everything the request holds; safe at any time and more than once."""
        if self._timer:
            self._timer.cancel()
        for pump in self._pumps:
            pump.cancel()
        for stream in self._streams:
            stream.abort()
        self._on_close(self)

    def _time_out(self, timeout: float) -> None:
        self.fail(
            ApiError(
                504,
                f"the request took more than {timeout:g} s: ask for fewer tokens, or raise --request-timeout",
                code="request_timeout",
                headers={"X-Should-Retry": "false"},  # a client that tries again would only wait as long again
            )
        )

    async def _pump(self, index: int, stream: "RequestStream") -> None:
        try:
            async for delta in stream.deltas():
                self._take(index, delta)
        except Exception as error:
            self.fail(error)
        finally:
            self._num_open -= 1
            self._changed.set()

    def _take(self, stream_index: int, delta: RequestDelta) -> None:
        """Keep what is new. Raises an error if the engine has ended one of the sequences early."""
        if self.first_output_time is None:
            self.first_output_time = time.perf_counter()
        self._num_cached_tokens[stream_index] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[stream_index] = delta.prompt_logprobs
        for new in delta.outputs:
            if new.finish_reason not in FAILURES:
                index = stream_index * self._n + new.index
                num_tokens, _ = self._progress.get(index, (0, None))
                self._progress[index] = num_tokens + len(new.token_ids), new.finish_reason
                self._new.setdefault(index, []).append(new)
                self._changed.set()
        for new in delta.outputs:
            if new.finish_reason in FAILURES:
                raise ApiError(500, f"the engine ended the request early: {new.finish_reason}", code="engine_error")


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves. Raises `ClientDisconnect` then."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
