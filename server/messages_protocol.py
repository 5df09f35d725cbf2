"""Anthropic's messages protocol as types.

In: the body of a request. Out: a checked `MessagesRequest`, and its conversation as chat messages. The message and the
events of a stream are here, too. Fields that are not supported are refused by name, as in `protocol`.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from jaxpage.errors import RequestError
from jaxpage.server.protocol import GenerationRequest, Int64, Neutral
from jaxpage.server.structure import Structure, structure_of_format

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
        "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "none"}),
        "tools": ([],),
        "use_beam_search": (False,),
    }

    messages: list[dict[str, Any]]
    output_config: dict[str, Any] | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None

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
        if unknown := sorted(name for name, value in (self.output_config or {}).items() if value and name != "format"):
            raise RequestError(f"output_config.{unknown[0]} is not supported: leave it out", "output_config")
        if not self.messages:
            raise RequestError("messages is empty: a conversation needs at least one", "messages")
        if self.messages[-1].get("role") == "assistant":
            raise RequestError(
                "messages ends with one of the assistant's, and going on from there is not supported: end it with one "
                "of the user's",
                "messages",
            )

    def conversation(self) -> list[dict[str, Any]]:
        """System prompt and messages for the chat template. Raises `RequestError` naming one that is not only text."""
        system = [] if not self.system else [{"role": "system", "content": _content(self.system, "system")}]
        return [*system, *(_message(message, f"messages[{i}]") for i, message in enumerate(self.messages))]


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of POST /v1/messages. Options of sampling that Anthropic's protocol lacks are those of chat."""

    max_tokens: Int64

    def check(self) -> None:
        """As for counting; the protocol wants a cap on what is generated."""
        super().check()
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}: it must be at least 1", "max_tokens")


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role is {role!r}: it must be user, assistant or system", "messages")
    return {"role": role, "content": _content(message.get("content"), f"{where}.content")}


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
            raise RequestError(f"{where} has a block of type {kind!r}: this server takes only text", param)
        found.append({"type": "text", "text": block["text"]})
    return found


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, kw_only=True):
    """What the model has said."""

    type: Literal["text"] = "text"
    text: str


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
    content: list[TextBlock]
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
    index: int = 0
    content_block: TextBlock


class TextDelta(msgspec.Struct, kw_only=True):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class BlockDelta(msgspec.Struct, kw_only=True):
    """A block grows."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int = 0
    delta: TextDelta


class BlockStop(msgspec.Struct, kw_only=True):
    """A block ends."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int = 0


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
