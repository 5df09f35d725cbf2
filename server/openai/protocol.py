"""OpenAI's protocol as types: what its routes share, and completions. Chat is in `chat_protocol`.

In: the body of a request, any bytes at all. Out: a checked `GenerationRequest`, or `RequestError`. The response structs
are here, too; what OpenAI always sends is always sent, null included.

Unknown fields are tolerated. A known field that jaxpage does not implement is refused as soon as its value would change
the answer; the `neutral` tables list those fields and the values that would not. So is an option of sampling in a beam
search, and one of beam search outside of it. null is the same as absent.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxpage.errors import RequestError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.openai.logprobs import CompletionLogprobs, PromptLogprob
from jaxpage.server.parsing.structure import FIELDS as STRUCTURE_FIELDS
from jaxpage.server.parsing.structure import Structure, structure_of

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Neutral = Mapping[str, tuple[object, ...]]
PromptLogprobs = list[dict[str, PromptLogprob] | None]

NEUTRAL: Neutral = {
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
}
_COMPLETION_NEUTRAL: Neutral = {
    **NEUTRAL,
    "prompt_embeds": (),
    "suffix": ("",),
}
_NEUTRAL_IN_BEAM_SEARCH: Neutral = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "stop": ([],),
    "temperature": (0,),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
    "top_p": (1,),
}
_NEUTRAL_IN_SAMPLING: Neutral = {
    "early_stopping": (False,),
    "length_penalty": (1,),
}


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream carries besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """What every request that needs the model has."""

    neutral: ClassVar[Neutral]
    """Fields that are not supported, and the values that would change nothing."""

    model: str | None = None

    def check(self) -> None:
        """Raises `RequestError` for values that are wrong only together."""


class GenerationRequest(ModelRequest, kw_only=True):
    """The fields that all requests to generate share. Ranges are `SamplingParams`' and `BeamSearchParams`' business."""

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
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    logprobs: bool | Int64 | None = None
    prompt_logprobs: Int64 | None = None
    skip_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None
    logits_processors: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of the stream carries the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report at each generated token, None for no log-probabilities. Raises `RequestError`."""
        raise NotImplementedError  # each route spells it its own way

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same at each token of the prompts."""
        return self.prompt_logprobs

    @property
    def structure(self) -> Structure | None:
        """What the text must be. Raises `RequestError`."""
        return structure_of(self._given(*STRUCTURE_FIELDS))

    def check(self) -> None:
        """Raises `RequestError` for values that are wrong only together, or that no engine option covers."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream=true", "stream_options")
        for name, neutral in (_NEUTRAL_IN_BEAM_SEARCH if self.use_beam_search else _NEUTRAL_IN_SAMPLING).items():
            if (value := getattr(self, name, None)) is not None and not _is_among(value, neutral):
                why = (
                    "beam search does not use it: leave it out" if self.use_beam_search else "it needs use_beam_search"
                )
                raise RequestError(f"{name} is {value!r}, and {why}", name)

        if self.stream and self.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not available in a stream: leave out one of the two", "prompt_logprobs"
            )

    def engine_params(self, max_tokens: int | None, max_model_len: int) -> SamplingParams | BeamSearchParams:
        """What the engine is to do with each prompt; without `max_tokens`, to the end of the context.

        Raises `RequestError` that names the field at fault.
        """
        both = ("stop_token_ids", "ignore_eos", "skip_special_tokens")
        structure = self.structure
        if self.use_beam_search:
            if structure is not None:
                raise RequestError("beam search cannot fit its text to a grammar: leave it out", "use_beam_search")
            options = self._given("length_penalty", "early_stopping", *both)
            width = 1 if self.n is None else self.n
            return BeamSearchParams(
                beam_width=width, max_tokens=max_model_len if max_tokens is None else max_tokens, **options
            )
        options = self._given(
            *(
                "n",
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "seed",
                "min_tokens",
                "stop",
                "include_stop_str_in_output",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "allowed_token_ids",
                "bad_words",
                "logits_processors",
            ),
            *both,
        )
        if isinstance(self.stop, str):
            options["stop"] = (self.stop,)
        return SamplingParams(
            max_tokens=max_tokens,
            logit_bias={_token_id(key): bias for key, bias in (self.logit_bias or {}).items()},
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            structured_outputs=None if structure is None else structure.params,
            **options,
        )

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/completions."""

    neutral: ClassVar[Neutral] = _COMPLETION_NEUTRAL

    prompt: str | list[str | Int64 | list[Int64]]
    best_of: Int64 | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is True:
            raise RequestError("logprobs is true: a completion takes a number, 0 for the tokens' own alone", "logprobs")
        return None if self.logprobs is False else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echo has log-probabilities where the completion has them."""
        if not self.echo or self.num_logprobs is None:
            return self.prompt_logprobs
        if self.prompt_logprobs not in (None, self.num_logprobs):
            raise RequestError(
                f"prompt_logprobs is {self.prompt_logprobs}, and echo gives the prompt's with logprobs="
                f"{self.num_logprobs}: leave it out",
                "prompt_logprobs",
            )
        return self.num_logprobs

    @property
    def num_generated(self) -> int:
        """Choices that are generated of each prompt, of which the best `n` are kept."""
        return self.best_of or self.n or 1

    def check(self) -> None:
        """As for all requests; what is ranked at the end can be neither fewer than `n` nor streamed."""
        super().check()
        if self.best_of is None:
            return
        if self.best_of < (n := self.n or 1):
            raise RequestError(f"best_of is {self.best_of}, and n is {n}: it must be at least as much", "best_of")
        if self.best_of > n and (self.stream or self.use_beam_search):
            other = "a stream" if self.stream else "a beam search"
            raise RequestError(f"best_of is {self.best_of}, and {other} has no choices to leave out", "best_of")

    def engine_params(self, max_tokens: int | None, max_model_len: int) -> SamplingParams | BeamSearchParams:
        """As for all requests, with as many choices, and what they are ranked by, as `best_of` needs."""
        params = super().engine_params(max_tokens, max_model_len)
        if isinstance(params, BeamSearchParams) or self.num_generated == params.n:
            return params
        options = {"n": self.num_generated, "logprobs": params.logprobs or 0}
        return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | options)

    @property
    def only_echo(self) -> bool:
        """Whether nothing is to be generated: the prompt is wanted back, with its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """What became of the prompts."""

    cached_tokens: int
    """Tokens whose KV came from the prefix cache."""


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or what is new of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Response, and chunk of a stream, of /v1/completions."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def decode[RequestT: ModelRequest](body: bytes, request_type: type[RequestT]) -> RequestT:
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


def _token_id(key: str) -> int:
    """A key of `logit_bias`: JSON has texts there."""
    try:
        return int(key)
    except ValueError:
        raise RequestError(f'logit_bias has the key {key!r}: keys are token ids, such as "5"', "logit_bias") from None


def _is_among(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether `value` is one of `neutral`, where false is not 0."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)


def _field_at_fault(message: str) -> str | None:
    """The top-level field that a msgspec message is about: its path, or the name of a missing field."""
    found = re.search(r"at `\$\.(\w+)", message) or re.search(r"missing required field `(\w+)`", message)
    return found and found[1]
