"""A model's chat templates. In: messages in OpenAI's form. Out: the prompt's text.

Templates come with the model and are written for transformers, so the Jinja environment offers what transformers' does
(https://huggingface.co/docs/transformers/chat_templating_writing). They run in Jinja's sandbox.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpage.errors import RequestError
from jaxpage.text.tool_prompt import spell_out

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
)
"""What a request may not set: it has options of its own for them."""


class ChatTemplates:
    """A model's templates by name: "default", perhaps "tool_use" for requests with tools. False when there are none."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def source(self, *, with_tools: bool) -> str | None:
        """The template of requests with or without tools; None when the model has none for them."""
        if with_tools and (source := self._sources.get("tool_use")) is not None:
            return source
        return self._sources.get("default")

    @property
    def takes_tools(self) -> bool:
        """Whether the model is told of tools by its template; otherwise `tool_prompt` does it."""
        source = self.source(with_tools=True)
        return source is not None and "tools" in _variables(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. `variables`: named tokens, `add_generation_prompt` and what the request adds.

        Arguments of earlier calls become objects, as templates expect them; text that is no JSON object stays as it is.
        Raises `RequestError` (`param="messages"`) when there is no template, or it refuses the messages.
        """
        if not messages:
            raise RequestError("messages is empty: a chat needs at least one", param="messages")
        plain = _plain_messages(messages)
        if (source := self.source(with_tools=bool(tools))) is None:
            raise RequestError(
                "this model has no chat template: use the completions endpoint with a prompt in the model's own "
                "format, give a template with --chat-template, or put a chat_template.jinja into the model's directory",
                param="messages",
            )
        try:
            if not self.takes_tools:
                plain, tools = spell_out(plain, tools), None
            template = _compile(source)
            text: str = template.render({**variables, "messages": plain, "tools": tools or None, "documents": None})
        except Exception as error:  # foreign code: whatever it raises is its answer to these messages
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return text


def check_variables(variables: Mapping[str, Any]) -> None:
    """Raises `RequestError` if a request's own variables, such as `enable_thinking`, include what is not its to set."""
    if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
        raise RequestError(f"chat_template_kwargs may not set {', '.join(reserved)}", "chat_template_kwargs")


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates take them. Results get the name of their function, which some templates insist on."""
    plain = [_plain_message(message, index) for index, message in enumerate(messages)]
    names: dict[str, str] = {}
    for message in plain:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "tool" and (name := names.get(message.get("tool_call_id", ""))) is not None:
            message.setdefault("name", name)
    return plain


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message without null fields, its content one string. Raises `RequestError` for what is no text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] needs a role", param="messages")
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.setdefault("content", "")
    if isinstance(content, list):
        plain["content"] = "\n".join(_part_text(part, index) for part in content)
    elif not isinstance(content, str):
        raise RequestError(f"messages[{index}].content is neither text nor a list of parts", param="messages")
    if reasoning := plain.get("reasoning_content") or plain.get("reasoning"):
        plain["reasoning_content"] = plain["reasoning"] = reasoning  # templates know one or the other
    if not isinstance(plain.get("tool_call_id", ""), str):
        raise RequestError(f"messages[{index}].tool_call_id is not a text", param="messages")
    calls = plain.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise RequestError(f"messages[{index}].tool_calls is not a list", param="messages")
    if calls:
        plain["tool_calls"] = [_plain_call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    """An earlier call, its arguments an object. Raises `RequestError` for what is no call of a function."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} needs a function with a name", param="messages")
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where}.id is not a text", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):  # the model has written it: the conversation goes on
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments is neither text nor an object", param="messages")
    given = {key: value for key, value in call.items() if value is not None}
    return {**given, "function": {**function, "arguments": arguments}}


def _part_text(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f"messages[{index}].content has a part of type {kind!r}: this model takes only text", param="messages"
        )
    text: str = part["text"]
    return text


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=16)
def _variables(source: str) -> frozenset[str]:
    """What a template reads and does not set; nothing if it is broken."""
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateError:
        return frozenset()


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
