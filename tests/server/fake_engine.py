"""An engine of a few lines with `AsyncEngine`'s interface: one token per character, answers and faults by script.

It runs on the server's event loop; tests read and set its flags from their own thread, and it polls them.
"""

import asyncio
import dataclasses
import math
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from jaxpage.errors import EngineDeadError, JaxpageError, RequestError
from jaxpage.metrics import Metrics
from jaxpage.outputs import CompletionOutput, Logprob, RequestDelta, RequestMetrics, RequestOutput, SequenceDelta
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, nth_seed
from jaxpage.structured.grammar import grammar_of
from jaxpage.text.chat_template import ChatTemplates, check_variables

POLL_SECONDS = 0.002
NUM_BLOCKS = 600
BLOCK_SIZE = 4
KEPT_BLOCK_IDS = [1, 590, 591, 592]
"""Cached blocks; the first is shared by all requests that run."""
VOCAB_SIZE = 0x110000
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<bot>"
FOREVER = 10**9


@dataclass(frozen=True, slots=True)
class Script:
    """How the fake answers a prompt. Seeded sequences get their seed in front of the text, beams their rank."""

    text: str = "Hello wörld, 漢字 🦙!"
    stall_after: int = FOREVER
    """Tokens after which nothing comes any more."""
    fail_after: int = FOREVER
    """Tokens after which `error` is raised."""
    error: Exception = field(default_factory=lambda: RuntimeError("a fault of the engine's own"))
    end_after: int = FOREVER
    """Tokens after which the engine ends the request's last sequence with `end_reason`."""
    end_reason: str = "error"
    num_beams: int = FOREVER
    """Most sequences that a beam search finds."""
    num_cached_tokens: int = 0
    """Of the prompt."""
    delay: float = 0.0
    """Seconds before each token."""


