"""Which formats of calls and reasoning a chat template stands for, and which of their marks are special tokens."""

import logging
from typing import Any

import pytest
from chats import QWEN3, ask, engine, function
from fake_engine import FakeEngine, Script

from jaxpage.errors import ConfigError
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.parsing.dialect import Dialect, dialect_of
from jaxpage.server.parsing.reasoning import REASONING_FORMATS
from jaxpage.server.parsing.tools import TOOL_FORMATS
from jaxpage.server_config import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig
from jaxpage.text.chat_template import ChatTemplates

TEMPLATES = {
    "hermes": QWEN3,
    "llama3_json": """<|start_header_id|>{{ messages }}{{ '{"name": "f", "parameters": ' }}{{ tools }}""",
    "mistral": "[INST]{{ messages }}[/INST][AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
    "pythonic": "{{ messages }}{{ tools }} in the format [func_name1(params_name1=params_value1), func_name2(params)]",
    "json": "{{ messages }}",
    None: "{{ messages }}{{ tools }}<tool_call><function=name><parameter=name>",
}


def dialect(template: str | None, **options: str) -> Dialect:
    return dialect_of(FakeEngine(chat_template=template), ServerConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_a_template_tells_how_calls_are_written(name: str | None, template: str) -> None:
    assert dialect(template).tools is (None if name is None else TOOL_FORMATS[name])


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("qwen3", QWEN3),
        ("qwen3", "{{ messages }}{{ content.split('</think>') }}"),
        ("mistral", "{{ messages }}[THINK][/THINK]"),
        (None, "{{ messages }}"),
        (None, None),
    ],
)
def test_a_template_tells_how_reasoning_is_marked(name: str | None, template: str | None) -> None:
    assert dialect(template).reasoning is (None if name is None else REASONING_FORMATS[name])


def test_what_is_given_goes_before_what_the_template_says() -> None:
    given = dialect(QWEN3, tool_call_parser="pythonic", reasoning_parser="none")
    assert given.tools is TOOL_FORMATS["pythonic"]
    assert given.reasoning is None


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "jaxpage.server.parsing.dialect"):
        dialect(QWEN3, reasoning_parser="none")
    assert caplog.messages == [
        "tool_call_parser=hermes (its chat template writes <tool_call>)",
        "reasoning_parser=none (as given)",
    ]


def test_every_format_can_be_named_and_nothing_else() -> None:
    assert set(TOOL_CALL_PARSERS) == TOOL_FORMATS.keys()
    assert set(REASONING_PARSERS) == REASONING_FORMATS.keys()
    for name, allowed in (("tool_call_parser", "hermes"), ("reasoning_parser", "deepseek_r1")):
        assert getattr(ServerConfig(**{name: allowed}), name) == allowed  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is 'banana'.*{allowed}"):
            ServerConfig(**{name: "banana"})  # type: ignore[arg-type]


class SpecialEngine(FakeEngine):
    """One whose tokenizer has a special token, which text leaves out: it is "⁂", for "[TOOL_CALLS]"."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.replace("[TOOL_CALLS]", "⁂"), add_special_tokens)

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids).replace("⁂", "" if skip_special_tokens else "[TOOL_CALLS]")


def test_marks_that_are_special_tokens_are_shown_where_calls_are_looked_for_and_nowhere_else() -> None:
    one = SpecialEngine(max_model_len=4000, chat_template=TEMPLATES["mistral"])
    one.is_ready = True
    one.scripts[""] = Script("Hi.")
    for fields in ({"tools": [function()]}, {"tools": [function()], "use_beam_search": True}, {}):
        assert ask(one, **fields).status_code == 200
    assert [params.shown_special_tokens for params in one.seen_params] == [("[TOOL_CALLS]",)] * 2 + [()]
    assert ask(one, tools=[function()], tool_choice="required").status_code == 200
    params = one.seen_params[-1]
    assert isinstance(params, SamplingParams)
    assert params.structured_outputs is not None
    assert f"<[{ord('⁂')}]>" in (params.structured_outputs.grammar or "")


def test_c10_a_model_without_a_template_answers_chats_with_advice() -> None:
    one = FakeEngine(chat_template=None)
    one.is_ready = True
    response = ask(one)
    assert response.status_code == 400
    assert "--chat-template" in response.json()["error"]["message"]


def test_c10_named_templates_serve_requests_with_and_without_tools() -> None:
    one = engine("Hi.")
    one.chat_templates = ChatTemplates({"default": "plain", "tool_use": "<tool_call>{{ tools | length }}"})
    ask(one)
    ask(one, tools=[function()])
    assert ["".join(map(chr, prompt)) for prompt in one.seen_prompts] == ["plain", "<tool_call>1"]
    assert dialect_of(one, ServerConfig()).tools is TOOL_FORMATS["hermes"]  # type: ignore[arg-type]
