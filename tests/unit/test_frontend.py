"""Requests on the API side: what is refused on arrival, how tokens become text, and where the text stops."""

import itertools

import pytest
from frontends import EOS, TEXT, TOKENIZER, completion, opened, refusal, stream

from jaxpage.outputs import CompletionOutput
from jaxpage.requests import detokenize
from jaxpage.requests.open_request import Prompt
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxpage.text.tokenizer import Tokenizer
from jaxpage.wire import TokenOutput

# StopText.


class StopText(detokenize.StopText):
    """What has been shown is kept."""

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self._shown = ""

    @property
    def visible(self) -> str:
        self._shown += self.take()
        return self._shown


def text_of(pieces: list[str], params: SamplingParams) -> tuple[str, str | None]:
    """The visible text at the end and the stop string that ended it, if any."""
    text = StopText(params)
    for piece in pieces:
        stopped = text.add(piece, may_stop=True)
        if stopped is not None:
            return text.visible, stopped
    return (text.visible, None) if text.finish("", may_stop=True) is None else (text.visible, "at the end")


def test_without_stop_strings_text_is_shown_at_once() -> None:
    text = StopText(SamplingParams())
    assert text.add("ab", may_stop=True) is None
    assert text.visible == "ab"


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], list("one END two"), ["one END", " two"]])
def test_text_ends_before_its_stop_string_however_it_comes(pieces: list[str]) -> None:
    assert text_of(pieces, SamplingParams(stop=("END",))) == ("one ", "END")


@pytest.mark.parametrize("pieces", [["one END two"], ["one E", "ND two"], list("one END two")])
def test_text_ends_after_its_stop_string_when_it_is_to_be_included(pieces: list[str]) -> None:
    assert text_of(pieces, SamplingParams(stop=("END",), include_stop_str_in_output=True)) == ("one END", "END")


def test_the_stop_string_that_completes_first_wins_and_not_the_one_that_starts_first() -> None:
    assert text_of(["abcdef"], SamplingParams(stop=("abcde", "cd"))) == ("ab", "cd")
    assert text_of(["abcdef"], SamplingParams(stop=("f", "e", "de"))) == ("abc", "de")


def test_of_stop_strings_that_complete_together_the_longest_wins() -> None:
    for stops in (("d", "cd", "bcd"), ("bcd", "cd", "d")):
        assert text_of(["abcd"], SamplingParams(stop=stops)) == ("a", "bcd")


def test_only_what_may_belong_to_a_stop_string_is_held_back() -> None:
    text = StopText(SamplingParams(stop=("END", "NOW")))
    shown = []
    for piece in ("one", "E", "N", "x", "EEN", "NO", "!"):
        assert text.add(piece, may_stop=True) is None
        shown.append(text.visible)
    assert shown == ["one", "one", "one", "oneENx", "oneENxE", "oneENxEEN", "oneENxEENNO!"]


def test_what_is_held_back_is_shown_at_the_end() -> None:
    text = StopText(SamplingParams(stop=("END",)))
    text.add("one EN", may_stop=True)
    assert text.visible == "one "
    assert text.finish("", may_stop=True) is None
    assert text.visible == "one EN"


def test_the_last_text_may_still_complete_a_stop_string() -> None:
    text = StopText(SamplingParams(stop=("END",)))
    text.add("one EN", may_stop=True)
    assert text.finish("D two", may_stop=True) == "END"
    assert text.visible == "one "


def test_text_stops_exactly_where_a_reader_of_every_character_would_stop_it() -> None:
    for stops in (("aba",), ("ab", "bb"), ("aab", "b"), ("abab", "ba", "bbb")):
        for include in (False, True):
            params = SamplingParams(stop=stops, include_stop_str_in_output=include)
            for characters in itertools.product("ab", repeat=6):
                text = "".join(characters)
                expected: tuple[str, str | None] = (text, None)
                for end in range(1, 7):
                    found = [stop for stop in stops if text[:end].endswith(stop)]
                    if found:
                        longest = max(found, key=len)
                        expected = (text[: end if include else end - len(longest)], longest)
                        break
                for width in (1, 2, 4, 6):
                    pieces = [text[start : start + width] for start in range(0, 6, width)]
                    assert text_of(pieces, params) == expected, (pieces, stops)


def test_a_stop_string_completed_before_it_may_stop_is_plain_text() -> None:
    text = StopText(SamplingParams(stop=("END",)))
    assert text.add("END one ", may_stop=False) is None
    assert text.add("two ", may_stop=True) is None
    assert text.add("END", may_stop=True) == "END"
    assert text.visible == "END one two "


