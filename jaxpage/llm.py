"""Offline inference: `LLM(model).generate(prompts)`. The engine runs in its own process, or in the caller's."""

import os
import random
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import zmq
from tqdm import tqdm

from jaxpage import wire
from jaxpage.config import EngineConfig
from jaxpage.engine.process import EngineProcess, envelope, error_of
from jaxpage.errors import ConfigError, EngineDeadError, RequestError
from jaxpage.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from jaxpage.requests.open_request import OpenRequest, Prompt, open_request
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from jaxpage.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jaxpage.models.served_model import ServedModel

_POLL_MS = 250


class _LocalEngine:
    """The engine in the caller's process."""

    def __init__(self, config: EngineConfig, model: "ServedModel | None") -> None:
        from jaxpage.engine.core import EngineCore

        self._core = EngineCore(config, model)
        self.limits = self._core.ready
        self.pid = os.getpid()

    def send(self, message: wire.AddRequest | wire.AbortRequests) -> None:
        if isinstance(message, wire.AddRequest):
            self._core.add(message)
        else:
            for sequence_id in message.sequence_ids:
                self._core.abort(sequence_id)

    def receive(self) -> wire.Outputs:
        return self._core.report(self._core.step())

    def call(self, utility: str, *args: Any) -> Any:
        return self._core.call(utility, *args)

    def stats(self) -> dict[str, float]:
        return self._core.stats()

    def close(self) -> None:
        self._core.close()
        del self._core


class _RemoteEngine:
    """The engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._process = EngineProcess(config, self._context)
        self.pid = self._process.pid
        self._stats: dict[str, float] = {}
        self._num_calls = 0
        self._early: deque[wire.Outputs] = deque()
        """What came while a call was waited for."""
        try:
            ready = self._next()
            assert isinstance(ready, wire.Ready), "an engine is ready before it says anything else"
        except BaseException:
            self.close()
            raise
        self.limits = ready

    def send(self, message: wire.AddRequest | wire.AbortRequests) -> None:
        self._process.requests.send_multipart(envelope(message))

    def receive(self) -> wire.Outputs:
        message = self._early.popleft() if self._early else self._next()
        assert isinstance(message, wire.Outputs)
        self._stats = message.stats
        return message

    def call(self, utility: str, *args: Any) -> Any:
        self._num_calls += 1
        self._process.requests.send_multipart(envelope(wire.Call(self._num_calls, utility, list(args))))
        while not isinstance(message := self._next(), wire.Returned):
            assert isinstance(message, wire.Outputs)
            self._early.append(message)
        if message.error is not None:
            raise RequestError(message.error)
        return message.result

    def stats(self) -> dict[str, float]:
        return self._stats

    def close(self) -> None:
        self._process.stop()
        self._context.destroy(linger=0)

    def _next(self) -> wire.FromEngine:
        while not self._process.outputs.poll(_POLL_MS):
            if (death := self._process.death()) is not None:
                raise death
        message = wire.decode_from_engine(self._process.outputs.recv())
        if isinstance(message, wire.Dead):
            raise error_of(message)
        return message


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
        self.tokenizer = load_tokenizer(self.config.tokenizer_source, self.config.chat_template)
        self._engine = _RemoteEngine(self.config) if multiprocess else _LocalEngine(self.config, given)
        self._close = weakref.finalize(self, self._engine.close)
        self._seeds = random.Random(self.config.seed)
        self._num_requests = 0
        self._unfinished: dict[str, tuple[OpenRequest, deque[RequestOutput]]] = {}
        """Every sequence under way, by what the engine calls it, and where its outputs are waited for."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self._engine.limits.max_model_len

    @property
    def engine_pid(self) -> int:
        """Process id of the engine; this process's own with `multiprocess=False`."""
        return self._engine.pid

    @property
    def stats(self) -> dict[str, float]:
        """How the engine stood after its last step; see `EngineCore.stats`."""
        return self._engine.stats()

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt (text or token ids); results come in the order of the prompts.

        `sampling_params` and `priority` (lower goes first, under the priority policy): one for all, or one per prompt.
        `cache_salt`: cached prefixes are shared only with requests of the same salt. Raises `RequestError` before
        anything runs when one of the requests cannot be served, and `EngineDeadError` when the engine dies.
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
        prompts: Prompt | Sequence[Prompt],
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
        prompts: Prompt | Sequence[Prompt],
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
        yield from self._outputs([self._open(prompt, sampling_params or SamplingParams())])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while any request holds blocks."""
        return bool(self._call("reset_prefix_cache"))

    def kv_cache_snapshot(self) -> dict[str, Any]:
        """How the KV cache stands, as plain data; see `jaxpage.kv_cache.snapshot.take_snapshot`."""
        snapshot: dict[str, Any] = self._call("kv_cache_snapshot")
        return snapshot

    def _call(self, utility: str) -> Any:
        self._check_open()
        return self._engine.call(utility)

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> OpenRequest:
        self._num_requests += 1
        return open_request(
            prompt,
            params,
            request_id=str(self._num_requests),
            seed=self._seeds.getrandbits(63),
            tokenizer=self.tokenizer,
            limits=self._engine.limits,
            priority=priority,
            cache_salt=cache_salt,
        )

    def _run(self, requests: list[OpenRequest], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        show = use_tqdm and len(requests) > 1
        with tqdm(total=len(requests), desc="generating", unit="request", disable=not show) as bar:
            for output in self._outputs(requests):
                if output.finished:
                    results[output.request_id] = output
                    bar.update()
        return [results[request.request_id] for request in requests]

    def _outputs(self, requests: list[OpenRequest]) -> Iterator[RequestOutput]:
        """Send requests and give their outputs as they come, until all are finished. Others may be under way, too."""
        outputs: deque[RequestOutput] = deque()
        sequence_ids = [sequence_id for request in requests for sequence_id in request.sequence_ids]
        num_open = len(requests)
        self._check_open()
        try:
            for request in requests:
                self._unfinished.update(dict.fromkeys(request.sequence_ids, (request, outputs)))
                self._engine.send(request.message)
            while num_open:
                while not outputs:
                    self._check_open()
                    self._deliver(self._engine.receive())
                output = outputs.popleft()
                num_open -= output.finished
                yield output
        finally:
            left = [sequence_id for sequence_id in sequence_ids if self._unfinished.pop(sequence_id, None) is not None]
            if left and self._close.alive:  # interrupted: the next batch starts clean
                self._engine.send(wire.AbortRequests(left))

    def _deliver(self, message: wire.Outputs) -> None:
        """Hand a step's outputs to whoever waits for them."""
        for sequence_id, seconds in message.started:
            if (found := self._unfinished.get(sequence_id)) is not None:
                found[0].start(seconds)
        for output in message.outputs:
            if (found := self._unfinished.get(output.sequence_id)) is None:
                continue  # stopped meanwhile
            request, waiting = found
            result, must_abort = request.take(output)
            if must_abort:
                self._engine.send(wire.AbortRequests([output.sequence_id]))
            if must_abort or output.finish_reason is not None:
                del self._unfinished[output.sequence_id]
            waiting.append(result)

    def _check_open(self) -> None:
        if not self._close.alive:
            raise EngineDeadError("this LLM is closed: make a new one")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt[T](name: str, given: T | Sequence[T], count: int) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{len(given)} {name} for {count} prompts: give one, or one per prompt")
    return list(given)
