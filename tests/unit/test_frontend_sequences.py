"""Requests of several sequences or beams, with rules about tokens and log-probabilities, on the API side."""

from typing import Any

import pytest
from frontends import EOS, TOKENIZER, completion, opened, refusal

from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.wire import BeamOutput, BeamSequence, TokenLogprobs, TokenOutput

# Several sequences.


def sequence_texts(output: RequestOutput) -> list[str]:
    return [sequence.text for sequence in output.outputs]


def test_each_sequence_takes_its_own_tokens_and_all_are_in_every_output() -> None:
    request = opened(params=SamplingParams(n=3))
    assert len(request.sequence_ids) == len(set(request.sequence_ids)) == 3
    a, b, c = request.sequence_ids
    (x, y, z), shown = TOKENIZER.encode("xyz"), []
    for name, token_id in ((a, x), (c, y), (a, y), (b, z)):
        output, must_abort = request.take(TokenOutput(name, [token_id]))
        assert not must_abort
        assert [sequence.index for sequence in output.outputs] == [0, 1, 2]
        shown.append(sequence_texts(output))
    assert shown == [["x", "", ""], ["x", "", "y"], ["xy", "", "y"], ["xy", "z", "y"]]


def test_a_request_is_finished_with_its_last_sequence() -> None:
    request = opened(params=SamplingParams(n=3))
    reasons = []
    for name in request.sequence_ids[::-1]:
        output, _ = request.take(TokenOutput(name, [1], "length"))
        reasons.append([sequence.finish_reason for sequence in output.outputs])
        assert output.finished == request.finished == (name == "r")
        assert (output.metrics.finished_time is not None) == output.finished
    assert reasons == [[None, None, "length"], [None, "length", "length"], ["length"] * 3]


def test_a_stop_string_ends_its_own_sequence_only() -> None:
    request = opened(params=SamplingParams(n=2, stop=("b",)))
    first, second = request.sequence_ids
    ids = TOKENIZER.encode("abc")
    assert request.take(TokenOutput(first, ids[:1]))[1] is False
    output, must_abort = request.take(TokenOutput(second, ids[1:2]))
    assert (must_abort, output.finished, sequence_texts(output)) == (True, False, ["a", ""])
    # What the engine still gave before it was told is no part of it.
    output, must_abort = request.take(TokenOutput(second, ids[2:], "length"))
    assert (must_abort, sequence_texts(output)) == (False, ["a", ""])
    assert [sequence.stop_reason for sequence in output.outputs] == [None, "b"]
    assert request.take(TokenOutput(first, ids[2:], "length"))[0].finished


def test_ending_a_request_from_outside_leaves_ended_sequences_as_they_are() -> None:
    request = opened(params=SamplingParams(n=3))
    request.take(TokenOutput(request.sequence_ids[1], [1], "length"))
    output = request.end("abort")
    assert [sequence.finish_reason for sequence in output.outputs] == ["abort", "length", "abort"]
    assert output.finished


# Rules about tokens.


def test_bad_words_go_to_the_engine_as_they_stand_within_a_word_and_at_its_start() -> None:
    params = SamplingParams(bad_words=("ab", " c", "ab"))
    encoded = [TOKENIZER.encode(text) for text in ("ab", " ab", " c")]
    assert opened(params=params).message.bad_words == encoded


def test_b17_bad_words_that_are_too_long_or_too_many_are_refused() -> None:
    error = refusal(params=SamplingParams(bad_words=("ok", "x" * 16)))
    assert error.param == "bad_words"
    assert "of 17 tokens, and 16 is the most" in str(error)
    assert len(opened(params=SamplingParams(bad_words=("x" * 15,))).message.bad_words) == 2
    error = refusal(params=SamplingParams(bad_words=tuple(f"w{i}" for i in range(150))))
    assert "bad_words are more than 256 sequences of several tokens" in str(error)


@pytest.mark.parametrize("options", [{"logit_bias": {EOS + 1: 5}}, {"allowed_token_ids": (1, EOS + 1)}])
def test_a16_tokens_beyond_the_vocabulary_are_refused_by_value_and_limit(options: dict[str, Any]) -> None:
    [name] = options
    error = refusal(params=SamplingParams(**options))
    assert error.param == name
    assert str(error) == f"{name} holds {EOS + 1}, and token ids are below {EOS + 1}"


