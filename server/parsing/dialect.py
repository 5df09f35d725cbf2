"""What the served model writes besides plain content: its format of tool calls and of reasoning.

In: the server's options and the model's chat template. Out: a `Dialect`. A template decides only where it is
unmistakable; the choice is logged.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jaxpage.server.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from jaxpage.server.parsing.tools import TOOL_FORMATS, ToolFormat
from jaxpage.server_config import AUTO, ServerConfig

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

FALLBACK = TOOL_FORMATS["json"]
"""Of forced calls, where nothing tells how the model writes them."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How the model writes."""

    tools: ToolFormat | None = None
    """None: calls that are not forced cannot be told from content."""
    reasoning: ReasoningFormat | None = None
    """None: all of an answer is content."""
    special_token_ids: Mapping[str, int] = field(default_factory=dict)
    """Of the formats' marks that are special tokens."""
    reads_unforced_calls: bool = True
    """Whether calls are read that the model has chosen to make."""

    def terminal(self, mark: str) -> str:
        """How a grammar in Lark's notation names a mark."""
        token_id = self.special_token_ids.get(mark)
        return f'"{mark}"' if token_id is None else f"<[{token_id}]>"

    def special_tokens(self, marks: Iterable[str]) -> list[str]:
        """Those of `marks` that text leaves out unless it is asked for them."""
        return [mark for mark in marks if mark in self.special_token_ids]


def dialect_of(engine: "AsyncEngine", options: ServerConfig) -> Dialect:
    """The dialect of the engine's model. Logs what is chosen, and why."""
    templates = engine.chat_templates
    by_template = _tool_format_of(templates.source(with_tools=True), templates.takes_tools)
    tools = _chosen("tool_call_parser", options.tool_call_parser, by_template)
    by_template = _reasoning_format_of(templates.source(with_tools=False) or "")
    reasoning = _chosen("reasoning_parser", options.reasoning_parser, by_template)
    tool_format, reasoning_format = TOOL_FORMATS.get(tools), REASONING_FORMATS.get(reasoning)
    marks = [
        *(FALLBACK if tool_format is None else tool_format).marks,
        *(() if reasoning_format is None else reasoning_format.marks),
    ]
    special_token_ids = {}
    for mark in marks:
        token_ids = engine.encode(mark, add_special_tokens=False)
        if len(token_ids) == 1 and not engine.decode(token_ids):
            special_token_ids[mark] = token_ids[0]
    return Dialect(tool_format, reasoning_format, special_token_ids, options.enable_auto_tool_choice)


def _chosen(option: str, given: str, found: tuple[str, str]) -> str:
    """The format's name, "none" for none. `found`: what the template says, and how one sees it."""
    name, why = found if given == AUTO else (given, "as given")
    logger.info("%s=%s (%s)", option, name, why)
    return name


def _tool_format_of(source: str | None, takes_tools: bool) -> tuple[str, str]:
    if source is None:
        return "none", "the model has no chat template"
    if not takes_tools:
        return "json", "its chat template has no place for tools, which are told of in plain words"
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return "hermes", "its chat template writes <tool_call>"
    if "[TOOL_CALLS]" in source:
        return "mistral", "its chat template writes [TOOL_CALLS]"
    if "[func_name1(" in source:
        return "pythonic", "its chat template asks for [func_name1(...)]"
    if "<|start_header_id|>" in source and '"parameters": ' in source:
        return "llama3_json", 'its chat template is Llama 3\'s and writes "parameters"'
    return "none", "its chat template is none that is known: give --tool-call-parser"


def _reasoning_format_of(source: str) -> tuple[str, str]:
    if "</think>" in source:
        return "qwen3", "its chat template knows </think>"
    if "[/THINK]" in source:
        return "mistral", "its chat template knows [/THINK]"
    return "none", "its chat template knows no reasoning"
