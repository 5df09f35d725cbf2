"""A model's chat templates. In: messages in OpenAI's form. Out: the prompt's text.

Templates come with the model and are written for transformers, so the Jinja environment offers what transformers' does
(https://huggingface.co/docs/transformers/chat_templating_writing). They run in Jinja's sandbox.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpage.errors import RequestError
from jaxpage.text.tool_prompt import spell_out

_SURROGATES = re.compile("[\ud800-\udfff]")
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

        Arguments of earlier calls are given as the template takes them: what a model once wrote, be it cut off, never
        ends a conversation. A developer speaks as the system to templates that know no developers. Raises
        `RequestError` (`param="messages"`) when there is no template, or it refuses the messages.
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
            template = _compile(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template does not compile: {error}", param="messages") from error
        if "developer" not in source:
            plain = [it | {"role": "system"} if it["role"] == "developer" else it for it in plain]
        takes_tools, refusal = self.takes_tools, None
        for form in _ARGUMENT_FORMS if any("tool_calls" in message for message in plain) else _ARGUMENT_FORMS[:1]:
            try:
                formed = [_with_arguments(message, form) for message in plain]
                given = (formed, tools or None) if takes_tools else (spell_out(formed, tools), None)
                named = dict(zip(("messages", "tools"), given, strict=True))
                text: str = template.render({**variables, **named, "documents": None})
            except Exception as error:  # foreign code: whatever it raises is its answer to these messages
                refusal = refusal or error
            else:
                return text
        raise RequestError(f"the chat template refuses these messages: {refusal}", param="messages") from refusal

    def faults(self) -> dict[str, str]:
        """Of the templates that do not compile, by name, why."""
        found = {}
        for name, source in self._sources.items():
            try:
                _compile(source)
            except jinja2.TemplateError as error:
                line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                found[name] = f"{error}{line}"
        return found


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
        arguments = _without_surrogates(parsed if isinstance(parsed, dict) else arguments)
    elif not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments is neither text nor an object", param="messages")
    given = {key: value for key, value in call.items() if value is not None}
    return {**given, "function": {**function, "arguments": arguments}}


def _object_or_text(arguments: Any) -> Any:
    return arguments


def _object(arguments: Any) -> Any:
    return {"arguments": arguments} if isinstance(arguments, str) else arguments


def _text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else _to_json(arguments)


_ARGUMENT_FORMS = (_object_or_text, _object, _text)
"""How templates take the arguments of a call: most as an object, and text that is none as it is; some go through an
object's entries, whatever it is; some append a text."""


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    """A message whose calls have their arguments in a form."""
    if not (calls := message.get("tool_calls")):
        return message
    formed = [
        {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}} for call in calls
    ]
    return message | {"tool_calls": formed}


def _without_surrogates(value: Any) -> Any:
    """Halves of a character that a model has escaped and not completed are told as unknown characters."""
    if isinstance(value, str):
        return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value


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
