"""What the API side knows of a request: checking it on arrival, and turning its tokens into text.

In: a prompt and `SamplingParams`. Out: an `AddRequest` for the engine, and cumulative `RequestOutput`s as tokens come.
"""

import operator
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from jaxpage import wire
from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxpage.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BEAM_CANDIDATES,
    MAX_STOP_TOKEN_IDS,
    BeamSearchParams,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxpage.text.tokenizer import IncrementalDecoder, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""
_MAX_BAD_WORD_LENGTH = 64 * MAX_BAD_WORD_TOKENS
"""Characters of a bad word: what is longer has more tokens than it may."""


class NewTokens(NamedTuple):
    """What a sequence has got, for the metrics."""

    num_tokens: int
    is_first: bool
    """Whether they are the request's first."""
    gap: float | None
    """Seconds since the sequence's last tokens; None before any."""


class OpenRequest:
    """One request from arrival to its end, with all its sequences."""

    def __init__(
        self,
        message: wire.AddRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.message = message
        self._pooling = pooling
        num_sequences = message.params.n if message.beam is None else 1
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._sequences = [_Sequence(index, message, tokenizer) for index in range(num_sequences)]
        self._by_id = dict(zip(self.sequence_ids, self._sequences, strict=True))
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._arrival_time = time.time()
        self._scheduled_time: float | None = None
        self._first_token_time: float | None = None
        self._finished_time: float | None = None
        self._token_times: dict[str, float] = {}

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def sequence_ids(self) -> list[str]:
        """What the engine calls its sequences; a beam search has one name."""
        return [wire.sequence_id(self.request_id, index) for index in range(len(self._sequences))]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finish_reason is not None for sequence in self._sequences)

    @property
    def metrics(self) -> RequestMetrics:
        """Its moments so far."""
        return RequestMetrics(self._arrival_time, self._scheduled_time, self._first_token_time, self._finished_time)

    @property
    def num_generated_tokens(self) -> int:
        """Of all sequences."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    def note_tokens(self, output: wire.SequenceOutput, now: float) -> "NewTokens":
        """How many tokens an output brings, and how long they took; `now` in seconds, as in all calls."""
        is_first, name = not self._token_times, output.sequence_id
        since = self._token_times.get(name)
        self._token_times[name] = now
        beams = output.sequences if isinstance(output, wire.BeamOutput) else [output]
        return NewTokens(
            sum(len(beam.token_ids) for beam in beams), is_first, None if since is None else max(now - since, 0.0)
        )

    def start(self, seconds: float) -> None:
        """Its first step was sent to the device, so many seconds since the Unix epoch; later ones do not count."""
        self._scheduled_time = self._scheduled_time or seconds

    def take(self, output: wire.SequenceOutput) -> tuple[RequestOutput, bool]:
        """Take in new tokens. Returns the request so far, and whether the engine must be told to stop the sequence.

        A stop string ends a sequence here, where text is known; the engine goes on until it is told.
        """
        self._first_token_time = self._first_token_time or time.time()
        if output.sequence_id == self.request_id:  # what the other sequences share with this one is no hit
            self._num_cached_tokens = self._num_cached_tokens or output.num_cached_tokens
            if isinstance(output, wire.TokenOutput) and output.prompt_logprobs is not None:
                self._prompt_logprobs = [None, *self._logprobs_in_prompt(output.prompt_logprobs)]
        if isinstance(output, wire.BeamOutput):
            self._sequences = [
                _Sequence.found(index, self.message, self._tokenizer, beam)
                for index, beam in enumerate(output.sequences)
            ]
            return self._output(), False
        sequence = self._by_id[output.sequence_id]
        if self._pooling is not None and output.pooled:
            sequence.embedding = embedding_of(output.pooled, self._pooling)
        must_abort = sequence.take(output)
        return self._output(), must_abort

    def end(self, reason: str) -> RequestOutput:
        """The request as it stands when it is ended from outside ("abort" or "error")."""
        for sequence in self._sequences:
            sequence.end(reason)
        return self._output()

    def _output(self) -> RequestOutput:
        finished = self.finished
        if finished and self._finished_time is None:
            self._finished_time = time.time()
        return RequestOutput(
            self.request_id,
            self._prompt,
            self.message.prompt_token_ids,
            [sequence.output() for sequence in self._sequences],
            finished,
            self._num_cached_tokens,
            self.metrics,
            self._prompt_logprobs,
        )

    def _logprobs_in_prompt(self, found: list[wire.TokenLogprobs]) -> Iterator[dict[int, Logprob]]:
        for token_id, one in zip(self.message.prompt_token_ids[1:], found, strict=True):
            yield _logprobs_at(token_id, one, self._tokenizer)


class _Sequence:
    """One sequence of a request: tokens in, text out."""

    def __init__(self, index: int, message: wire.AddRequest, tokenizer: Tokenizer) -> None:
        self.finish_reason: str | None = None
        self._index = index
        self._params = message.params
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._decoder = IncrementalDecoder(
            tokenizer,
            message.params.skip_special_tokens,
            message.prompt_token_ids,
            message.params.shown_special_tokens,
        )
        self._text = StopText(message.params)
        self._stop_reason: int | str | None = None
        asked = message.params.logprobs is not None
        self._cumulative_logprob: float | None = 0.0 if asked else None
        self._logprobs: list[dict[int, Logprob]] | None = [] if asked else None
        self._score: float | None = None
        self.embedding: list[float] | None = None
        self._newest: CompletionOutput | None = None

    @classmethod
    def found(cls, index: int, message: wire.AddRequest, tokenizer: Tokenizer, beam: wire.BeamSequence) -> "_Sequence":
        """A sequence that a beam search has found."""
        sequence = cls(index, message, tokenizer)
        stop_token_id = beam.token_ids[-1] if beam.token_ids[-1] in message.params.stop_token_ids else None
        sequence.take(wire.TokenOutput("", beam.token_ids, beam.finish_reason, stop_token_id))
        sequence._cumulative_logprob, sequence._score = beam.cumulative_logprob, beam.score
        return sequence

    def take(self, output: wire.TokenOutput) -> bool:
        """Take in new tokens; returns whether a stop string has ended the sequence before the engine did."""
        if self.finish_reason is not None:
            return False
        self._newest = None
        params = self._params
        reason, stop_reason = output.finish_reason, output.stop_token_id
        stopped: str | None = None
        for position, token_id in enumerate(output.token_ids):
            self._token_ids.append(token_id)
            if output.logprobs is not None and self._logprobs is not None:
                found = output.logprobs[position]
                self._logprobs.append(_logprobs_at(token_id, found, self._tokenizer))
                self._cumulative_logprob = (self._cumulative_logprob or 0.0) + found.logprob
            is_end = reason == "stop" and not output.ends_in_text and position == len(output.token_ids) - 1
            delta = "" if is_end else self._decoder.add([token_id])
            stopped = self._text.add(delta, may_stop=len(self._token_ids) >= params.min_tokens)
            if stopped is not None:
                break
        if stopped is None and reason is not None:
            stopped = self._text.finish(self._decoder.finish(), may_stop=len(self._token_ids) >= params.min_tokens)
        if stopped is not None:
            self.finish_reason, self._stop_reason = "stop", stopped
            return reason is None
        self.finish_reason, self._stop_reason = reason, stop_reason
        return False

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def end(self, reason: str) -> None:
        """End the sequence from outside, unless it has ended."""
        if self.finish_reason is None:
            self._newest = None
            self.finish_reason = reason
            self._text.finish("", may_stop=False)

    def output(self) -> CompletionOutput:
        """The sequence so far; the same object until there is more of it."""
        if self._newest is None:
            self._newest = CompletionOutput(
                self._index,
                self._text.visible,
                list(self._token_ids),
                self.finish_reason,
                self._stop_reason,
                self._cumulative_logprob,
                None if self._logprobs is None else list(self._logprobs),
                self._score,
                self.embedding,
            )
        return self._newest


def _logprobs_at(token_id: int, found: wire.TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log-probabilities by token: the token itself first, then the most probable ones in order."""
    top = _ranked(found.vocabulary) if found.vocabulary else found.top
    ranked = {alternative: (logprob, rank) for rank, (alternative, logprob) in enumerate(top, 1)}
    ranked = {token_id: (found.logprob, found.rank)} | ranked
    return {i: Logprob(logprob, rank, tokenizer.text_of(i)) for i, (logprob, rank) in ranked.items()}


