"""What a request to /v1/responses says besides options: its items as chat messages, and its tools as chats have them.

In: parsed JSON. Out: the same for the chat template, or `RequestError` that names the item.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.errors import RequestError

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Role in the input to role in the chat template; templates do not know developers."""
_TEXT_PARTS = ("input_text", "output_text", "text")


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages, calls and their outputs as chat messages; calls belong to the message before them, if there is one."""
    found: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if message is None:
            continue
        if "tool_calls" in message and found and found[-1]["role"] == "assistant":
            found[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def tool_of(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A tool as chats have it."""
    if (kind := tool.get("type")) != "function":
        raise RequestError(f"{where} is of type {kind!r}: this server has only the functions of its clients", "tools")
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """An input item as a chat message; None for the model's reasoning, which is not shown to it again."""
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return None
    if kind == "function_call":
        name, arguments, call_id = (_text(item, key, where) for key in ("name", "arguments", "call_id"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_part(part, f"{where}.output") for part in output]
        elif not isinstance(output, str):
            raise RequestError(f"{where}.output is neither text nor a list of parts", "input")
        return {"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output}
    if kind != "message":
        raise RequestError(
            f"{where} is of type {kind!r}: this server takes messages, calls of functions and their output", "input"
        )
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where}.role is {role!r}: it must be one of {', '.join(_ROLES)}", "input")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
    if not isinstance(content, list):
        raise RequestError(f"{where}.content is neither text nor a list of parts", "input")
    return {"role": _ROLES[role], "content": [_part(part, f"{where}.content") for part in content]}


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(found := item.get(key), str):
        raise RequestError(f"{where}.{key} is {found!r}: it must be a text", "input")
    return found


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise RequestError(f"{where} has a part of type {kind!r}: this server takes only text", "input")
    return {"type": "text", "text": part["text"]}