def test_a_stop_string_begun_before_it_may_stop_counts_when_it_completes_after() -> None:
    text = StopText(SamplingParams(stop=("END",)))
    assert text.add("one EN", may_stop=False) is None
    assert text.add("D", may_stop=True) == "END"
    assert text.visible == "one "


# Opening a request.


def test_an_opened_request_carries_its_tokens_and_settled_limits_to_the_engine() -> None:
    params = SamplingParams(max_tokens=7)
    message = opened("Hi", params).message
    assert (message.request_id, message.prompt_token_ids, message.params) == ("r", TOKENIZER.encode("Hi"), params)
    assert (message.max_tokens, message.seed) == (7, 5)


def test_token_ids_are_taken_as_they_are() -> None:
    request = opened((1, 2, EOS))
    assert request.message.prompt_token_ids == [1, 2, EOS]
    output, _ = request.take(TokenOutput("r", [1]))
    assert (output.prompt, output.prompt_token_ids) == (None, [1, 2, EOS])


@pytest.mark.parametrize(("own", "used"), [(None, 5), (-1, 5), (0, 0), (-2, -2), (2**63 - 1, 2**63 - 1)])
def test_a_seed_of_its_own_wins_over_the_drawn_one(own: int | None, used: int) -> None:
    assert opened(params=SamplingParams(seed=own), seed=5).message.seed == used


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked", "given"),
    [
        (8, 56, 56),
        (8, 57, 56),
        (8, 60, 56),
        (8, 10**9, 56),
        (8, 3, 3),
        (8, None, 56),
        (63, None, 1),
        (63, 5, 1),
        (1, 63, 63),
    ],
)
def test_max_tokens_is_lowered_to_the_room_that_the_context_leaves(
    num_prompt_tokens: int, asked: int | None, given: int
) -> None:
    assert opened([1] * num_prompt_tokens, SamplingParams(max_tokens=asked)).message.max_tokens == given


@pytest.mark.parametrize("num_prompt_tokens", [64, 65, 200])
def test_a_prompt_without_room_to_generate_is_refused_with_the_true_numbers(num_prompt_tokens: int) -> None:
    error = refusal([1] * num_prompt_tokens)
    assert error.param == "prompt"
    message = str(error)
    assert f"the prompt has {num_prompt_tokens} tokens" in message
    assert "max_model_len is 64" in message
    assert "shorten it or raise --max-model-len" in message
    assert "-" not in message.replace("--max-model-len", "")


@pytest.mark.parametrize("prompt", ["", []])
def test_a_prompt_without_tokens_is_refused(prompt: Prompt) -> None:
    error = refusal(prompt)
    assert error.param == "prompt"
    assert str(error) == "the prompt has no tokens: give it at least one"


@pytest.mark.parametrize("token_id", [-1, EOS + 1, 2**40, 1.0, "1", None, True])
def test_what_is_no_token_id_is_refused_by_value_and_limit(token_id: object) -> None:
    error = refusal([1, token_id])  # type: ignore[list-item]
    assert error.param == "prompt"
    assert str(error) == f"the prompt holds {token_id!r}, and token ids are integers in [0, {EOS + 1})"


def test_every_id_of_the_vocabulary_is_accepted() -> None:
    assert opened([0, EOS]).message.prompt_token_ids == [0, EOS]


def test_text_that_is_no_unicode_is_refused() -> None:
    assert "lone surrogate" in str(refusal("a\ud800"))


def test_stop_token_ids_outside_the_vocabulary_are_refused_by_value_and_limit() -> None:
    assert opened(params=SamplingParams(stop_token_ids=(EOS,))).message.params.stop_token_ids == (EOS,)
    error = refusal(params=SamplingParams(stop_token_ids=(1, EOS + 1)))
    assert error.param == "stop_token_ids"
    assert str(error) == f"stop_token_ids holds {EOS + 1}, and token ids are below {EOS + 1}"


def test_stop_token_ids_must_leave_places_for_the_models_own() -> None:
    full = tuple(range(MAX_STOP_TOKEN_IDS))
    error = refusal(params=SamplingParams(stop_token_ids=full))
    assert error.param == "stop_token_ids"
    assert f"are {MAX_STOP_TOKEN_IDS + 1}, and {MAX_STOP_TOKEN_IDS} fit: give fewer" in str(error)
    opened(params=SamplingParams(stop_token_ids=full, ignore_eos=True))
    opened(params=SamplingParams(stop_token_ids=(*full[1:], EOS)))


# Tokens to outputs.