def _ranked(vocabulary: bytes) -> list[tuple[int, float]]:
    """All tokens with their log-probabilities, the most probable first."""
    row = array("f", vocabulary)
    return sorted(enumerate(row), key=operator.itemgetter(1), reverse=True)


class StopText:
    """Text that ends at the earliest stop string to complete. What may belong to one is held back."""

    def __init__(self, params: SamplingParams) -> None:
        self.visible = ""
        """What may be shown; it only grows."""
        self._held = ""
        self._stops = params.stop
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._include = params.include_stop_str_in_output

    def add(self, delta: str, *, may_stop: bool) -> str | None:
        """Add text. Returns the stop string that it completes, if any; without `may_stop` it is plain text."""
        if not self._stops:
            self.visible += delta
            return None
        num_old = len(self._held)
        self._held += delta
        if may_stop and (found := self._first_complete(num_old)) is not None:
            start, stop = found
            self.visible += self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return stop
        keep = self._unfinished_from() if may_stop else max(0, len(self._held) - self._longest + 1)
        self.visible += self._held[:keep]
        self._held = self._held[keep:]
        return None

    def finish(self, delta: str, *, may_stop: bool) -> str | None:
        """The last text. Returns the stop string that it completes, if any."""
        stopped = self.add(delta, may_stop=may_stop)
        if stopped is None:
            self.visible += self._held
            self._held = ""
        return stopped

    def _first_complete(self, num_old: int) -> tuple[int, str] | None:
        """Where the stop string starts whose last character comes first, past the first `num_old` held ones.

        One that was complete before, when it could not stop, is plain text.
        """
        starts = [(self._held.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None

    def _unfinished_from(self) -> int:
        """Where the longest tail begins that may grow into a stop string."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return len(self._held)


def open_request(
    prompt: Prompt,
    params: SamplingParams | BeamSearchParams | PoolingParams,
    *,
    request_id: str,
    seed: int,
    tokenizer: Tokenizer,
    limits: wire.Ready,
    priority: int = 0,
    cache_salt: str | None = None,
) -> OpenRequest:
    """Check a request against the engine's limits. `seed` is used if the request has none.

    `max_tokens` beyond the room that the context leaves is lowered to it. Raises `RequestError` that names what is
    wrong, the limit and the remedy.
    """
    text = prompt if isinstance(prompt, str) else None
    token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not token_ids:
        raise RequestError("the prompt has no tokens: give it at least one", "prompt")
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) >= 2**63:
        raise RequestError(f"priority is {priority!r}: it must be an int64", "priority")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt is {cache_salt!r}: it must be a non-empty string", "cache_salt")
    pooling = None
    if isinstance(params, PoolingParams):
        pooling, params = params, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        _check_pooling(pooling, len(token_ids), limits)
    room = limits.max_model_len - len(token_ids) + (pooling is not None)  # the token that nobody sees needs no place
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, and max_model_len is {limits.max_model_len} with at least one to "
            "generate: shorten it or raise --max-model-len",
            "prompt",
        )
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"the prompt holds {token_id!r}, and token ids are integers in [0, {limits.vocab_size})", "prompt"
            )
    _check_stop_token_ids(params, limits)
    bad_words = [] if isinstance(params, BeamSearchParams) else _bad_word_ids(params, tokenizer)
    if isinstance(params, SamplingParams):
        _check_token_rules(params, bad_words, limits)
        for name in params.logits_processors:
            if name not in limits.logits_processors:
                known = ", ".join(limits.logits_processors) or "none: see --logits-processors"
                raise RequestError(f"logits_processors holds {name!r}, and the engine has {known}", "logits_processors")
        if params.structured_outputs is not None:
            check_structure(params.structured_outputs, tokenizer, limits)
    beam = params if isinstance(params, BeamSearchParams) else None
    if beam is not None:
        beam = _fit_beams(beam, len(token_ids), room, limits)
        params = SamplingParams(
            temperature=0,
            max_tokens=beam.max_tokens,
            ignore_eos=beam.ignore_eos,
            stop_token_ids=beam.stop_token_ids,
            skip_special_tokens=beam.skip_special_tokens,
            shown_special_tokens=beam.shown_special_tokens,
        )
    assert isinstance(params, SamplingParams)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, and {max_tokens} tokens is all that max_tokens and the context of "
            f"{limits.max_model_len} leave: lower it",
            "min_tokens",
        )
    if params.seed is not None and params.seed != -1:
        seed = params.seed
    kind = None if pooling is None else pooling.pooling
    message = wire.AddRequest(
        request_id, token_ids, params, seed, max_tokens, priority, cache_salt, beam, bad_words, kind
    )
    return OpenRequest(message, text, tokenizer, pooling)


def embedding_of(pooled: bytes, params: PoolingParams) -> list[float]:
    """Pooled hidden states (float32) as they are asked for."""
    vector = np.frombuffer(pooled, np.float32)[: params.dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    found: list[float] = (vector / length if params.normalize and length else vector).astype(np.float32).tolist()
    return found


def check_structure(structured: StructuredOutputsParams, tokenizer: Tokenizer, limits: wire.Ready) -> None:
    """Raises `RequestError` that names what of it cannot be honoured. The first time takes milliseconds to seconds."""
    from jaxpage.structured.grammar import check_tokens, grammar_of

    if not limits.eos_token_ids:
        raise RequestError(
            "the model has no end-of-sequence token, which ends a text that fits a grammar: leave structured_outputs "
            "out",
            "structured_outputs",
        )
    grammar = grammar_of(structured, tokenizer.special_tokens)
    check_tokens(structured, grammar, tokenizer.for_grammars(limits.vocab_size, limits.eos_token_ids))


def _check_pooling(pooling: PoolingParams, num_tokens: int, limits: wire.Ready) -> None:
    if num_tokens > limits.max_model_len:
        raise RequestError(
            f"the prompt has {num_tokens} tokens, and max_model_len is {limits.max_model_len}: shorten it or raise "
            "--max-model-len",
            "prompt",
        )
    if pooling.dimensions is not None and pooling.dimensions > limits.embedding_size:
        raise RequestError(
            f"dimensions is {pooling.dimensions}, and the model's embeddings have {limits.embedding_size}: lower it",
            "dimensions",
        )


def _check_stop_token_ids(params: SamplingParams | BeamSearchParams, limits: wire.Ready) -> None:
    for token_id in params.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token_id}, and token ids are below {limits.vocab_size}", "stop_token_ids"
            )
    num_stops = len({*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)})
    if num_stops > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids and the model's EOS ids are {num_stops}, and {MAX_STOP_TOKEN_IDS} fit: give fewer",
            "stop_token_ids",
        )
    if isinstance(params, BeamSearchParams) and params.beam_width + num_stops > MAX_BEAM_CANDIDATES:
        raise RequestError(
            f"beam_width is {params.beam_width}, and with {num_stops} ending tokens it must be at most "
            f"{MAX_BEAM_CANDIDATES - num_stops}: lower it, or give fewer stop_token_ids",
            "beam_width",
        )


def _bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences of `bad_words`, each as it stands within a word and, behind a space, at the start of one.

    Nothing is encoded beyond what fits: it would keep all other requests waiting.
    """
    found: dict[tuple[int, ...], None] = {}
    num_long = 0
    for word in dict.fromkeys(params.bad_words):
        if len(word) > _MAX_BAD_WORD_LENGTH:
            raise RequestError(
                f"bad_words holds a text of {len(word)} characters, and {_MAX_BAD_WORD_LENGTH} is the most: forbid a "
                "part of it",
                "bad_words",
            )
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if len(token_ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"bad_words holds {word!r} of {len(token_ids)} tokens, and {MAX_BAD_WORD_TOKENS} is the most: "
                    "forbid a part of it",
                    "bad_words",
                )
            if token_ids and token_ids not in found:
                found[token_ids] = None
                num_long += len(token_ids) > 1
        if num_long > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words are more than {MAX_BAD_WORDS} sequences of several tokens: give fewer", "bad_words"
            )
    return [list(token_ids) for token_ids in found]


def _check_token_rules(params: SamplingParams, bad_words: Sequence[Sequence[int]], limits: wire.Ready) -> None:
    """All ids are in the vocabulary, and masks leave a token to draw from the first step on."""
    for name, token_ids in (
        ("logit_bias", params.logit_bias),
        ("allowed_token_ids", params.allowed_token_ids or ()),
    ):
        for token_id in token_ids:
            if token_id >= limits.vocab_size:
                raise RequestError(f"{name} holds {token_id}, and token ids are below {limits.vocab_size}", name)
    forbidden = {token_ids[0] for token_ids in bad_words if len(token_ids) == 1}
    if params.min_tokens:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)}
    allowed = params.allowed_token_ids
    if (len(forbidden) >= limits.vocab_size) if allowed is None else forbidden.issuperset(allowed):
        name = "bad_words" if allowed is None else "allowed_token_ids"
        raise RequestError(
            f"{name} leaves no token to generate: all are stop tokens before min_tokens, or bad words", name
        )


def _fit_beams(beam: BeamSearchParams, num_prompt_tokens: int, room: int, limits: wire.Ready) -> BeamSearchParams:
    """A search lowered to the room that the context leaves, if all its beams can run at once."""
    if beam.beam_width > limits.max_num_seqs:
        raise RequestError(
            f"beam_width is {beam.beam_width}, and {limits.max_num_seqs} sequences run at once: lower it or raise "
            "--max-num-seqs",
            "beam_width",
        )
    max_tokens = min(beam.max_tokens, room)
    most = limits.max_beam_tokens[beam.beam_width - 1]
    if num_prompt_tokens + max_tokens > most + 1:
        raise RequestError(
            f"{beam.beam_width} beams of {num_prompt_tokens} + {max_tokens} tokens do not fit in the KV cache, "
            f"which holds {most} tokens of each: lower beam_width or max_tokens, or raise --num-blocks",
            "beam_width",
        )
    return msgspec.structs.replace(beam, max_tokens=max_tokens)
