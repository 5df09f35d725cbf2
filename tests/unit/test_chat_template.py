"""Chat templates: whatever a model once wrote, a conversation goes on, and a broken template is told at the start."""

from pathlib import Path
from typing import Any

import pytest

from jaxpage.errors import ModelLoadError, RequestError
from jaxpage.text.chat_template import ChatTemplates
from jaxpage.text.tokenizer import load_tokenizer


def called(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    return [{"role": "user", "content": "go"}, call, {"role": "tool", "tool_call_id": "c", "content": "done"}]


TOOLS_TEMPLATE = "{{ tools }}{% for m in messages if m.tool_calls %}{% set a = m.tool_calls[0].function.arguments %}"


@pytest.mark.parametrize(
    ("template", "whole", "cut"),
    [
        ("{{ a | tojson }}", '{"x": 1}', '"{\\"x\\": 1, "'),
        ("{{ '<' + a + '>' }}", '<{"x": 1}>', '<{"x": 1, >'),
        ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}", "x=1", 'arguments={"x": 1, '),
        ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "x=1", 'arguments={"x": 1, '),
    ],
)
def test_no_earlier_call_ends_a_conversation_whatever_a_template_does_with_its_arguments(
    template: str, whole: str, cut: str
) -> None:
    templates = ChatTemplates({"default": TOOLS_TEMPLATE + template + "{% endfor %}"})
    for arguments, expected in (('{"x": 1}', whole), ('{"x": 1, ', cut)):
        assert templates.render(called(arguments), [{"type": "function"}], {}).endswith(expected)


def test_half_a_character_in_an_earlier_call_is_an_unknown_one() -> None:
    templates = ChatTemplates({"default": TOOLS_TEMPLATE + "{{ a.x }}{% endfor %}"})
    text = templates.render(called('{"x": "a\\ud83d, \\ud83d\\ude00"}'), [{"type": "function"}], {})
    assert text.endswith("a\N{REPLACEMENT CHARACTER}, \N{GRINNING FACE}")


def test_a_developer_speaks_as_the_system_where_a_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}"
    assert ChatTemplates({"default": plain}).render(messages, None, {}) == "system: be brief. user: hi. "
    knowing = plain + "{# developer #}"
    assert ChatTemplates({"default": knowing}).render(messages, None, {}) == "developer: be brief. user: hi. "


def test_a_template_that_does_not_compile_is_told_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}\n{{ m.content")
    with pytest.raises(ModelLoadError, match=r"--chat-template .*chat\.jinja does not compile: .* in line 2"):
        load_tokenizer("smollm2-135m", str(tmp_path / "chat.jinja"))
    broken = ChatTemplates({"default": "{% endfor %}"})
    assert list(broken.faults()) == ["default"]
    with pytest.raises(RequestError, match="the model's chat template does not compile"):
        broken.render([{"role": "user", "content": "hi"}], None, {})
