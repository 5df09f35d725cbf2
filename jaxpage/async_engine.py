"""The asynchronous engine of the API process: requests in, streams of outputs out, aborts, and the engine's death.

add_request ─ ZMQ ─> engine process
RequestStream <─ text <─ tokens <─ ZMQ ─┘
"""

import asyncio
import itertools
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, cast

import zmq
import zmq.asyncio

from jaxpage import wire
from jaxpage.client import Client, error_of
from jaxpage.config import EngineConfig
from jaxpage.engine.process import EngineProcess, envelope
from jaxpage.errors import EngineDeadError, JaxpageError, RequestError
from jaxpage.metrics import Metrics
from jaxpage.outputs import RequestDelta, RequestOutput
from jaxpage.requests.accumulate import Accumulator
from jaxpage.requests.open_request import OpenRequest, Prompt, check_structure, open_request
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.text.chat_template import ChatTemplates
from jaxpage.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

PAUSE_MODES = ("abort", "wait", "keep")

_WATCH_SECONDS = 0.25
"""How often the engine process is looked after."""
_WAIT_SECONDS = 0.02
"""How often a pause looks whether all requests have ended."""


class RequestStream:
    """Cumulative outputs of one request, to be read with `async for`, or what is new of it (`deltas`).

    A slow reader skips to the newest output, and gets larger deltas. Whoever breaks off such a loop, or is cancelled in
    it, ends the request.
    """

    def __init__(self, client: Client, request: OpenRequest) -> None:
        self._client = client
        self._request = request
        self._accumulator = Accumulator(request)
        self._pending: list[RequestDelta] = []
        self._error: JaxpageError | None = None
        self._over = False
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.message.prompt_token_ids)

    async def __aiter__(self) -> AsyncGenerator[RequestOutput]:
        """The newest output whenever there is more; the last one is `finished`. Raises as `deltas` does."""
        async for delta in self.deltas():
            self._accumulator.add(delta)
            yield self._accumulator.output()

    async def __anext__(self) -> RequestOutput:
        """The newest output, for whoever waits for them one by one. Raises as `deltas` does."""
        try:
            delta = await self._next()
        except asyncio.CancelledError:
            self.abort()
            raise
        if delta is None:
            raise StopAsyncIteration
        self._accumulator.add(delta)
        return self._accumulator.output()

    async def deltas(self) -> AsyncGenerator[RequestDelta]:
        """What is new, whenever there is something; the last one is `finished`.

        Read either these or the outputs. Raises `EngineDeadError` if the engine dies.
        """
        try:
            while (delta := await self._next()) is not None:
                yield delta
        finally:
            self.abort()

    def abort(self) -> None:
        """End the request and free what it holds; nothing happens if it is over."""
        self._client.end(self.request_id, "abort")

    def push(self, delta: RequestDelta) -> None:
        """For the client: there is more."""
        self._pending.append(delta)
        self._changed.set()

    def fail(self, error: JaxpageError) -> None:
        """For the client: the stream ends with this error."""
        self._error = error
        self._changed.set()

    async def _next(self) -> RequestDelta | None:
        """All that has come since the last call, at least one delta; None when the request is over."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._over:
                return None
            self._changed.clear()
            await self._changed.wait()
        delta = RequestDelta.joined(self._pending)
        self._pending.clear()
        self._over = delta.finished
        return delta


class AsyncEngine:
    """One engine process, and every request that is open on it. Belongs to one event loop.

    async with AsyncEngine(EngineConfig(model="smollm2-135m")) as engine:
        async for output in engine.add_request("The capital of France is", SamplingParams(temperature=0)):
            print(output.outputs[0].text)
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: EngineProcess | None = None
        self._tokenizer: Tokenizer | None = None
        self.metrics = Metrics(self.model_name)
        self._client = Client(self._send, self.metrics)
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = asyncio.Event()
        self._dead = asyncio.Event()
        self._stopping = False
        self._seeds = random.Random(config.seed)
        self._ids = itertools.count()

    @property
    def model_name(self) -> str:
        """The model as given, without a trailing slash."""
        return self._config.model.rstrip("/") or self._config.model

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        return self._ready.is_set() and not self.is_dead

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    @property
    def stats(self) -> dict[str, float]:
        """The engine's newest word on how it stands; see `EngineCore.stats`."""
        return self._client.stats

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output; known once ready."""
        return self._client.limits.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once; known once ready."""
        return self._client.limits.max_num_seqs

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; known once ready."""
        return self._client.limits.vocab_size

    async def __aenter__(self) -> "AsyncEngine":
        """Start, and return when requests are served. Raises what keeps the engine from starting."""
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Launch the engine process and load the tokenizer meanwhile. Raises `ModelLoadError` for a bad tokenizer."""
        self._process = EngineProcess(
            self._config, cast("zmq.Context[zmq.Socket[bytes]]", zmq.asyncio.Context.instance())
        )
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        source, template = self._config.tokenizer_source, self._config.chat_template
        self._tokenizer = await asyncio.to_thread(load_tokenizer, source, template)

    async def wait_ready(self) -> None:
        """Return when requests are served. Raises what kept the engine from starting."""
        waits = [asyncio.create_task(event.wait()) for event in (self._ready, self._dead)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._client.death is not None:
            raise self._client.death

    async def wait_dead(self) -> None:
        """Return when the engine process has died."""
        await self._dead.wait()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `RequestError` for text that is no valid Unicode."""
        assert self._tokenizer is not None, "start() comes first"
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        assert self._tokenizer is not None, "start() comes first"
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token that stands alone."""
        assert self._tokenizer is not None, "start() comes first"
        return self._tokenizer.text_of(token_id)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a chat by the model's template. Raises `RequestError` naming a bad message."""
        assert self._tokenizer is not None, "start() comes first"
        return self._tokenizer.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )

    @property
    def chat_templates(self) -> ChatTemplates:
        """The model's."""
        assert self._tokenizer is not None, "start() comes first"
        return self._tokenizer.chat_templates

    async def prepare(self, params: SamplingParams | BeamSearchParams | PoolingParams) -> None:
        """Check in a thread what takes long to check, which is then known to `add_request`. Raises `RequestError`."""
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            limits = self._client.limits
            assert self._tokenizer is not None
            await asyncio.to_thread(check_structure, params.structured_outputs, self._tokenizer, limits)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Check a request and hand it to the engine. Options as in `LLM.generate`, `beam_search` and `embed`.

        Raises `RequestError` for a request that cannot be served and `EngineDeadError` when the engine is gone.
        """
        limits = self._client.limits
        assert self._tokenizer is not None
        request = open_request(
            prompt,
            params,
            request_id=f"{request_id or 'request'}-{next(self._ids)}-{uuid.uuid4().hex[:8]}",
            seed=self._seeds.getrandbits(63),
            tokenizer=self._tokenizer,
            limits=limits,
            priority=priority,
            cache_salt=cache_salt,
        )
        stream = RequestStream(self._client, request)
        self._client.open(request, stream)
        return stream

    def abort(self, request_id: str) -> None:
        """End a request, which gives its stream a last output; an unknown id is ignored."""
        self._client.end(request_id, "abort")

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while any request holds blocks."""
        return bool(await self._call("reset_prefix_cache"))

    async def kv_cache_snapshot(self) -> dict[str, Any]:
        """How the KV cache stands, as plain data; see `jaxpage.kv_cache.snapshot.take_snapshot`."""
        snapshot: dict[str, Any] = await self._call("kv_cache_snapshot")
        return snapshot

    async def pause(self, mode: str = "abort") -> None:
        """Stop generating until `resume`; requests that come meanwhile wait.

        What runs or waits is ended ("abort"), brought to its end first ("wait") or kept as it stands ("keep"). Raises
        `RequestError` for another mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"mode is {mode!r}: it must be one of {', '.join(PAUSE_MODES)}", "mode")
        if mode == "abort":
            for request_id in self._client.open_ids:
                self.abort(request_id)
        waited_for = self._client.open_ids
        await self._call("pause", mode == "keep")
        while mode == "wait" and waited_for & self._client.open_ids:
            await asyncio.sleep(_WAIT_SECONDS)
            assert self._client.limits, "raises when the engine is gone"

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._call("resume")

    async def is_paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def sleep(self, *, offload_weights: bool = True) -> None:
        """Free the KV cache, and the weights' memory on the device, until `wake_up`. Requests are kept."""
        await self._call("sleep", offload_weights)

    async def wake_up(self) -> None:
        """Take the device's memory again and go on; what ran is computed anew."""
        await self._call("wake_up")

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def profile(self, seconds: float, folder: str) -> None:
        """Trace the engine for so long; `folder` then holds what TensorBoard and Perfetto read."""
        await self._call("start_profile", folder)
        try:
            await asyncio.sleep(seconds)
        finally:
            await self._call("stop_profile")

    async def close(self) -> None:
        """End the engine process; open requests end with `EngineDeadError`. Idempotent."""
        self._stopping = True
        self._die(EngineDeadError("the engine was closed"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)

    async def _call(self, utility: str, *args: Any) -> Any:
        """Run one of the engine's utilities.

        Raises `RequestError` with its own error, and `EngineDeadError` when the engine is gone.
        """
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._client.call(answer, utility, *args)
        return await answer

    def _send(self, message: wire.ToEngine) -> None:
        assert self._process is not None
        # The socket has no high-water mark: the message is queued at once, in order; the future is done.
        self._process.requests.send_multipart(envelope(message))

    async def _receive(self) -> None:
        """Everything that the engine says, as long as it lives. If we cannot take it in, nothing may wait for more."""
        assert self._process is not None
        socket = cast("zmq.asyncio.Socket", self._process.outputs)
        try:
            while True:
                self._take(wire.decode_from_engine(await socket.recv()))
        except Exception as error:
            logger.exception("cannot process engine output")
            self._die(EngineDeadError(f"cannot process engine output: {error!r}"))

    def _take(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Ready() as limits:
                self.metrics.set_config(
                    {
                        "block_size": limits.block_size,
                        "num_gpu_blocks": limits.num_blocks,
                        "enable_prefix_caching": self._config.enable_prefix_caching,
                    }
                )
                self._client.take(message)
                self._ready.set()
            case wire.Dead():
                self._die(error_of(message))
            case _:
                self._client.take(message)

    async def _watch(self) -> None:
        """Notice a death without last words."""
        assert self._process is not None
        while (death := self._process.death()) is None:
            await asyncio.sleep(_WATCH_SECONDS)
        await asyncio.sleep(_WATCH_SECONDS)  # last words may still be on their way
        self._die(death)

    def _die(self, error: JaxpageError) -> None:
        """End every open request with `error`. The first death counts."""
        if self.is_dead:
            return
        self._client.die(error)
        self._dead.set()
        if self._ready.is_set() and not self._stopping:
            logger.error("engine: %s", error)
