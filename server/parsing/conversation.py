"""A chat request in the engine's terms, for every route that is a chat: tokens in, parts of a message out.

    conversation = converse(service.engine, service.dialect, request)       # a checked `ChatRequest`
    generation = service.admit(id, [conversation.token_ids], conversation.params, ...)
    splitter = conversation.splitter()                                      # one for each choice
    delta = splitter.feed(new_text)                                         # again and again; then, at the end,
    delta = splitter.finish()                                               # or splitter.split(whole_text) at once
    reason = conversation.finish_reason(splitter, output.finish_reason)

`converse` raises `RequestError` that names the field at fault, before anything runs; what the engine raises on
admission goes through `conversation.as_client_error`. What the deltas are is said in `splitter`. A route of another
shape makes a `ChatRequest` of its own request first (`chat_protocol.chat_of`), and says its other options as `params`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jaxpage.errors import RequestError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams
from jaxpage.server.openai.chat_protocol import ChatRequest
from jaxpage.server.parsing.dialect import FALLBACK, Dialect
from jaxpage.server.parsing.reader import Reader, Reading
from jaxpage.server.parsing.reasoning import ReasoningFormat
from jaxpage.server.parsing.splitter import Parts, Splitter
from jaxpage.server.parsing.tools import ToolFormat
from jaxpage.server.parsing.tools.json_formats import Hermes

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine

NUM_PROMPT_END_TOKENS = 32
"""Of a prompt's end that tell whether it has begun, or ended, the reasoning."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the engine is to do, and how its text is read."""

    token_ids: list[int]
    params: SamplingParams | BeamSearchParams
    prompt_end: str
    reasoning: ReasoningFormat | None
    tools: ToolFormat | None
    """None: the text has no calls to look for."""
    names: frozenset[str]
    """Of the functions that may be called."""
    max_num_calls: int | None
    enforces_calls: bool
    """Whether a grammar says how they are written."""
    names_function: bool
    """Whether the request says which function is called."""
    shows_reasoning: bool

    def splitter(self, new_call_id: Callable[[], str] | None = None) -> Splitter:
        """For the text of one choice. `new_call_id`: instead of the format's own."""
        parts = Parts(
            new_call_id or (self.tools.new_call_id if self.tools is not None else str),
            max_num_calls=self.max_num_calls,
            shows_reasoning=self.shows_reasoning,
        )
        return Splitter(self._read if self.reasoning or self.tools else None, parts)

    def finish_reason(self, splitter: Splitter, reason: str | None) -> str | None:
        """Why a choice has ended: "tool_calls" where the model has chosen to call, as OpenAI has it."""
        return "tool_calls" if reason == "stop" and splitter.has_calls and not self.names_function else reason

    def as_client_error(self, error: RequestError) -> RequestError:
        """The engine's refusal of a grammar that was made of the request's tools, by the field that it knows."""
        if self.enforces_calls and error.param in ("grammar", "structured_outputs"):
            return RequestError(f"tools: the parameters of a function cannot be enforced: {error}", "tools")
        return error

    def _read(self, reader: Reader, parts: Parts) -> Reading[None]:
        if self.reasoning is not None:
            yield from self.reasoning.read(reader, parts, self.prompt_end)
        if self.tools is not None:
            yield from self.tools.read(reader, parts, self.names)
        yield from reader.rest(parts.content)