class FakeEngine:
    """`scripts` maps a piece of the prompt to how it is answered; other prompts get `Script()`."""

    def __init__(
        self,
        model_name: str = "fake",
        *,
        max_model_len: int = 64,
        max_num_seqs: int = 1000,
        bos: bool = False,
        load_seconds: float = 0.0,
        load_error: JaxpageError | None = None,
        chat_template: str | None = CHAT_TEMPLATE,
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.max_num_seqs = max_num_seqs
        self.bos = bos
        self.load_seconds = load_seconds
        self.load_error = load_error
        self.chat_templates = ChatTemplates({} if chat_template is None else {"default": chat_template})
        self.scripts: dict[str, Script] = {}
        self.is_ready = False
        self.is_dead = False
        self.is_shut_down = False
        self.waiting: list[FakeStream] = []
        self.running: list[FakeStream] = []
        self.num_resets = 0
        self.num_snapshots = 0
        self.snapshot_seconds = 0.0
        """How long a snapshot takes, as when the engine is in a long step."""
        self.seen_params: list[SamplingParams | BeamSearchParams | PoolingParams] = []
        self.seen_prompts: list[list[int]] = []
        self.seen_options: list[dict[str, Any]] = []
        self.seen_template_kwargs: list[dict[str, Any]] = []
        self.encoding_threads: list[int] = []
        self.metrics = Metrics(self.model_name)
        self.calls: list[tuple[object, ...]] = []
        """Pauses, sleeps and profiles that were asked for."""

    @property
    def num_open(self) -> int:
        """Requests that hold anything in the engine."""
        return len(self.waiting) + len(self.running)

    async def start(self) -> None:
        pass

    async def wait_ready(self) -> None:
        await asyncio.sleep(self.load_seconds)
        if self.load_error is not None:
            raise self.load_error
        self.is_ready = True

    async def wait_dead(self) -> None:
        while not self.is_dead:
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        self.is_shut_down = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoding_threads.append(threading.get_ident())
        return [1] * (self.bos and add_special_tokens) + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self.token_text, token_ids))

    def token_text(self, token_id: int) -> str:
        if 0xD800 <= token_id < 0xE000:
            return "\ufffd"  # half a character, which no text may hold
        return chr(token_id) if token_id != 1 else ""

    async def prepare(self, params: SamplingParams | BeamSearchParams) -> None:
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            grammar_of(params.structured_outputs, frozenset())

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        kwargs = chat_template_kwargs or {}
        check_variables(kwargs)
        self.seen_template_kwargs.append(
            kwargs if add_generation_prompt else {**kwargs, "add_generation_prompt": False}
        )
        return self.encode(self.chat_templates.render(messages, tools, kwargs), add_special_tokens=False)

    @property
    def stats(self) -> dict[str, float]:
        return {
            "num_requests_running": len(self.running),
            "num_requests_waiting": len(self.waiting),
            "kv_cache_usage_perc": self._snapshot()["num_used"] / NUM_BLOCKS,
            "prefix_cache_queries": 8,
            "prefix_cache_hits": 2,
        }

    async def kv_cache_snapshot(self) -> dict[str, Any]:
        self._check_alive()
        self.num_snapshots += 1
        await asyncio.sleep(self.snapshot_seconds)
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        """Each request holds the first block, and as many of the next as its other tokens fill."""
        requests, first = [], 2
        for held in self.running:
            num_tokens = held.num_prompt_tokens + held.num_tokens
            end = first + -(-num_tokens // BLOCK_SIZE) - 1
            table, first = [1, *range(first, end)], end
            requests.append(
                {
                    "request_id": held.request_id,
                    "num_tokens": num_tokens,
                    "num_cached_tokens": 0,
                    "block_tables": [table],
                }
            )
        num_used = first - 1 if requests else 0
        return {
            "null_block_id": 0,
            "num_blocks": NUM_BLOCKS,
            "num_used": num_used,
            "num_free": NUM_BLOCKS - num_used,
            "num_cached": len(KEPT_BLOCK_IDS),
            "cached_block_ids": KEPT_BLOCK_IDS,
            "requests": requests,
        }

    async def pause(self, mode: str) -> None:
        self._check_alive()
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"mode is {mode!r}", "mode")
        self.calls.append(("pause", mode))

    async def resume(self) -> None:
        self.calls.append(("resume",))

    async def is_paused(self) -> bool:
        return self.calls[-1:] not in ([], [("resume",)])

    async def sleep(self, *, offload_weights: bool) -> None:
        self.calls.append(("sleep", offload_weights))

    async def wake_up(self) -> None:
        self.calls.append(("wake_up",))

    async def is_sleeping(self) -> bool:
        return self.calls[-1:] == [("sleep", True)]

    async def profile(self, seconds: float, folder: str) -> None:
        self.calls.append(("profile", seconds, folder))

    async def reset_prefix_cache(self) -> bool:
        self._check_alive()
        self.num_resets += not self.running
        return not self.running

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> "FakeStream":
        self._check_alive()
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("prompt has no tokens", "prompt")
        if not all(0 <= token_id < VOCAB_SIZE for token_id in ids):
            raise RequestError(f"prompt has a token id that is not in [0, {VOCAB_SIZE})", "prompt")
        if len(ids) >= self.max_model_len:
            raise RequestError(f"prompt has {len(ids)} tokens, max_model_len is {self.max_model_len}", "prompt")
        self.seen_params.append(params)
        self.seen_prompts.append(ids)
        self.seen_options.append(options)
        text = "".join(map(chr, ids))
        script = next((script for piece, script in self.scripts.items() if piece in text), Script())
        stream = FakeStream(self, request_id or "", ids, params, script)
        self.waiting.append(stream)
        return stream

    def _check_alive(self) -> None:
        if self.is_dead:
            raise EngineDeadError("the engine process is gone")


