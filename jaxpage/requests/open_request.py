"""What the API side knows of a request: checking it on arrival, and what is new of it whenever tokens come.

In: a prompt and `SamplingParams`. Out: an `AddRequest` for the engine, and a `RequestDelta` for each of its outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jaxpage import clock, wire
from jaxpage.errors import RequestError
from jaxpage.outputs import Logprob, RequestDelta, RequestMetrics, SequenceDelta
from jaxpage.requests.detokenize import SequenceText, embedding_of, logprobs_at
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
from jaxpage.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Mapping[str, Any]
"""A text, token ids, or a mapping that has one of both as "prompt" or "prompt_token_ids"."""
PROMPT_FORMS = (
    'a prompt is a text, a list or NumPy array of token ids, {"prompt": text} or {"prompt_token_ids": token ids}'
)
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
        self.prompt = prompt
        """Its prompt, where it was given as text."""
        self._pooling = pooling
        self._tokenizer = tokenizer
        num_sequences = message.params.n if message.beam is None else 1
        self._sequences = [SequenceText(index, message, tokenizer) for index in range(num_sequences)]
        self._by_id = dict(zip(self.sequence_ids, self._sequences, strict=True))
        self._num_cached_tokens = 0
        self._arrival_time = clock.now()
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
    def finish_reason(self) -> str | None:
        """Of its first sequence; None while that grows, and of a beam search that has found nothing."""
        return self._sequences[0].finish_reason if self._sequences else None

    @property
    def metrics(self) -> RequestMetrics:
        """Its moments so far."""
        return RequestMetrics(self._arrival_time, self._scheduled_time, self._first_token_time, self._finished_time)

    @property
    def num_generated_tokens(self) -> int:
        """Of all sequences."""
        return sum(sequence.num_tokens for sequence in self._sequences)

    def note_tokens(self, output: wire.SequenceOutput, now: float) -> NewTokens:
        """How many tokens an output brings, and how long they took; `now` in seconds, as in all calls."""
        is_first, name = not self._token_times, output.sequence_id
        since = self._token_times.get(name)
        self._token_times[name] = now
        beams = output.sequences if isinstance(output, wire.BeamOutput) else [output]
        return NewTokens(
            sum(len(beam.token_ids) for beam in beams), is_first, None if since is None else max(now - since, 0.0)
        )

    def start(self, seconds: float) -> None:
        """Record when its first step was sent to the device, as `clock.monotonic` gave it."""
        self._scheduled_time = self._scheduled_time or clock.at(seconds)

    def take(self, output: wire.SequenceOutput, weight_version: int = 0) -> tuple[RequestDelta, bool]:
        """Take in new tokens. Returns what is new, and whether the engine must be told to stop the sequence.

        A stop string ends a sequence here, where text is known; the engine goes on until it is told.
        """
        self._first_token_time = self._first_token_time or clock.now()
        of_prompt = None
        if output.sequence_id == self.request_id:  # what the other sequences share with this one is no hit
            self._num_cached_tokens = self._num_cached_tokens or output.num_cached_tokens
            if isinstance(output, wire.TokenOutput) and output.prompt_logprobs is not None:
                of_prompt = [None, *self._logprobs_in_prompt(output.prompt_logprobs)]
        if isinstance(output, wire.BeamOutput):
            self._sequences = [
                SequenceText(index, self.message, self._tokenizer) for index in range(len(output.sequences))
            ]
            found = zip(self._sequences, output.sequences, strict=True)
            return self._delta([sequence.take_beam(beam, weight_version) for sequence, beam in found]), False
        sequence = self._by_id[output.sequence_id]
        if sequence.finish_reason is not None:  # what the engine gave before it was told to stop
            return self._delta([]), False
        embedding = None
        if self._pooling is not None and output.pooled:
            embedding = embedding_of(output.pooled, self._pooling)
        delta = sequence.take(output, weight_version, embedding)
        return self._delta([delta], of_prompt), delta.finish_reason is not None and output.finish_reason is None

    def end(self, reason: str) -> RequestDelta:
        """End it from outside ("abort" or "error"). Returns the last of each sequence that had not ended."""
        return self._delta([sequence.end(reason) for sequence in self._sequences if sequence.finish_reason is None])

    def _delta(
        self, outputs: list[SequenceDelta], prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    ) -> RequestDelta:
        finished = self.finished
        if finished and self._finished_time is None:
            self._finished_time = clock.now()
        return RequestDelta(self.request_id, outputs, finished, self._num_cached_tokens, prompt_logprobs)

    def _logprobs_in_prompt(self, found: list[wire.TokenLogprobs]) -> Iterator[dict[int, Logprob]]:
        for token_id, one in zip(self.message.prompt_token_ids[1:], found, strict=True):
            yield logprobs_at(token_id, one, self._tokenizer)


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
    wrong, the limit and the remedy, and `TypeError` for a prompt or parameters of another form.
    """
    if not isinstance(params, SamplingParams | BeamSearchParams | PoolingParams):
        raise TypeError(f"parameters are a {type(params).__name__}: give SamplingParams, or those of another task")
    text, token_ids = read_prompt(prompt, tokenizer)
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


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """A prompt's text, where it has one, and its token ids. Raises `TypeError` for another form."""
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_token_ids") is not None:
            text, token_ids = prompt.get("prompt"), prompt["prompt_token_ids"]
            return text if isinstance(text, str) else None, read_prompt(token_ids, tokenizer)[1]
        if not isinstance(prompt.get("prompt"), str):
            raise TypeError(f"a prompt has the keys {', '.join(map(repr, prompt))}: {PROMPT_FORMS}")
        prompt = prompt["prompt"]
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise TypeError(f"a prompt is an array of {prompt.dtype}, {list(prompt.shape)}: {PROMPT_FORMS}")
        return None, prompt.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt is a {type(prompt).__name__}: {PROMPT_FORMS}")
    given: list[Any] = list(prompt)  # some may be NumPy's own integers
    return None, [int(token_id) if isinstance(token_id, np.integer) else token_id for token_id in given]


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
