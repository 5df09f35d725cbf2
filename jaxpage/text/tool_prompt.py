"""Tools in plain words, for models whose chat template has no place for them.

In: messages in OpenAI's form, with tools, calls and results. Out: messages of system, user and assistant alone, which
any template takes. Calls are a JSON list of `{"name", "parameters"}`, in the instructions and where the assistant has
made some.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTIONS = """\
You can call these functions, given by name, description and JSON schema of their parameters:
{functions}
To call functions, answer with a JSON list and nothing else: [{{"name": "...", "parameters": {{...}}}}]. \
If no call is needed, answer in plain words."""


def spell_out(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The messages in words, checked ones; `tools` are told of in the system message, or in the user's first."""
    spelled: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        if calls := message.get("tool_calls"):
            found = [{"name": call["function"]["name"], "parameters": call["function"]["arguments"]} for call in calls]
            words = [message["content"], json.dumps(found, ensure_ascii=False)]
            message = {"role": message["role"], "content": "\n".join(filter(None, words))}
        is_result = message["role"] == "tool"
        if is_result:
            content = f"{message.get('name', 'The function')} returned: {message['content']}"
            message = {"role": "user", "content": content}
        if follows_result and message["role"] == "user":  # templates may insist that roles alternate
            message = {**message, "content": f"{spelled.pop()['content']}\n{message['content']}"}
        spelled.append(dict(message))
        follows_result = is_result
    return _with_instructions(spelled, tools) if tools else spelled


def _with_instructions(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    functions = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = INSTRUCTIONS.format(functions=functions)
    for index, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            order = (message["content"], text) if message["role"] == "system" else (text, message["content"])
            informed = {**message, "content": "\n\n".join(filter(None, order))}
            return [*messages[:index], informed, *messages[index + 1 :]]
    return [{"role": "user", "content": text}, *messages]
