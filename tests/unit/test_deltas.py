"""Deltas: joined, they are what a single one would have been, and they add up to the cumulative output."""

from frontends import TOKENIZER, opened

from jaxpage.outputs import CompletionOutput, RequestDelta, SequenceDelta
from jaxpage.sampling_params import SamplingParams
from jaxpage.wire import TokenLogprobs, TokenOutput


def of_tokens(name: str, text: str, finish_reason: str | None = None) -> TokenOutput:
    logprobs = [TokenLogprobs(-1.0, 1, []) for _ in text]
    return TokenOutput(name, TOKENIZER.encode(text), finish_reason, num_cached_tokens=16, logprobs=logprobs)


def test_joined_deltas_of_a_sequence_are_those_of_its_tokens_at_once() -> None:
    params = SamplingParams(logprobs=0, stop=("def",))
    split, whole = (opened(params=params).request for _ in range(2))
    deltas = [split.take(of_tokens("r", text))[0].outputs[0] for text in ("ab", "c", "d", "ef", "g")[:4]]
    assert [delta.text for delta in deltas] == ["ab", "c", "", ""]
    (expected,) = whole.take(of_tokens("r", "abcdefg"))[0].outputs
    assert SequenceDelta.joined(deltas) == expected
    assert (expected.text, expected.stop_reason, expected.cumulative_logprob) == ("abc", "def", -6.0)


def test_joined_deltas_of_a_request_have_each_sequence_once_and_its_prompts_values() -> None:
    first, second = ([SequenceDelta(index, text, [7])] for index, text in ((1, "a"), (0, "b")))
    of_prompt: list[None] = [None]
    deltas = [
        RequestDelta("r", first, False, 16, of_prompt),
        RequestDelta("r", second, False, 16),
        RequestDelta("r", [SequenceDelta(1, "c", [8], "length")], True, 16),
    ]
    assert RequestDelta.joined(deltas) == RequestDelta(
        "r", [SequenceDelta(0, "b", [7]), SequenceDelta(1, "ac", [7, 8], "length")], True, 16, of_prompt
    )


def test_outputs_add_up_deltas_however_many_came_between_them() -> None:
    request = opened(params=SamplingParams(logprobs=0, n=2))
    request.take(of_tokens("r", "ab"))
    output, _ = request.take(of_tokens("r#1", "x", "length"))
    before = output.outputs[1]
    output, _ = request.take(of_tokens("r", "c", "length"))
    assert output.outputs[1] is before
    assert [(one.text, one.cumulative_logprob, len(one.logprobs or ())) for one in output.outputs] == [
        ("abc", -3.0, 3),
        ("x", -1.0, 1),
    ]
    assert isinstance(before, CompletionOutput)
    assert (output.finished, output.num_cached_tokens) == (True, 16)
