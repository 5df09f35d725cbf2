"""OpenAI's chat as types: the request with its tools, the answer, and the chunks of a stream.

Reasoning is no part of OpenAI's protocol. It is sent under both names that clients know: `reasoning_content`, which is
DeepSeek's, and `reasoning`, which is vLLM's.
"""

import re
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxpage.errors import RequestError
from jaxpage.server.openai.logprobs import ChatLogprobs
from jaxpage.server.openai.protocol import NEUTRAL, GenerationRequest, Int64, Neutral, PromptLogprobs, Usage

MAX_TOOLS = 1024
"""Most tools of one request. Coding agents send more than the 128 that OpenAI takes."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITIES = ("low", "medium", "high")
TOOL_CHOICES = ("none", "auto", "required")
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHAT_NEUTRAL: Neutral = {
    **NEUTRAL,
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "web_search_options": (),
}


def with_effort(effort: str | None, variables: dict[str, Any] | None) -> dict[str, Any]:
    """Variables of a chat template, with how much the model is to reason; what the client sets itself holds."""
    return ({} if effort is None else {"reasoning_effort": effort}) | (variables or {})


def check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises `RequestError` unless a field is absent or one of these."""
    if value is not None and value not in allowed:
        raise RequestError(f"{field} is {value!r}: it must be one of {', '.join(allowed)}", field.partition(".")[0])


class Function(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""
    strict: bool | None = None

    def check(self, where: str) -> None:
        """Raises `RequestError` unless name and schema are what OpenAI allows."""
        if not _FUNCTION_NAME.fullmatch(self.name):
            raise RequestError(
                f"{where}.name is {self.name!r}: it must be 1 to 64 letters, digits, underscores and dashes", "tools"
            )
        kind = "object" if self.parameters is None else self.parameters.get("type", "object")
        if kind != "object":
            raise RequestError(f'{where}.parameters.type is {kind!r}: it must be "object"', "tools")


class Tool(msgspec.Struct, kw_only=True):
    """An item of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True):
    """Names one of the functions."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/chat/completions. The messages themselves are checked where the template is rendered."""

    neutral: ClassVar[Neutral] = _CHAT_NEUTRAL

    messages: list[dict[str, Any]]
    max_completion_tokens: Int64 | None = None
    top_logprobs: Int64 | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template, for those that know it."""
    verbosity: str | None = None
    """Taken, as clients send it to any model; it changes nothing."""
    tools: list[dict[str, Any]] | None = None
    """As they came, for the template; `functions` are the same, checked."""
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        if not isinstance(self.logprobs, bool | None):
            raise RequestError(
                f"logprobs is {self.logprobs}: it is true or false in a chat, see top_logprobs", "logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError(f"top_logprobs is {self.top_logprobs}, and it needs logprobs=true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The chat template's, without those that the engine sets."""
        return with_effort(self.reasoning_effort, self.chat_template_kwargs)

    def check(self) -> None:
        super().check()
        check_choice("reasoning_effort", self.reasoning_effort, EFFORTS)
        check_choice("verbosity", self.verbosity, VERBOSITIES)
        names = {function.name for function in self.functions}
        if isinstance(self.tool_choice, str) and self.tool_choice not in TOOL_CHOICES:
            raise RequestError(
                f"tool_choice is {self.tool_choice!r}: it must be {', '.join(TOOL_CHOICES)}, or name a function",
                "tool_choice",
            )
        if self.must_call and not names:
            raise RequestError("tool_choice asks for a call, and there are no tools: give some", "tool_choice")
        if self.must_call and self.use_beam_search:
            raise RequestError("tool_choice asks for a call, and beam search can force none: use auto", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {self.tool_choice.function.name!r}, and tools has only "
                f"{', '.join(sorted(names))}: name one of them",
                "tool_choice",
            )

    @property
    def functions(self) -> list[Function]:
        """What may be called; nothing where `tools` is absent or empty. Raises `RequestError` for a wrong tool."""
        try:
            functions = [tool.function for tool in msgspec.convert(self.tools or [], list[Tool])]
        except msgspec.ValidationError as error:
            raise RequestError(f"tools: {error}", "tools") from error
        if len(functions) > MAX_TOOLS:
            raise RequestError(f"tools are {len(functions)}: at most {MAX_TOOLS}", "tools")
        names = set()
        for index, function in enumerate(functions):
            function.check(f"tools[{index}].function")
            if function.name in names:
                raise RequestError(f"tools has several functions called {function.name!r}: rename one", "tools")
            names.add(function.name)
        return functions

    @property
    def may_call(self) -> bool:
        """Whether the model is told of the tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def names_function(self) -> bool:
        """Whether the request says which one is called."""
        return isinstance(self.tool_choice, NamedTool)

    @property
    def must_call(self) -> bool:
        """Whether it has to call one."""
        return self.names_function or self.tool_choice == "required"

    @property
    def callable_functions(self) -> list[Function]:
        """Those that `tool_choice` leaves."""
        if isinstance(choice := self.tool_choice, NamedTool):
            return [function for function in self.functions if function.name == choice.function.name]
        return self.functions if self.may_call else []


def chat_of(
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    tool_choice: str | NamedTool | None = None,
    parallel_tool_calls: bool | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    include_reasoning: bool | None = None,
) -> ChatRequest:
    """The chat in a request of another protocol, checked; `tools` are in this one's form.

    Raises `RequestError` that names `tools` or `tool_choice`.
    """
    request = ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=parallel_tool_calls,
        chat_template_kwargs=chat_template_kwargs,
        include_reasoning=include_reasoning,
    )
    try:
        request.check()
    except RequestError as error:  # where a function lies one level higher
        raise RequestError(str(error).replace("].function.", "]."), error.param) from None
    return request


class FunctionCall(msgspec.Struct, kw_only=True):
    """What the model wants to call; its arguments are JSON text as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """null where there is nothing but reasoning or calls."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
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
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    """What is new of a call: its name comes once, with the first piece."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The same with its place among the calls."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of an answer; the role comes once, in the first delta of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A step of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
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
