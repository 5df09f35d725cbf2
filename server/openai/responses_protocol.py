"""OpenAI's responses protocol as types.

In: the body of a request. Out: a checked `ResponsesRequest`, and its input as chat messages. The response and the
events of a stream are here, too. Fields that are not supported are refused by name, as in `protocol`.
"""

from typing import Any, ClassVar, Literal

import msgspec

from jaxpage.errors import RequestError
from jaxpage.server.openai.chat_protocol import (
    EFFORTS,
    TOOL_CHOICES,
    VERBOSITIES,
    ChatRequest,
    FunctionName,
    NamedTool,
    chat_of,
    check_choice,
    with_effort,
)
from jaxpage.server.openai.protocol import GenerationRequest, Int64, Neutral, PromptTokensDetails
from jaxpage.server.openai.responses_input import messages_of, tool_of
from jaxpage.server.parsing.structure import Structure, structure_of_format

LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that has an effect."""


class ResponsesRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/responses. Options of sampling that OpenAI's protocol lacks are those of chat."""

    neutral: ClassVar[Neutral] = {
        "background": (False,),
        "conversation": (),
        "echo": (False,),
        "logprobs": (),
        "max_tokens": (),
        "max_tool_calls": (),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
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
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    """`effort` is a variable of the chat template; a summary is never made."""

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
        check_choice("text.verbosity", (self.text or {}).get("verbosity"), VERBOSITIES)
        check_choice("reasoning.effort", (self.reasoning or {}).get("effort"), EFFORTS)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens is {self.max_output_tokens}: it must be at least 1, or left out for the rest of "
                "the context",
                "max_output_tokens",
            )

    def chat(self, messages: list[dict[str, Any]]) -> ChatRequest:
        """What is to be answered. Raises `RequestError` that names a tool, or a choice of one, that cannot be used."""
        choice: str | NamedTool | None
        if isinstance(self.tool_choice, dict):
            kind, name = self.tool_choice.get("type"), self.tool_choice.get("name")
            if kind != "function" or not isinstance(name, str):
                raise RequestError(
                    f"tool_choice is of type {kind!r}: it must be {', '.join(TOOL_CHOICES)}, or a function by name",
                    "tool_choice",
                )
            choice = NamedTool(type="function", function=FunctionName(name=name))
        else:
            choice = self.tool_choice
        return chat_of(
            messages,
            tools=[tool_of(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            chat_template_kwargs=with_effort((self.reasoning or {}).get("effort"), self.chat_template_kwargs),
        )

    def messages(self) -> list[dict[str, Any]]:
        """The input as chat messages. Raises `RequestError` that names an item that is no part of a text chat."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return messages_of(self.input)


class TopTextLogprob(msgspec.Struct, kw_only=True):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(TopTextLogprob, kw_only=True):
    """A token of the text, and the most probable ones in its place."""

    top_logprobs: list[TopTextLogprob]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[dict[str, Any]] = msgspec.field(default_factory=list)
    logprobs: list[TextLogprob] = msgspec.field(default_factory=list)


Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """What the model has said."""

    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText] = msgspec.field(default_factory=list)


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of its reasoning."""

    text: str


class Reasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model has said to itself."""

    id: str
    status: Status
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    content: list[ReasoningText] = msgspec.field(default_factory=list)


class FunctionCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """What the model wants to call."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    """JSON text as the model wrote it."""


OutputItem = Reasoning | OutputMessage | FunctionCall


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions = msgspec.field(default_factory=ReasoningOptions)
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
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
    """An item of the output begins or ends."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(msgspec.Struct, kw_only=True):
    """An item's text begins or ends."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextDeltaEvent(msgspec.Struct, kw_only=True):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TextLogprob]


class TextDoneEvent(msgspec.Struct, kw_only=True):
    """All the text."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TextLogprob]


class ReasoningDeltaEvent(msgspec.Struct, kw_only=True):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(msgspec.Struct, kw_only=True):
    """All the reasoning."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(msgspec.Struct, kw_only=True):
    """More arguments of a call."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(msgspec.Struct, kw_only=True):
    """All the arguments of a call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


StreamEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)
