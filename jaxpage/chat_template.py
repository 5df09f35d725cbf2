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
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxpage.errors import RequestError


class ChatTemplates:
    """A model's templates by name: "default", perhaps "tool_use" for requests with tools. False when there are none."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)

    def __bool__(self) -> bool:
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt. `variables`: named tokens, `add_generation_prompt` and what the request adds.

        Raises `RequestError` (`param="messages"`) when there is no template, or it refuses the messages.
        """
        if not messages:
            raise RequestError("messages is empty: a chat needs at least one", param="messages")
        plain = [_plain_message(message, index) for index, message in enumerate(messages)]
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise RequestError(
                "this model has no chat template: use the completions endpoint with a prompt in the model's own "
                "format, or put a chat_template.jinja into the model's directory",
                param="messages",
            )
        try:
            template = _compile(self._sources[name])
            text: str = template.render({**variables, "messages": plain, "tools": tools or None, "documents": None})
        except Exception as error:  # foreign code: whatever it raises is its answer to these messages
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error
        return text


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
    return plain


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