def converse(
    engine: "AsyncEngine",
    dialect: Dialect,
    request: ChatRequest,
    params: SamplingParams | BeamSearchParams | None = None,
) -> Conversation:
    """The request in the engine's terms. params: what a route of another shape says besides the chat itself."""
    functions = request.callable_functions
    token_ids = engine.encode_chat(
        request.messages, tools=_told_tools(request), chat_template_kwargs=request.template_variables
    )
    prompt_end = engine.decode(token_ids[-NUM_PROMPT_END_TOKENS:], skip_special_tokens=False)
    tools = dialect.tools if functions and dialect.reads_unforced_calls else None
    if params is None:
        params = request.engine_params(max_tokens(request), engine.max_model_len)
    several = request.parallel_tool_calls is not False and not request.names_function
    enforces = request.must_call
    if request.must_call:
        tools = dialect.tools or FALLBACK
        rules = functools.partial(tools.rules, functions, dialect.terminal, several=several)
        params = _forced(params, _checked(lambda: "start: calls\n" + rules()))
    elif isinstance(tools, Hermes) and _may_enforce(params) and any(function.strict for function in functions):
        grammar = _checked(lambda: tools.grammar_among_text(functions, dialect.terminal, several=several))
        params, enforces = _forced(params, grammar), True
    if isinstance(params, SamplingParams) and (structure := params.structured_outputs) is not None:
        structure = msgspec.structs.replace(structure, preamble=_preamble(dialect, prompt_end))
        params = msgspec.structs.replace(params, structured_outputs=structure)
    marks = [*(tools.marks if tools else ()), *(dialect.reasoning.marks if dialect.reasoning else ())]
    if special := dialect.special_tokens(marks):
        params = msgspec.structs.replace(params, shown_special_tokens=tuple(special))
    return Conversation(
        token_ids,
        params,
        prompt_end,
        dialect.reasoning,
        tools,
        frozenset(function.name for function in functions),
        1 if request.parallel_tool_calls is False else None,
        enforces,
        request.names_function,
        request.include_reasoning is not False,
    )


def max_tokens(request: ChatRequest) -> int | None:
    """The cap on generated tokens, None for the rest of the context; `max_completion_tokens` wins over the old name."""
    name, value = "max_tokens", request.max_tokens
    if request.max_completion_tokens is not None:
        name, value = "max_completion_tokens", request.max_completion_tokens
    if value is not None and value < 1:
        raise RequestError(f"{name} is {value}: it must be at least 1, or left out for the rest of the context", name)
    return value


def _told_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as the chat template is to show them: without nulls, and what only the server has to know."""
    if not request.may_call or request.tools is None:
        return None
    return [
        {
            **{key: value for key, value in tool.items() if value is not None},
            "function": {k: v for k, v in tool["function"].items() if v is not None and k != "strict"},
        }
        for tool in request.tools
    ]


def _may_enforce(params: SamplingParams | BeamSearchParams) -> bool:
    """Whether nothing else says what the text must be."""
    return isinstance(params, SamplingParams) and params.structured_outputs is None


def _checked(make_grammar: Callable[[], str]) -> str:
    """A grammar of calls. Raises `RequestError` for what none can be made of."""
    try:
        return make_grammar()
    except ValueError as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(
            f"tools: the parameters of a function cannot be used as a schema: {error}", "tools"
        ) from error


def _forced(params: SamplingParams | BeamSearchParams, grammar: str) -> SamplingParams:
    """`params` with a grammar for the text."""
    assert isinstance(params, SamplingParams), "a search can force no call, and is refused"
    if params.structured_outputs is not None:
        raise RequestError(
            "tool_choice asks for a call, and another option says what the text must be: leave out one of the two",
            "tool_choice",
        )
    return msgspec.structs.replace(params, structured_outputs=StructuredOutputsParams(grammar=grammar))


def _preamble(dialect: Dialect, prompt_end: str) -> str | None:
    """Lark's rules for the reasoning before an answer that has to fit a grammar; None where there can be none."""
    reasoning = dialect.reasoning
    if reasoning is None or reasoning.is_over(prompt_end):
        return None
    begin, end = map(dialect.terminal, reasoning.marks)
    if reasoning.is_open(prompt_end):
        preamble = "preamble: thoughts GAP"
    elif reasoning.always:
        preamble = f"preamble: {begin}? thoughts GAP"
    else:
        preamble = f"preamble: ({begin} thoughts GAP)?"
    thoughts = f"thoughts: TEXT {end}" if end.startswith("<") else f"thoughts[suffix={end}]: TEXT"
    return "\n".join([preamble, thoughts, "TEXT: /(?s:.*)/", "GAP: /\\n{0,2}/"])
