"""OpenAI's completions and chat protocol as types.

In: the body of a request, any bytes at all. Out: a checked `CompletionRequest` or `ChatRequest`, or `RequestError`. The
response structs are here, too; what OpenAI always sends is always sent, null included.

Unknown fields are tolerated. A known field that jaxpage does not implement is refused as soon as its value would change
the answer; the `neutral` tables list those fields and the values that would not. null is the same as absent.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxpage.errors import RequestError
from jaxpage.sampling_params import SamplingParams

MAX_N = 128
"""Most choices for one prompt."""
INT64_MAX = 2**63 - 1

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=INT64_MAX)]
Neutral = Mapping[str, tuple[object, ...]]

_NEUTRAL: Neutral = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "cache_salt": (),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
_COMPLETION_NEUTRAL: Neutral = {
    **_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "prompt_embeds": (),
    "suffix": ("",),
}
_CHAT_NEUTRAL: Neutral = {
    **_NEUTRAL,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """The fields that completions and chat share. Ranges are `SamplingParams`' business."""

    neutral: ClassVar[Neutral]

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    min_tokens: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Raises `RequestError` for values that are wrong only together, or that no engine option covers."""
        if self.stream_options is not None:
            if not self.stream:
                raise RequestError("stream_options is only allowed with stream=true", "stream_options")
            if self.stream_options.continuous_usage_stats:
                raise RequestError("stream_options.continuous_usage_stats is not supported", "stream_options")
        if self.n is not None and not 1 <= self.n <= MAX_N:
            raise RequestError(f"n is {self.n}: it must be in [1, {MAX_N}]", "n")
        if self.n is not None and self.n > 1 and self.temperature == 0:
            raise RequestError(f"n is {self.n}: it must be 1 with temperature 0, as all choices would be equal", "n")

    def sampling_params(self, max_tokens: int | None) -> list[SamplingParams]:
        """The options of each of the `n` choices. Raises `RequestError` that names the field at fault."""
        options: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_tokens": self.min_tokens,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop_str_in_output": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
        }
        given = {name: value for name, value in options.items() if value is not None}
        return [
            SamplingParams(max_tokens=max_tokens, seed=choice_seed(self.seed, choice), **given)
            for choice in range(self.n or 1)
        ]


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    neutral: ClassVar[Neutral] = _COMPLETION_NEUTRAL

    prompt: str | list[str | Int64 | list[Int64]]
    add_special_tokens: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions. The messages themselves are checked where the template is rendered."""

    neutral: ClassVar[Neutral] = _CHAT_NEUTRAL

    messages: list[dict[str, Any]]
    max_completion_tokens: Int64 | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None
    stop_reason: int | str | None


class Completion(msgspec.Struct, kw_only=True):
    """Response, and chunk of a stream, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of an answer; the role comes once, in the first delta of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A step of one answer."""

    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """Chunk of a stream of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


def decode[RequestT: GenerationRequest](body: bytes, request_type: type[RequestT]) -> RequestT:
    """The typed request in `body`. Raises `RequestError` that names the field at fault, whatever the bytes are."""
    try:
        fields = msgspec.json.decode(body)
        if not isinstance(fields, dict):
            raise RequestError("the body is not a JSON object")
        for name, neutral in request_type.neutral.items():
            if (value := fields.get(name)) is not None and not _is_among(value, neutral):
                raise RequestError(f"{name} is not supported by this server: leave it out", name)
        request = msgspec.convert(fields, request_type)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), _field_at_fault(str(error))) from error
    except msgspec.DecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    request.check()
    return request


def choice_seed(seed: int | None, choice: int) -> int | None:
    """The seed of the given choice: `seed + choice`, wrapped to int64 and never -1, which would mean no seed."""
    if seed is None or seed == -1:
        return None
    shifted = seed + choice
    if seed < -1 <= shifted:
        shifted += 1
    return shifted if shifted <= INT64_MAX else shifted - 2**64


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` is one of `neutral`, where false is not 0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _field_at_fault(message: str) -> str | None:
    """The top-level field that a msgspec message is about: its path, or the name of a missing field."""
    found = re.search(r"at `\$\.(\w+)|missing required field `(\w+)`", message)
    return found and (found[1] or found[2])
