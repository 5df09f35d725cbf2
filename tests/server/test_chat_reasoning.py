"""C12 and A02: reasoning in chats, over HTTP, and what the prompt and the request say about it."""

from typing import Any

import pytest
from chats import HELLO, ask, both, engine, function, prompt_of

from jaxpage.sampling_params import SamplingParams
from jaxpage.server_config import ServerConfig

ANSWER = "<think>\nHm, 漢字.\n</think>\n\nThe answer."


def message(content: str | None, reasoning: str | None = None) -> dict[str, Any]:
    both_names = {} if reasoning is None else {"reasoning_content": reasoning, "reasoning": reasoning}
    return {"role": "assistant", "content": content, **both_names}


def test_c12_reasoning_and_answer_are_split_at_the_tags() -> None:
    one = engine(ANSWER)
    choice = both(one)
    assert choice["message"] == message("The answer.", "Hm, 漢字.")
    assert choice["finish_reason"] == "stop"
    assert prompt_of(one).endswith("<|im_start|>assistant\n")


def test_c12_without_thinking_the_answer_is_content() -> None:
    one = engine("The answer.")
    assert both(one, chat_template_kwargs={"enable_thinking": False})["message"] == message("The answer.")
    assert prompt_of(one).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_c12_a_model_told_in_words_not_to_think_answers_with_empty_tags() -> None:
    one = engine("<think>\n\n</think>\n\nThe answer.")
    assert both(one, messages=[{"role": "user", "content": "hello /no_think"}])["message"] == message("The answer.")


@pytest.mark.parametrize("max_tokens", [12, ANSWER.index("</think>"), ANSWER.index("</think>") + 4])
def test_c12_what_is_cut_within_the_reasoning_is_reasoning_only(max_tokens: int) -> None:
    choice = both(engine(ANSWER), max_tokens=max_tokens)
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == ANSWER[len("<think>\n") : max_tokens].rstrip()
    assert choice["finish_reason"] == "length"


def test_c12_a_structure_is_asked_of_the_answer_alone() -> None:
    one = engine('<think>\nHm.\n</think>\n\n{"a": 1}')
    choice = both(one, response_format={"type": "json_object"})
    assert choice["message"] == message('{"a": 1}', "Hm.")
    both(one, response_format={"type": "json_object"}, chat_template_kwargs={"enable_thinking": False})
    first, last = one.seen_params[0], one.seen_params[-1]
    assert isinstance(first, SamplingParams)
    assert isinstance(last, SamplingParams)
    assert first.structured_outputs is not None
    assert last.structured_outputs is not None
    assert "</think>" in (first.structured_outputs.preamble or "")
    assert last.structured_outputs.preamble is None


def test_the_prompt_may_have_begun_the_reasoning() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<bot><think>\n{# knows </think> #}"
    assert both(engine("Hm.\n</think>\n\nYes.", chat_template=template))["message"] == message("Yes.", "Hm.")
    assert both(engine("Hm, cut", chat_template=template))["message"] == message(None, "Hm, cut")


def test_a_reasoning_model_calls_tools_behind_its_reasoning() -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    choice = both(engine(f"<think>\nI could {call}.\n</think>\n\n{call}"), tools=[function()])
    assert choice["message"]["reasoning"] == f"I could {call}."
    assert choice["message"]["content"] is None
    assert [found["function"]["name"] for found in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"


def test_reasoning_can_be_left_out_of_the_answer() -> None:
    assert both(engine(ANSWER), include_reasoning=False)["message"] == message("The answer.")


def test_reasoning_of_earlier_turns_reaches_the_template_by_either_name() -> None:
    for name in ("reasoning", "reasoning_content"):
        one = engine("Yes.")
        ask(one, messages=[*HELLO, {"role": "assistant", "content": "Hi.", name: "Greet."}, *HELLO])
        assert "<think>\nGreet.\n</think>\n\nHi." in prompt_of(one)


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("none", ANSWER, message(ANSWER)),
        ("deepseek_r1", "Hm.</think>Yes.", message("Yes.", "Hm.")),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", message("Yes.", "Hm.")),
    ],
)
def test_the_parser_can_be_named(parser: str, text: str, expected: dict[str, Any]) -> None:
    assert both(engine(text), ServerConfig(reasoning_parser=parser))["message"] == expected


def test_a_model_whose_template_knows_no_reasoning_has_none() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert both(engine(ANSWER, chat_template=template))["message"] == message(ANSWER)