def test_options_that_leave_no_token_to_generate_are_refused() -> None:
    [a] = TOKENIZER.encode("a")
    nothing: list[dict[str, Any]] = [
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"allowed_token_ids": (7, EOS), "stop_token_ids": (7,), "min_tokens": 1},
        {"allowed_token_ids": (a,), "bad_words": ("a",)},
    ]
    for options in nothing:
        error = refusal(params=SamplingParams(**options))
        assert error.param == "allowed_token_ids"
        assert "leaves no token to generate" in str(error)
    something: list[dict[str, Any]] = [
        {"allowed_token_ids": (EOS,)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": (a, 7), "bad_words": ("a",)},
    ]
    for options in something:
        opened(params=SamplingParams(**options))


# Log-probabilities.


def test_a_token_comes_with_its_alternatives_its_own_value_first() -> None:
    a, b, c = TOKENIZER.encode("abc")
    request = opened(params=SamplingParams(logprobs=2))
    request.take(TokenOutput("r", [c], logprobs=[TokenLogprobs(-3.0, 40, [(a, -0.5), (b, -1.0)])]))
    output, _ = request.take(TokenOutput("r", [b], logprobs=[TokenLogprobs(-1.0, 2, [(a, -0.5), (b, -1.0)])]))
    found = completion(output)
    assert found.logprobs == [
        {c: Logprob(-3.0, 40, "c"), a: Logprob(-0.5, 1, "a"), b: Logprob(-1.0, 2, "b")},
        {b: Logprob(-1.0, 2, "b"), a: Logprob(-0.5, 1, "a")},
    ]
    assert [list(entry) for entry in found.logprobs or ()] == [[c, a, b], [b, a]]
    assert found.cumulative_logprob == -4.0


def test_no_alternatives_leave_the_tokens_own_log_probability() -> None:
    output, _ = opened(params=SamplingParams(logprobs=0)).take(
        TokenOutput("r", [EOS], "stop", None, 0, [TokenLogprobs(-2.0, 9, [])])
    )
    assert completion(output).logprobs == [{EOS: Logprob(-2.0, 9, "</s>")}]
    assert completion(output).cumulative_logprob == -2.0


def test_log_probabilities_were_asked_for_or_not_also_before_the_first_token() -> None:
    asked, not_asked = (opened(params=SamplingParams(logprobs=k)).end("abort").outputs[0] for k in (5, None))
    assert (asked.logprobs, asked.cumulative_logprob) == ([], 0.0)
    assert (not_asked.logprobs, not_asked.cumulative_logprob) == (None, None)


def test_log_probabilities_of_an_output_do_not_change_when_more_come() -> None:
    request = opened(params=SamplingParams(logprobs=0))
    first, _ = request.take(TokenOutput("r", [1], logprobs=[TokenLogprobs(-1.0, 1, [])]))
    request.take(TokenOutput("r", [2], logprobs=[TokenLogprobs(-1.0, 1, [])]))
    assert len(completion(first).logprobs or ()) == 1


# Beam search.


def test_a_beam_search_is_one_name_to_the_engine_and_gives_its_sequences_at_the_end() -> None:
    params = BeamSearchParams(beam_width=3, stop_token_ids=(7,), skip_special_tokens=False)
    request = opened("Hi", params)
    assert request.sequence_ids == ["r"]
    ids = TOKENIZER.encode("abc")
    beams = [
        BeamSequence([*ids, EOS], -1.0, -0.25, "stop"),
        BeamSequence([*ids[:2], 7], -2.0, -0.5, "stop"),
        BeamSequence(ids, -3.0, -1.0, "length"),
    ]
    output, must_abort = request.take(BeamOutput("r", beams, 16))
    assert output.outputs == [
        CompletionOutput(0, "abc", [*ids, EOS], "stop", None, -1.0, None, -0.25),
        CompletionOutput(1, "ab", [*ids[:2], 7], "stop", 7, -2.0, None, -0.5),
        CompletionOutput(2, "abc", ids, "length", None, -3.0, None, -1.0),
    ]
    assert (output.finished, must_abort, output.num_cached_tokens) == (True, False, 16)


def test_a_beam_search_carries_what_its_sequences_need_to_end() -> None:
    params = BeamSearchParams(
        beam_width=3, max_tokens=9, stop_token_ids=(7,), ignore_eos=True, shown_special_tokens=("</s>",)
    )
    message = opened("Hi", params).message
    assert message.params.shown_special_tokens == ("</s>",)
    assert (message.beam, message.max_tokens) == (params, 9)
    assert (message.params.stop_token_ids, message.params.ignore_eos, message.params.greedy) == ((7,), True, True)


def test_beams_are_lowered_to_the_room_that_the_context_leaves() -> None:
    message = opened([1] * 60, BeamSearchParams(beam_width=2, max_tokens=10)).message
    assert message.beam is not None
    assert (message.beam.max_tokens, message.max_tokens) == (4, 4)


def test_more_beams_than_run_at_once_are_refused() -> None:
    opened(params=BeamSearchParams(beam_width=8))
    error = refusal(params=BeamSearchParams(beam_width=9))
    assert error.param == "beam_width"
    assert str(error) == "beam_width is 9, and 8 sequences run at once: lower it or raise --max-num-seqs"


def test_beams_must_fit_in_the_cache_all_at_once_but_for_their_last_token() -> None:
    """200 tokens in all: 40 for each of 5 beams."""
    opened([1] * 20, BeamSearchParams(beam_width=5, max_tokens=21))
    error = refusal([1] * 20, BeamSearchParams(beam_width=5, max_tokens=22))
    assert error.param == "beam_width"
    assert "5 beams of 20 + 22 tokens do not fit in the KV cache, which holds 40 tokens of each" in str(error)
    # What counts is what the context leaves of max_tokens.
    opened([1] * 60, BeamSearchParams(beam_width=3, max_tokens=1000))


def test_beams_and_ending_tokens_share_the_alternatives_of_a_step() -> None:
    stops = tuple(range(27))
    opened(params=BeamSearchParams(beam_width=4, stop_token_ids=stops))
    opened(params=BeamSearchParams(beam_width=5, stop_token_ids=stops, ignore_eos=True))
    error = refusal(params=BeamSearchParams(beam_width=5, stop_token_ids=stops))
    assert error.param == "beam_width"
    assert "beam_width is 5, and with 28 ending tokens it must be at most 4" in str(error)
