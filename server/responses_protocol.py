"""OpenAI's responses protocol as types.

In: the body of a request. Out: a checked `ResponsesRequest`, and its input as chat messages. The response and the
events of a stream are here, too. Fields that are not supported are refused by name, as in `protocol`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from jaxpage.errors import RequestError
from jaxpage.server.protocol import GenerationRequest, Int64, Neutral, PromptTokensDetails
from jaxpage.server.structure import Structure, structure_of_format

LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that has an effect."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Role in the input to role in the chat template; templates do not know developers."""
_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/responses. Options of sampling that OpenAI's protocol lacks are those of chat."""

    neutral: ClassVar[Neutral] = {
        "background": (False,),
        "conversation": (),
        "echo": (False,),
        "logprobs": (),
        "max_tokens": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "reasoning": ({}, {"effort": "none"}, {"effort": None}, {"effort": None, "summary": None}),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncation": ("disabled",),
        "use_beam_search": (False,),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: Int64 | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: Int64 | None = None

    @property
    def structure(self) -> Structure | None:
        return structure_of_format("text", (self.text or {}).get("format"), super().structure)

    @property
    def num_logprobs(self) -> int | None:
        if LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}, and it needs {LOGPROBS!r} in include", "top_logprobs"
            )
        return None

    def check(self) -> None:
        """As for all requests; `include` may name only what there is."""
        super().check()
        if unknown := sorted(set(self.include or ()) - {LOGPROBS, "reasoning.encrypted_content"}):
            raise RequestError(f"include holds {unknown[0]!r}: only {LOGPROBS!r} is supported", "include")
        if (verbosity := (self.text or {}).get("verbosity")) not in (None, "medium"):
            raise RequestError(f"text.verbosity is {verbosity!r}, and it is not supported: leave it out", "text")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens is {self.max_output_tokens}: it must be at least 1, or left out for the rest of "
                "the context",
                "max_output_tokens",
            )

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages. Raises `RequestError` that names an item that is no text of a message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found = [_message(item, f"input[{index}]") for index, item in enumerate(self.input)]
        return [message for message in found if message is not None]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """An input item as a chat message; None for the model's reasoning, which is not shown to it again."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return None
    if kind != "message":
        raise RequestError(f"{where} is of type {kind!r}: this server takes only messages", "input")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}: it must be one of {', '.join(_ROLES)}", "input")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
    if not isinstance(content, list):
        raise RequestError(f"{where}.content is neither text nor a list of parts", "input")
    return {"role": _ROLES[role], "content": [_part(part, f"{where}.content") for part in content]}


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has a part of type {kind!r}: this server takes only text", "input")
    return {"type": "text", "text": part["text"]}


class TopTextLogprob(msgspec.Struct, kw_only=True):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopTextLogprob, kw_only=True):
    """A token of the text, and the most probable ones in its place."""

    top_logprobs: list[TopTextLogprob]


class OutputText(msgspec.Struct, kw_only=True):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    logprobs: list[TextLogprob] = msgspec.field(default_factory=list)


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(msgspec.Struct, kw_only=True):
    """What the model has said."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """Of the output."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, kw_only=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, kw_only=True):
    """Why a response has failed."""

    code: str
    message: str


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much the model thinks."""

    effort: None = None
    summary: None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, finished or not."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool = True
    previous_response_id: str | None
    reasoning: ReasoningOptions = msgspec.field(default_factory=ReasoningOptions)
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["auto"] = "auto"
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Answer to DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The response begins, goes on or ends."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject


class ItemEvent(msgspec.Struct, kw_only=True):
    """A message begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int = 0
    item: OutputMessage


class PartEvent(msgspec.Struct, kw_only=True):
    """A message's text begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    part: OutputText


class TextDeltaEvent(msgspec.Struct, kw_only=True):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    delta: str
    logprobs: list[TextLogprob]


class TextDoneEvent(msgspec.Struct, kw_only=True):
    """All the text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int = 0
    content_index: int = 0
    text: str
    logprobs: list[TextLogprob]


StreamEvent = ResponseEvent | ItemEvent | PartEvent | TextDeltaEvent | TextDoneEvent
