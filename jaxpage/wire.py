"""Messages between the API process and the engine process: msgspec structs in msgpack, nothing else.

To the engine: AddRequest, AbortRequests, Call. From the engine: Ready, Outputs, Returned, Dead.
"""

from typing import Any

import msgspec

from jaxpage.sampling_params import BeamSearchParams, Pooling, SamplingParams


def sequence_id(request_id: str, index: int) -> str:
    """What the engine calls sequence `index` of a request; the first has the request's own name."""
    return f"{request_id}#{index}" if index else request_id


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A checked request: everything that depends on the tokenizer or the limits is settled."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    beam: BeamSearchParams | None = None
    """A beam search; `params` then says nothing but how long."""
    bad_words: list[list[int]] = msgspec.field(default_factory=list)
    """Token sequences that must not be generated: what `params.bad_words` are to the tokenizer."""
    pooling: Pooling | None = None
    """How the prompt's hidden states become one, which is all that is asked for; `params` then says nothing."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Drop these sequences; unknown ids are ignored, as they may just have finished."""

    sequence_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call", array_like=True):
    """Run one of the engine's utilities (`EngineCore.UTILITIES`) between two steps."""

    call_id: int
    utility: str
    args: list[Any] = []


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The engine serves from now on, within these limits."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    logits_processors: list[str]
    """Names of the engine's own ones."""
    max_beam_tokens: list[int]
    """Most tokens of each sequence of a beam search 1, 2, ... beams wide: all of them must fit in the KV cache."""
    embedding_size: int
    """Numbers of a hidden state."""
    stats: dict[str, float] = {}
    """How the engine stands; see `EngineCore.stats`."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one token, of the model's own distribution."""

    logprob: float
    """Of the token itself."""
    rank: int
    """How many tokens are more probable, plus one."""
    top: list[tuple[int, float]]
    """(token id, log-probability) of the most probable ones, in order."""
    vocabulary: bytes = b""
    """Of all tokens, as float32 in this machine's order of bytes, where all are asked for."""


class TokenOutput(msgspec.Struct, frozen=True, tag="tokens", array_like=True):
    """What a step gave one sequence; its last output has a finish reason."""

    sequence_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed; in a request's first output."""
    logprobs: list[TokenLogprobs] | None = None
    """At each of its tokens, where they are asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """At the prompt's tokens from the second on, where they are asked for; in a request's first output."""
    ends_in_text: bool = False
    """Whether the last token of an output that has stopped belongs to its text: a grammar lets nothing follow it."""
    pooled: bytes = b""
    """The prompt's pooled hidden states, as float32 in this machine's order of bytes, where they are asked for."""


class BeamSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that a beam search found."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


class BeamOutput(msgspec.Struct, frozen=True, tag="beams", array_like=True):
    """The end of a beam search: its sequences, best first."""

    sequence_id: str
    sequences: list[BeamSequence]
    num_cached_tokens: int = 0

    @property
    def finish_reason(self) -> str:
        """A search gives nothing before its end."""
        return self.sequences[0].finish_reason if self.sequences else "length"


SequenceOutput = TokenOutput | BeamOutput
"""What a step gave one sequence, or one search."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """Everything that a step gave, and how the engine stands."""

    outputs: list[SequenceOutput]
    stats: dict[str, float]
    step_tokens: list[int] = []
    """Tokens of each step dispatched since the last message."""
    started: list[tuple[str, float]] = []
    """Sequences that got a row since then, and when, as `clock.monotonic` counts seconds."""
    weight_version: int = 0
    """Of the weights that gave them."""


class Returned(msgspec.Struct, frozen=True, tag="returned", array_like=True):
    """What a utility gave."""

    call_id: int
    result: Any
    error: str | None = None
    """Why it could not be run; there is no result then."""


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """The engine ends because of this error; `kind` is the exception's class."""

    kind: str
    message: str


ToEngine = AddRequest | AbortRequests | Call
FromEngine = Ready | Outputs | Returned | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