class FakeStream:
    """The answer to one request: every sequence grows by a character at a time; beams are shown when all is done."""

    def __init__(
        self,
        engine: FakeEngine,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        script: Script,
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = len(prompt_ids)
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._script = script
        self._params = params if isinstance(params, SamplingParams) else SamplingParams()
        self._pooling = params if isinstance(params, PoolingParams) else None
        room = engine.max_model_len - len(prompt_ids)
        wanted = 1 if isinstance(params, PoolingParams) else params.max_tokens
        self._limit = room if wanted is None else min(wanted, room)
        self.num_tokens = 0
        self._finished = False
        self._is_search = isinstance(params, BeamSearchParams)
        if isinstance(params, BeamSearchParams):
            self._stops: tuple[str, ...] = ()
            self._texts = [f"{rank}:{script.text}" for rank in range(min(params.beam_width, script.num_beams))]
        elif isinstance(params, PoolingParams):
            self._stops, self._texts = (), [" "]
        else:
            self._stops = params.stop
            seeds = [None if params.seed is None else nth_seed(params.seed, i) for i in range(params.n)]
            self._texts = [script.text if seed is None else f"{seed}:{script.text}" for seed in seeds]
        self._outputs = [CompletionOutput(index, "", []) for index in range(len(self._texts))]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        while not (output := await self._step()).finished and self._is_search:
            pass
        return output

    async def deltas(self) -> AsyncIterator[RequestDelta]:
        known: dict[int, CompletionOutput] = {}
        async for output in self:
            new = []
            for whole in output.outputs:
                before = known.get(whole.index, CompletionOutput(whole.index, "", []))
                if whole is not before and (whole.token_ids or whole.finish_reason is not None):
                    new.append(difference(before, whole))
                known[whole.index] = whole
            yield RequestDelta(self.request_id, new, output.finished, output.num_cached_tokens, output.prompt_logprobs)

    def abort(self) -> None:
        self._finished = True
        for held in (self._engine.waiting, self._engine.running):
            if self in held:
                held.remove(self)

    async def _step(self) -> RequestOutput:
        await asyncio.sleep(self._script.delay)
        while self in self._engine.waiting and len(self._engine.running) >= self._engine.max_num_seqs:
            await self._pause(1 + len(self._engine.waiting) // 8)
        if self in self._engine.waiting:
            self._engine.waiting.remove(self)
            self._engine.running.append(self)
        while self.num_tokens >= self._script.stall_after:
            await self._pause()
        if self.num_tokens >= self._script.fail_after:
            self.abort()
            raise self._script.error
        self._check_alive()
        self.num_tokens += 1
        self._engine.metrics.take_tokens(1, None)
        if self.num_tokens == 1:
            self._engine.metrics.take_first_token(RequestMetrics(0.0, 0.0, 0.25), self.num_prompt_tokens)
        for index, output in enumerate(self._outputs):
            if output.finish_reason is None:
                self._outputs[index] = self._grown(index)
        outputs = list(self._outputs)
        finished = all(output.finish_reason is not None for output in outputs)
        if finished:
            self.abort()
        num_cached_tokens = self._script.num_cached_tokens
        output = RequestOutput(self.request_id, None, self._prompt_ids, outputs, finished, num_cached_tokens)
        if (wanted := self._params.prompt_logprobs) is None:
            return output
        entries = [logprobs_of(token_id, wanted) for token_id in self._prompt_ids[1:]]
        return dataclasses.replace(output, prompt_logprobs=[None, *entries])

    async def _pause(self, times: int = 1) -> None:
        self._check_alive()
        await asyncio.sleep(times * POLL_SECONDS)

    def _check_alive(self) -> None:
        if self._engine.is_dead:
            self.abort()
            raise EngineDeadError("the engine process is gone")

    def _grown(self, index: int) -> CompletionOutput:
        if self._pooling is not None:
            return CompletionOutput(0, "", [], "stop", embedding=embedding_of(self._prompt_ids, self._pooling))
        whole, is_last = self._texts[index], index == len(self._texts) - 1
        text, finish_reason, stop_reason = whole[: self.num_tokens], None, None
        if self.num_tokens == len(whole):
            finish_reason = "stop"
        if stops := [stop for stop in self._stops if stop in text]:
            text, finish_reason, stop_reason = text[: text.index(stops[0])], "stop", stops[0]
        elif self.num_tokens == self._limit:
            finish_reason = "length"
        elif self.num_tokens == self._script.end_after and is_last:
            finish_reason = self._script.end_reason
        elif finish_reason is None:
            tails = (start for start in range(len(text)) if any(stop.startswith(text[start:]) for stop in self._stops))
            text = text[: next(tails, len(text))]  # the rest is held back: it may be the start of a stop string
        token_ids = [ord(character) for character in whole[: self.num_tokens]]
        logprobs = None
        if (wanted := self._params.logprobs) is not None:
            logprobs = [logprobs_of(token_id, wanted) for token_id in token_ids]
        cumulative = None if logprobs is None else -float(len(token_ids) * (index % 3))
        return CompletionOutput(index, text, token_ids, finish_reason, stop_reason, cumulative, logprobs)


def difference(before: CompletionOutput, after: CompletionOutput) -> SequenceDelta:
    """What is new of a sequence."""
    return SequenceDelta(
        after.index,
        after.text[len(before.text) :],
        after.token_ids[len(before.token_ids) :],
        after.finish_reason,
        after.stop_reason,
        after.cumulative_logprob,
        None if after.logprobs is None else after.logprobs[len(before.token_ids) :],
        after.score,
        after.embedding,
    )


def logprobs_of(token_id: int, wanted: int) -> dict[int, Logprob]:
    """Of a token that ranks third, with the letters from A on before and behind it."""
    entry = {token_id: Logprob(-1.5, 3, chr(token_id))}
    return entry | {65 + i: Logprob(-0.5 * (i + 1), i + 1, chr(65 + i)) for i in range(wanted)}


def embedding_of(prompt_ids: Sequence[int], params: PoolingParams) -> list[float]:
    """Length, and last token of a prompt or the mean of all: the first `dimensions` of these."""
    found = [len(prompt_ids), prompt_ids[-1] if params.pooling == "last" else sum(prompt_ids) / len(prompt_ids)]
    found = found[: params.dimensions]
    return [number / (math.hypot(*found) if params.normalize else 1.0) for number in found]
