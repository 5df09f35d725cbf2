"""Anthropic's messages protocol as types.

In: the body of a request. Out: a checked `MessagesRequest`, and its conversation as chat messages. The message and the
events of a stream are here, too. Fields that are not supported are refused by name, as in `protocol`.
"""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from jaxpage.errors import RequestError
from jaxpage.server.openai.chat_protocol import (
    EFFORTS,
    ChatRequest,
    FunctionName,
    NamedTool,
    chat_of,
    check_choice,
    with_effort,
)
from jaxpage.server.openai.protocol import GenerationRequest, Int64, Neutral
from jaxpage.server.parsing.structure import Structure, structure_of_format

_OUTPUT_CONFIG = ("effort", "format")
_THINKING = ("enabled", "adaptive", "disabled")
_THOUGHTS = ("thinking", "redacted_thinking")
"""Blocks of the model's own thinking, which it is not shown again."""


class CountTokensRequest(GenerationRequest, kw_only=True):
    """Body of POST /v1/messages/count_tokens: that of /v1/messages, where what is generated does not matter."""

    neutral: ClassVar[Neutral] = {
        "container": (),
        "echo": (False,),
        "logprobs": (),
        "mcp_servers": ([],),
        "n": (1,),
        "output_format": (),
        "prompt_logprobs": (),
        "stop": (),
        "stream_options": (),
        "use_beam_search": (False,),
    }

    messages: list[dict[str, Any]]
    output_config: dict[str, Any] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def structure(self) -> Structure | None:
        return structure_of_format("output_config", (self.output_config or {}).get("format"), super().structure)

    @property
    def num_logprobs(self) -> int | None:
        return None

    def check(self) -> None:
        """As for all requests; the conversation must end with somebody else than the model."""
        super().check()
        self.stop = self.stop_sequences
        output_config = self.output_config or {}
        if unknown := sorted(name for name, value in output_config.items() if value and name not in _OUTPUT_CONFIG):
            raise RequestError(f"output_config.{unknown[0]} is not supported: leave it out", "output_config")
        check_choice("output_config.effort", output_config.get("effort"), EFFORTS)
        check_choice("thinking.type", (self.thinking or {}).get("type", ""), ("", *_THINKING))
        if not self.messages:
            raise RequestError("messages is empty: a conversation needs at least one", "messages")
        if self.messages[-1].get("role") == "assistant":
            raise RequestError(
                "messages ends with one of the assistant's, and going on from there is not supported: end it with one "
                "of the user's",
                "messages",
            )

    def chat(self) -> ChatRequest:
        """What is to be answered. Raises `RequestError` naming a message, a tool or a choice that cannot be used."""
        choice, allows_several = _choice(self.tool_choice or {"type": "auto"})
        return chat_of(
            self.conversation(),
            tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=choice,
            parallel_tool_calls=allows_several,
            chat_template_kwargs=self._template_variables(),
            include_reasoning=(self.thinking or {}).get("type") != "disabled",
        )

    def _template_variables(self) -> dict[str, Any]:
        """What templates may know of how much to think; those that know nothing of it leave it to the model."""
        variables = with_effort((self.output_config or {}).get("effort"), self.chat_template_kwargs)
        if isinstance(budget := (self.thinking or {}).get("budget_tokens"), int):
            variables = {"thinking_budget": budget} | variables
        return variables

    def conversation(self) -> list[dict[str, Any]]:
        """System prompt and messages for the chat template. Raises `RequestError` naming one that is no part of it."""
        system = [] if not self.system else [{"role": "system", "content": _content(self.system, "system")}]
        found = [_messages(message, f"messages[{i}]") for i, message in enumerate(self.messages)]
        return [*system, *itertools.chain.from_iterable(found)]


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. Options of sampling that Anthropic's protocol lacks are those of chat."""

    max_tokens: Int64

    def check(self) -> None:
        """As for counting; the protocol wants a cap on what is generated."""
        super().check()
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: it must be at least 1", "max_tokens")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool as chats have it."""
    if (kind := tool.get("type")) not in (None, "custom"):
        raise RequestError(f"{where} is of type {kind!r}: this server has only the functions of its clients", "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _choice(choice: Mapping[str, Any]) -> tuple[str | NamedTool, bool]:
    """Which tools to call as chats have it, and whether there may be several calls."""
    allows_several = not choice.get("disable_parallel_tool_use")
    match choice:
        case {"type": "tool", "name": str() as name}:
            return NamedTool(type="function", function=FunctionName(name=name)), allows_several
        case {"type": "auto" | "any" | "none" as kind}:
            return {"any": "required"}.get(kind, kind), allows_several
    raise RequestError(
        f"tool_choice.type is {choice.get('type')!r}: it must be auto, any, none, or tool with a name", "tool_choice"
    )


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """A message as one of the chat, behind the results that it brings."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role is {role!r}: it must be user, assistant or system", "messages")
    if not isinstance(content, list):
        return [{"role": role, "content": _content(content, f"{where}.content")}]
    kind = {"user": "tool_result", "assistant": "tool_use"}.get(role)
    of_tools: list[Mapping[str, Any]] = []
    others: list[Any] = []
    for block in content:
        is_of_tools = kind is not None and isinstance(block, Mapping) and block.get("type") == kind
        (of_tools if is_of_tools else others).append(block)
    where = f"{where}.content"
    if role == "user":
        results = [_result(block, where) for block in of_tools]
        return [*results, {"role": role, "content": _content(others, where)}] if others or not results else results
    said = {"role": role, "content": _content(others, where)}
    return [said | {"tool_calls": [_call(block, where) for block in of_tools]} if of_tools else said]


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = _content(block.get("content") or "", f"{where}.content")
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id", where), "content": content}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(given := block.get("input"), Mapping):
        raise RequestError(f"{where} has a tool_use whose input is {given!r}: it must be an object", "messages")
    function = {"name": _text(block, "name", where), "arguments": dict(given)}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _text(block: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(found := block.get(key), str):
        raise RequestError(f"{where} has a {block['type']} whose {key} is {found!r}: it must be a text", "messages")
    return found


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    param = where.partition("[")[0]
    if not isinstance(content, list):
        raise RequestError(f"{where} is neither text nor a list of blocks", param)
    found = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind in _THOUGHTS:
            continue
        if kind != "text" or not isinstance(block.get("text"), str):
            raise RequestError(f"{where} has a block of type {kind!r}, which this server does not take there", param)
        found.append({"type": "text", "text": block["text"]})
    return found


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """What the model has said."""

    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model has said to itself."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """What the model wants to call."""

    id: str
    name: str
    input: dict[str, Any]
    """Its arguments; none where the model's are no JSON object, be it that they were cut off."""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message; those that came from the prefix cache are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, kw_only=True):
    """The answer; in a stream, its head."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, kw_only=True):
    """First event."""

    type: Literal["message_start"] = "message_start"
    message: Message


class BlockStart(msgspec.Struct, kw_only=True):
    """A block begins."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More thoughts."""

    thinking: str


class InputDelta(msgspec.Struct, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's arguments, as JSON text."""

    partial_json: str


class BlockDelta(msgspec.Struct, kw_only=True):
    """A block grows."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(msgspec.Struct, kw_only=True):
    """A block ends."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class Stop(msgspec.Struct, kw_only=True):
    """Why a message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, kw_only=True):
    """What is known of a message at its end."""

    type: Literal["message_delta"] = "message_delta"
    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, kw_only=True):
    """Last event."""

    type: Literal["message_stop"] = "message_stop"


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
