"""The formats in which models write tool calls, by vLLM's names: a parser and a grammar for each.

hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>                 Hermes, Qwen 2.5 and 3
llama3_json   {"name": "f", "parameters": {...}}; {...}                                Llama 3.1 to 3.3
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}] or [TOOL_CALLS]f[ARGS]{...}
pythonic      [f(a="x"), g(b=1)]                                                       Llama 3.2 and 4
json          [{"name": "f", "parameters": {...}}]               any model, told so by `jaxpage.text.tool_prompt`
"""

from collections.abc import Mapping

from jaxpage.server.parsing.tools.format import ToolFormat
from jaxpage.server.parsing.tools.json_formats import Hermes, JsonList, Llama3Json, Mistral
from jaxpage.server.parsing.tools.pythonic import Pythonic

__all__ = ["TOOL_FORMATS", "ToolFormat"]

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(),
    "pythonic": Pythonic(),
    "json": JsonList(),
}
