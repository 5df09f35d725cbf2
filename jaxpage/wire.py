"""Messages between the API process and the engine process: msgspec structs in msgpack, nothing else.

To the engine: AddRequest, AbortRequests. From the engine: Ready, Outputs, Dead.
"""

import msgspec

from jaxpage.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """A checked request: everything that depends on the tokenizer or the limits is settled."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Drop these requests; unknown ids are ignored, as they may just have finished."""

    request_ids: list[str]


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    """The engine serves from now on, within these limits."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    num_blocks: int
    block_size: int


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave one request; the last one of a request has a finish reason."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs", array_like=True):
    """Everything that a step gave, and how the engine stands."""

    outputs: list[TokenOutput]
    stats: dict[str, float]


class Dead(msgspec.Struct, frozen=True, tag="dead", array_like=True):
    """The engine ends because of this error; `kind` is the exception's class."""

    kind: str
    message: str


ToEngine = AddRequest | AbortRequests
FromEngine = Ready | Outputs | Dead

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
