"""Offline inference: `LLM(model).generate(prompts)`. The engine runs in its own process, or in the caller's."""

import itertools
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from tqdm import tqdm

from jaxpage.client import Client
from jaxpage.config import EngineConfig
from jaxpage.engine.interrupts import uninterrupted
from jaxpage.engine.links import EngineLink, LocalEngine, RemoteEngine
from jaxpage.errors import ConfigError, EngineDeadError, GenerationError, JaxpageError, RequestError
from jaxpage.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestDelta, RequestOutput
from jaxpage.requests.accumulate import Accumulator
from jaxpage.requests.open_request import PROMPT_FORMS, OpenRequest, Prompt, open_request
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jaxpage.models.served_model import ServedModel

Prompts = Prompt | Sequence[Prompt]
_MOST_NAMED = 8


class LLM:
    """A model, ready to generate.

        llm = LLM(model="smollm2-135m")
        for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

    Options are those of `EngineConfig`. Works at the top level of a script, in `python -c` and in a notebook. Close it
    with `close()` or `with`, or leave that to garbage collection.
    """

    def __init__(
        self, model: "str | ServedModel" = "smollm2-135m", *, multiprocess: bool = True, **options: Any
    ) -> None:
        """`multiprocess=False` runs the engine in this process, which then holds JAX and the model.

        model: as `EngineConfig.model` or, in this process, the value itself. Raises `ConfigError` or `ModelLoadError`.
        """
        given, name = (None, model) if isinstance(model, str) else (model, model.name)
        if given is not None and multiprocess:
            raise ConfigError(
                f"model {name!r} is a value, which cannot be sent to another process: give the import path of a "
                "function that makes it, package.module:function, or multiprocess=False"
            )
        self.config = EngineConfig(model=name, **options)
        if given is not None and self.config.tokenizer is None:
            raise ConfigError(f"model {name!r} is your own, which says nothing of a tokenizer: give tokenizer=...")
        source = self.config.tokenizer_source
        self._engine: EngineLink = RemoteEngine(self.config) if multiprocess else LocalEngine(self.config, given)
        self._made_by = os.getpid()
        self._close = weakref.finalize(self, _close_in, self._made_by, self._engine.close)
        try:  # an engine's own process loads meanwhile
            self.tokenizer = load_tokenizer(source, self.config.chat_template)
        except BaseException:
            self.close()
            raise
        self._seeds = random.Random(self.config.seed)
        self._request_ids = itertools.count(1)
        self._client = Client(self._engine.send)
        self._lock = FairLock()
        """Of the client and the engine: held by the thread that hands something over, or waits for what comes."""
        try:
            while not self._client.is_ready:
                self._take_next()
                if self._client.death is not None:
                    raise self._client.death
        except BaseException:
            self.close()
            raise

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self._client.limits.max_model_len

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; this process's own with `multiprocess=False`."""
        return self._engine.pid

    @property
    def stats(self) -> dict[str, float]:
        """How the engine stood after its last step; see `EngineCore.stats`."""
        with self._lock:
            while self._close.alive and self._engine.has_news:
                self._take_next()
            return self._client.stats

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results come in the order of the prompts.

        prompts: one or several, each a text, its token ids (a list or a NumPy array), or a dict that has either as
        "prompt" or "prompt_token_ids".

        `sampling_params` and `priority` (lower goes first, under the priority policy): one for all, or one per prompt.
        `cache_salt`: cached prefixes are shared only with requests of the same salt. Several threads may call this at
        once, and share the engine's steps. Raises `TypeError` for prompts of another form, `RequestError` before
        anything runs when one of the requests cannot be served, and `EngineDeadError` when the engine dies. If requests
        fail later, the others go on, and `GenerationError` names them and carries all results.
        """
        batch = _as_batch(prompts)
        params = _per_prompt(
            "sampling_params", SamplingParams() if sampling_params is None else sampling_params, len(batch)
        )
        priorities = _per_prompt("priority", priority, len(batch))
        requests = [
            self._open(prompt, one, its_priority, cache_salt)
            for prompt, one, its_priority in zip(batch, params, priorities, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Search each prompt's most probable continuations: `outputs` are the sequences found, best first.

        Each has its `cumulative_logprob` and `score`. Raises as `generate` does.
        """
        batch = _as_batch(prompts)
        priorities = _per_prompt("priority", priority, len(batch))
        requests = [
            self._open(prompt, params, its_priority, cache_salt)
            for prompt, its_priority in zip(batch, priorities, strict=True)
        ]
        return self._run(requests, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt's embedding: its final hidden states, pooled. Raises as `generate` does."""
        batch = _as_batch(prompts)
        params = _per_prompt(
            "pooling_params", PoolingParams() if pooling_params is None else pooling_params, len(batch)
        )
        priorities = _per_prompt("priority", priority, len(batch))
        requests = [
            self._open(prompt, one, its_priority, cache_salt)
            for prompt, one, its_priority in zip(batch, params, priorities, strict=True)
        ]
        return [
            EmbeddingRequestOutput(
                output.request_id,
                output.prompt,
                output.prompt_token_ids,
                EmbeddingOutput(output.outputs[0].embedding or []),
            )
            for output in self._run(requests, use_tqdm)
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        messages: a list of {"role": ..., "content": ...}, or a list of such lists. tools: what the model is told it can
        call, in OpenAI's form; calls are part of the text. chat_template_kwargs: variables for the template, such as
        `enable_thinking`. Raises as `generate` does.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        prompts = [
            self.tokenizer.encode_chat(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, giving its cumulative output after every step. Raises as `generate` does."""
        request = self._open(prompt, sampling_params or SamplingParams())
        accumulator = Accumulator(request)
        for delta in self._deltas([request]):
            accumulator.add(delta)
            yield accumulator.output()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while any request holds blocks."""
        return bool(self._call("reset_prefix_cache"))

    def kv_cache_snapshot(self) -> dict[str, Any]:
        """How the KV cache stands, as plain data; see `jaxpage.kv_cache.snapshot.take_snapshot`."""
        snapshot: dict[str, Any] = self._call("kv_cache_snapshot")
        return snapshot

    def update_params(self, params: Any, version: int | None = None, *, running: str = "keep") -> int:
        """Go on with other weights, with `multiprocess=False` only; see `EngineCore.update_params`.

        params: a pytree of `jax.Array`s as the model's own, on any devices of this process, which stays the caller's:
        its values are copied from device to device, in the engine's own types. All of it is taken, or nothing.
        Returns the version that outputs carry from now on. Raises `RequestError`.
        """
        if not isinstance(self._engine, LocalEngine):
            raise RequestError("this engine has a process of its own, which arrays cannot reach: multiprocess=False")
        updated: int = self._call("update_params", params, version, running)
        return updated

    def _call(self, utility: str, *args: Any) -> Any:
        self._check_open()
        answer: Future[Any] = Future()
        with self._lock, uninterrupted():
            self._client.call(answer, utility, *args)
        while not answer.done():
            with self._lock:
                if not answer.done():
                    self._check_open()
                    self._take_next()
        return answer.result()

    def _take_next(self) -> None:
        """Take in what the engine says next. The lock is held."""
        self._engine.wait()
        with uninterrupted():
            self._client.take(self._engine.receive())

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OpenRequest:
        return open_request(
            prompt,
            params,
            request_id=str(next(self._request_ids)),
            seed=self._seeds.getrandbits(63),
            tokenizer=self.tokenizer,
            limits=self._client.limits,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _run(self, requests: list[OpenRequest], use_tqdm: bool) -> list[RequestOutput]:
        accumulators = {request.request_id: Accumulator(request) for request in requests}
        show = use_tqdm and len(requests) > 1
        with tqdm(total=len(requests), desc="generating", unit="request", disable=not show) as bar:
            for delta in self._deltas(requests):
                accumulators[delta.request_id].add(delta)
                if delta.finished:
                    bar.update()
        outputs = [accumulator.output() for accumulator in accumulators.values()]
        failed = [number for number, output in enumerate(outputs) if _has_failed(output)]
        if failed:
            names = ", ".join(f"{number} (request {outputs[number].request_id})" for number in failed[:_MOST_NAMED])
            more = f" and {len(failed) - _MOST_NAMED} more" if len(failed) > _MOST_NAMED else ""
            raise GenerationError(
                f"{len(failed)} of {len(outputs)} requests failed, those of prompts {names}{more}: the log says why, "
                "and this error's `outputs` hold all results",
                outputs,
            )
        return outputs

    def _deltas(self, requests: list[OpenRequest]) -> Iterator[RequestDelta]:
        """Send requests and give what is new of them, until all are finished. Others may be under way, too."""
        inbox = _Inbox()
        num_open = len(requests)
        try:
            with self._lock:
                self._check_open()
                for request in requests:
                    with uninterrupted():
                        self._client.open(request, inbox)
            while num_open:
                if not inbox.deltas:
                    with self._lock:
                        if not inbox.deltas:  # another thread may have taken it in
                            self._check_open()
                            if inbox.error is not None:
                                raise inbox.error
                            self._take_next()
                    continue
                delta = inbox.deltas.popleft()
                num_open -= delta.finished
                yield delta
        finally:
            if self._close.alive:
                with self._lock, uninterrupted():
                    for request in requests:  # those that are open were interrupted: the next batch starts clean
                        self._client.end(request.request_id, "abort")

    def _check_open(self) -> None:
        if os.getpid() != self._made_by:
            raise EngineDeadError(
                f"this LLM belongs to process {self._made_by}, and a fork of it cannot use it: make an LLM in this "
                "one, or start processes with multiprocessing's method spawn"
            )
        if not self._close.alive:
            raise EngineDeadError("this LLM is closed: make a new one")


class FairLock:
    """A lock that whoever waits gets before the one that has just given it up.

    Its owner may take it again: a stream that nobody reads any more is closed wherever Python collects garbage.
    """

    def __init__(self) -> None:
        self._next, self._held = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != threading.get_ident():
            with self._next:
                self._held.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._held.release()


class _Inbox:
    """Where the deltas of a batch come in."""

    def __init__(self) -> None:
        self.deltas: deque[RequestDelta] = deque()
        self.error: JaxpageError | None = None

    def push(self, delta: RequestDelta) -> None:
        self.deltas.append(delta)

    def fail(self, error: JaxpageError) -> None:
        self.error = error


def _as_batch(prompts: Prompts) -> list[Prompt]:
    """One prompt or several as several. An array with one axis is a prompt."""
    if isinstance(prompts, np.ndarray) and prompts.ndim > 1:
        return list(prompts)
    if isinstance(prompts, np.ndarray) and prompts.dtype.kind in "UOT":
        return [str(text) for text in prompts]
    if isinstance(prompts, str | Mapping | np.ndarray):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a {type(prompts).__name__}: {PROMPT_FORMS}")
    if prompts and isinstance(prompts[0], int | np.integer):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _has_failed(output: RequestOutput) -> bool:
    return any(sequence.finish_reason == "error" for sequence in output.outputs)


def _close_in(pid: int, close: Callable[[], None]) -> None:
    """Close, but not in a fork of the process that has opened it."""
    if os.getpid() == pid:
        close()


def _per_prompt[T](name: str, given: T | Sequence[T], count: int) -> list[T]:
    if isinstance(given, Mapping | str):
        raise TypeError(f"{name} is a {type(given).__name__}: give an object of its class, such as SamplingParams()")
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} {name} for {count} prompts: give one, or one per prompt")
    return list(given)