def test_outputs_are_cumulative_and_finish_with_the_engines_reason() -> None:
    ids = TOKENIZER.encode("abc")
    taken = stream(opened("Hi"), ids[:2], TokenOutput("r", ids[2:], "length"))
    assert [completion(output).text for output, _ in taken] == ["a", "ab", "abc"]
    assert [completion(output).token_ids for output, _ in taken] == [ids[:1], ids[:2], ids]
    assert [completion(output).finish_reason for output, _ in taken] == [None, None, "length"]
    assert [output.finished for output, _ in taken] == [False, False, True]
    assert not any(must_abort for _, must_abort in taken)
    assert {(output.request_id, output.prompt) for output, _ in taken} == {("r", "Hi")}


def test_an_output_does_not_change_when_more_tokens_come() -> None:
    request = opened()
    first, _ = request.take(TokenOutput("r", [1]))
    request.take(TokenOutput("r", [2]))
    assert completion(first).token_ids == [1]


def test_several_tokens_at_once_give_what_they_give_one_by_one() -> None:
    ids = TOKENIZER.encode(TEXT)
    output, _ = opened().take(TokenOutput("r", ids, "length"))
    assert (completion(output).text, completion(output).token_ids) == (TEXT, ids)


def test_no_half_character_is_ever_shown() -> None:
    taken = stream(opened(), TOKENIZER.encode(TEXT))
    shown = [completion(output).text for output, _ in taken]
    assert all(TEXT.startswith(text) for text in shown)
    assert shown[-1] == TEXT


def test_a_character_cut_off_by_length_ends_as_in_the_text_decoded_at_once() -> None:
    ids = TOKENIZER.encode("ab🦙")[:-1]
    taken = stream(opened(), ids[:-1], TokenOutput("r", ids[-1:], "length"))
    assert [completion(output).text for output, _ in taken] == ["a", "ab", "ab", "ab", TOKENIZER.decode(ids)][
        -len(taken) :
    ]
    assert completion(taken[-1][0]).text == "ab\ufffd"


def test_the_models_eos_is_a_token_but_no_text_and_no_stop_reason() -> None:
    ids = TOKENIZER.encode("ab")
    request = opened(params=SamplingParams(skip_special_tokens=False))
    output, must_abort = stream(request, ids, TokenOutput("r", [EOS], "stop"))[-1]
    assert completion(output) == CompletionOutput(0, "ab", [*ids, EOS], "stop", None)
    assert (request.finished, must_abort) == (True, False)


def test_its_own_stop_token_is_the_stop_reason_and_no_text() -> None:
    ids = TOKENIZER.encode("abc")
    request = opened(params=SamplingParams(stop_token_ids=(ids[2],)))
    output, _ = stream(request, ids[:2], TokenOutput("r", ids[2:], "stop", ids[2]))[-1]
    assert completion(output) == CompletionOutput(0, "ab", ids, "stop", ids[2])


def test_special_tokens_amid_the_text_are_shown_only_on_request() -> None:
    ids = [*TOKENIZER.encode("a"), EOS, *TOKENIZER.encode("b")]
    hidden, _ = stream(opened(), ids)[-1]
    shown, _ = stream(opened(params=SamplingParams(skip_special_tokens=False)), ids)[-1]
    assert (completion(hidden).text, completion(shown).text) == ("ab", "a</s>b")
    for tokens, text in ((("</s>", "<s>"), "a</s>b"), (("<s>",), "ab")):
        chosen, _ = stream(opened(params=SamplingParams(shown_special_tokens=tokens)), ids)[-1]
        assert completion(chosen).text == text


def test_a_stop_string_across_tokens_ends_the_request_and_the_engine_is_told() -> None:
    ids = TOKENIZER.encode(TEXT)
    for start, length in ((3, 4), (0, 3), (15, 4), (18, 3)):
        stop = TEXT[start : start + length]
        place = TEXT.find(stop)
        for include in (False, True):
            params = SamplingParams(stop=(stop,), include_stop_str_in_output=include)
            taken = stream(opened(params=params), ids)
            expected = TEXT[: place + len(stop)] if include else TEXT[:place]
            shown = [completion(output).text for output, _ in taken]
            assert all(TEXT[:place].startswith(text) for text in shown[:-1])
            assert shown[-1] == expected
            assert completion(taken[-1][0]).finish_reason == "stop"
            assert completion(taken[-1][0]).stop_reason == stop
            assert [must_abort for _, must_abort in taken] == [False] * (len(taken) - 1) + [True]


