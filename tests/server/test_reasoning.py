"""Reasoning is told from the answer, wherever its tags are written and wherever the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_text import calls, in_pieces, joined, splitter

from jaxpage.server.parsing.splitter import Delta

WHOLE = "<think>\nHm, 漢字.\n</think>\n\nThe answer."
BOTH = Delta("Hm, 漢字.", "The answer.")


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "expected"),
    [
        ("qwen3", "<bot>", WHOLE, BOTH),
        ("qwen3", "<bot>", "\n" + WHOLE, BOTH),
        ("qwen3", "<bot><think>\n", WHOLE.removeprefix("<think>"), BOTH),
        ("qwen3", "<bot><think>\n\n</think>\n\n", "The answer.", Delta(content="The answer.")),
        ("qwen3", "<bot>", "  The answer.\n", Delta(content="  The answer.\n")),
        ("qwen3", "<bot>", "<thin air", Delta(content="<thin air")),
        ("qwen3", "<bot>", "Say <think> and </think>.", Delta(content="Say <think> and </think>.")),
        ("qwen3", "<bot>", "<think>\nHm, cut", Delta("Hm, cut")),
        ("qwen3", "<bot>", "<think>\nHm </th", Delta("Hm </th")),
        ("qwen3", "<bot>", "<think>\n\n</think>\n\nThe answer.", Delta(content="The answer.")),
        ("qwen3", "<bot>", "<think>Hm</think>\n\n", Delta("Hm")),
        ("deepseek_r1", "<bot>", WHOLE, BOTH),
        ("deepseek_r1", "<bot>", WHOLE.removeprefix("<think>"), BOTH),
        ("deepseek_r1", "<bot><think>\n", "Hm, cut", Delta("Hm, cut")),
        ("deepseek_r1", "<bot><think>\n\n</think>", "The answer.", Delta(content="The answer.")),
        ("mistral", "[/INST]", "[THINK]Hm, 漢字.[/THINK]The answer.", BOTH),
    ],
)  # fmt: skip
def test_reasoning_is_told_from_content(name: str, prompt_end: str, text: str, expected: Delta) -> None:
    assert splitter(reasoning=name, prompt_end=prompt_end).split(text) == expected
    assert joined(in_pieces(splitter(reasoning=name, prompt_end=prompt_end), text)) == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(["qwen3", "deepseek_r1"]), prompt_end=st.sampled_from(["", "<think>\n"]))
def test_any_answer_is_the_same_message_however_it_is_cut(data: st.DataObject, name: str, prompt_end: str) -> None:
    fragments = [
        "<think>",
        "</think>",
        "<thi",
        "</",
        "<tool_call>",
        '{"name": "f"}',
        "</tool_call>",
        " ",
        "\n",
        "x",
        "é🦙",
    ]
    text = data.draw(st.lists(st.sampled_from(fragments), max_size=10).map("".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def make():  # type: ignore[no-untyped-def]
        return splitter("hermes", name, prompt_end)

    assert joined(in_pieces(make(), pieces)) == make().split(text)


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    text = f"<think>I could write {call}.</think>\n\n{call}"
    assert splitter("hermes", "qwen3").split(text) == Delta(f"I could write {call}.", calls=calls(("f", "{}")))


def test_reasoning_is_passed_on_as_it_comes_and_white_space_when_it_matters() -> None:
    one = splitter(reasoning="qwen3")
    deltas = [
        one.feed(piece) for piece in ("<think>\n", "One", " two", "\n", "</think>", "\n\n", "Three", "\n", "four")
    ]
    assert [delta.reasoning for delta in deltas] == ["", "One", " two", "", "", "", "", "", ""]
    assert [delta.content for delta in deltas] == ["", "", "", "", "", "", "Three", "", "\nfour"]


def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    assert splitter(reasoning="qwen3", shows_reasoning=False).split(WHOLE) == Delta(content="The answer.")