def test_text_that_only_starts_like_a_stop_string_is_whole_at_the_end() -> None:
    ids = TOKENIZER.encode(TEXT)
    for start in (3, 15, len(TEXT) - 3):
        params = SamplingParams(stop=(TEXT[start : start + 3] + "\u0001",))
        taken = stream(opened(params=params), ids[:-1], TokenOutput("r", ids[-1:], "length"))
        output, must_abort = taken[-1]
        assert (completion(output).text, completion(output).finish_reason, must_abort) == (TEXT, "length", False)


def test_a_stop_string_on_the_engines_last_token_wins_and_needs_no_abort() -> None:
    ids = TOKENIZER.encode("abc")
    request = opened(params=SamplingParams(stop=("bc",)))
    output, must_abort = stream(request, ids[:2], TokenOutput("r", ids[2:], "length"))[-1]
    assert completion(output) == CompletionOutput(0, "a", ids, "stop", "bc")
    assert not must_abort


def test_tokens_behind_a_stop_string_are_dropped() -> None:
    ids = TOKENIZER.encode("abcdef")
    output, must_abort = opened(params=SamplingParams(stop=("c",))).take(TokenOutput("r", ids))
    assert completion(output) == CompletionOutput(0, "ab", ids[:3], "stop", "c")
    assert must_abort


def test_a_stop_string_in_the_prompt_ends_nothing() -> None:
    request = opened("stop here", SamplingParams(stop=("here", "e!")))
    taken = stream(request, TOKENIZER.encode("!a"))
    assert (completion(taken[-1][0]).text, request.finished) == ("!a", False)


def test_a_stop_string_is_obeyed_from_the_min_tokens_th_token_on() -> None:
    ids = TOKENIZER.encode("ababab")
    for min_tokens, expected in ((0, "a"), (2, "a"), (3, "aba"), (4, "aba"), (5, "ababa"), (6, "ababa")):
        params = SamplingParams(stop=("b",), min_tokens=min_tokens)
        output, must_abort = stream(opened(params=params), ids)[-1]
        assert (completion(output).text, completion(output).stop_reason, must_abort) == (expected, "b", True)
        assert len(completion(output).token_ids) >= min_tokens


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_request_ended_from_outside_shows_all_its_text(reason: str) -> None:
    ids = TOKENIZER.encode("one EN")
    request = opened(params=SamplingParams(stop=("END",)))
    stream(request, ids)
    output = request.end(reason)
    assert completion(output) == CompletionOutput(0, "one EN", ids, reason, None)
    assert (output.finished, request.finished) == (True, True)


def test_a_request_can_be_ended_before_its_first_token() -> None:
    output = opened().end("abort")
    assert completion(output) == CompletionOutput(0, "", [], "abort", None)
    assert output.metrics.first_token_time is None
    assert output.metrics.time_to_first_token is None
    assert output.metrics.finished_time is not None


def test_the_first_token_is_timed_once_and_the_end_at_the_end() -> None:
    taken = stream(opened(), [1, 2], TokenOutput("r", [3], "length"))
    metrics = [output.metrics for output, _ in taken]
    assert len({m.arrival_time for m in metrics}) == 1
    assert len({m.first_token_time for m in metrics}) == 1
    assert metrics[0].first_token_time is not None
    assert [m.finished_time is None for m in metrics] == [True, True, False]


# Priority and salt.


def test_priority_and_salt_reach_the_engine() -> None:
    message = opened(priority=-(2**63) + 1, cache_salt="a").message
    assert (message.priority, message.cache_salt) == (-(2**63) + 1, "a")
    assert (opened().message.priority, opened().message.cache_salt) == (0, None)


@pytest.mark.parametrize("priority", [2**63, -(2**63), 1.0, "1", None, True])
def test_what_is_no_priority_is_refused_by_value(priority: object) -> None:
    error = refusal(priority=priority)
    assert (error.param, str(error)) == ("priority", f"priority is {priority!r}: it must be an int64")


@pytest.mark.parametrize("salt", ["", 5, b"a"])
def test_what_is_no_salt_is_refused_by_value(salt: object) -> None:
    error = refusal(cache_salt=salt)
    assert (error.param, str(error)) == ("cache_salt", f"cache_salt is {salt!r}: it must be a non-empty string")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"w{number}" for number in range(10_000)], "more than 256 sequences"),
        (["x" * 1025], "a text of 1025 characters, and 1024 is the most"),
        (["x"] * 10_000 + ["x" * 17], "of 17 tokens, and 16 is the most"),
    ],
)
def test_no_more_bad_words_are_encoded_than_fit(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is done where the tokens of all requests wait for it."""
    encoded: list[str] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        encoded.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    error = refusal([1], SamplingParams(bad_words=tuple(words)))
    assert error.param == "bad_words"
    assert message in str(error)
    assert len(encoded) <= 258
