"""Speculation through the whole engine: on gives what off gives, whatever a request asks for."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from host import core_of, exchanged_host

from jaxpage import LLM, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxpage.config import LOOP_NAMES

pytestmark = pytest.mark.usefixtures("quick_compiles")
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
HELLO = "hello hello hello hello"


@pytest.fixture(scope="module")
def off(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def on(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    """Its steps have room for all of its rows' drafts."""
    options = tiny_options | {"max_num_seqs": 4, "speculative_config": SPECULATION}
    with LLM(**options, multiprocess=False) as llm:
        yield llm


def generate(llm: LLM, requests: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)


def told(sequence: CompletionOutput) -> tuple[list[int], str, str | None, int | str | None]:
    return sequence.token_ids, sequence.text, sequence.finish_reason, sequence.stop_reason


def assert_same(given: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(given, expected, strict=True):
        assert [told(sequence) for sequence in one.outputs] == [told(sequence) for sequence in other.outputs]
        for found, wanted in zip(one.outputs, other.outputs, strict=True):
            assert (found.logprobs is None) == (wanted.logprobs is None)
            for at_token, other_at in zip(found.logprobs or [], wanted.logprobs or [], strict=True):
                assert at_token.keys() == other_at.keys()
                for token_id, logprob in at_token.items():
                    assert logprob.logprob == pytest.approx(other_at[token_id].logprob, abs=1e-3)


def num_accepted(llm: LLM) -> int:
    return core_of(llm).scheduler.acceptance.num_accepted_tokens


LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
MIXED = [
    (HELLO, SamplingParams(temperature=0, logprobs=2, **LONG)),
    ("Once upon", SamplingParams(temperature=0.4, seed=1, **LONG)),
    (HELLO, SamplingParams(temperature=0.7, seed=2, n=3, frequency_penalty=-0.7, **LONG)),
    ("abcabcabc", SamplingParams(temperature=0, repetition_penalty=1.3, min_tokens=20, logprobs=0, max_tokens=40)),
    ("abcabcab", SamplingParams(temperature=0.5, seed=3, top_k=4, bad_words=("c", "ab"), **LONG)),
    ("xyxyxy", SamplingParams(temperature=0.9, seed=4, allowed_token_ids=tuple(map(ord, "xyz")), **LONG)),
    (HELLO[:9], SamplingParams(temperature=0, logprobs=-1, max_tokens=6, ignore_eos=True)),
    (HELLO[:12], SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="(ab){9}"))),
    ("ababababab", SamplingParams(temperature=0, logit_bias={97: 3, 98: 3}, presence_penalty=-2, **LONG)),
    (HELLO[3:], SamplingParams(temperature=0, prompt_logprobs=1, logits_processors=("last_again",), **LONG)),
    ("xyxyxy", SamplingParams(seed=6, allowed_token_ids=tuple(map(ord, "xy")), stop=("xxxx", "yxyxy"), max_tokens=40)),
    ("short", SamplingParams(temperature=0, max_tokens=1)),
    (HELLO, SamplingParams(temperature=1, seed=5, top_p=0.7, min_p=0.05, presence_penalty=0.5, **LONG)),
]


@pytest.fixture(scope="module")
def expected(off: LLM) -> list[RequestOutput]:
    return generate(off, MIXED)


@pytest.mark.parametrize("mode", LOOP_NAMES)
def test_speculation_changes_nothing_in_any_loop_whatever_is_asked_for_and_preempted(
    on: LLM, expected: list[RequestOutput], mode: str
) -> None:
    with exchanged_host(on, num_blocks=42, mode=mode) as scheduler:
        assert_same(generate(on, MIXED), expected)
        assert scheduler.num_preemptions > 0
        accepted = scheduler.acceptance
        assert accepted.num_draft_tokens > accepted.num_accepted_tokens > 50
        assert accepted.num_accepted_tokens_per_pos[2] > 0


B09: list[dict[str, Any]] = [
    *({"frequency_penalty": penalty} for penalty in (2, -2)),
    {"presence_penalty": 2}, {"repetition_penalty": 1.5}, {"logit_bias": {ord("l"): 2.5}},
    {"bad_words": ("l", "ell")}, {"allowed_token_ids": tuple(map(ord, "hello "))},
    {"structured_outputs": StructuredOutputsParams(json={"enum": ["hello hello hello"]})},
]  # fmt: skip


def test_b09_every_option_gives_the_same_with_speculation_one_at_a_time(on: LLM, off: LLM) -> None:
    requests = [(HELLO, SamplingParams(temperature=0, max_tokens=16, **options)) for options in B09]
    before = num_accepted(on)
    for request in requests:
        assert_same(generate(on, [request]), generate(off, [request]))
    assert num_accepted(on) > before


@pytest.mark.parametrize("by", ["stop_token_ids", "stop", "eos"])
def test_b11_a_stop_within_an_accepted_run_ends_it_there_also_where_it_crosses_max_tokens(
    on: LLM, off: LLM, by: str
) -> None:
    """The prompt says "aaz" again and again, and so does the output: what follows its first token is guessed."""
    third = core_of(on).ready.eos_token_ids[0] if by == "eos" else ord("z")
    prompt, bias = [97, 97, third] * 3, {97: 100.0, third: 80.0}
    options: dict[str, Any] = {"stop_token_ids": (third,)} if by == "stop_token_ids" else {}
    options |= {"stop": ("z",)} if by == "stop" else {}
    for max_tokens in (3, 5, 12):
        params = SamplingParams(temperature=0, logit_bias=bias, bad_words=("aaa",), max_tokens=max_tokens, **options)
        expected = off.generate([prompt], params, use_tqdm=False)
        with exchanged_host(on, mode="sync") as scheduler:  # the first drafts are checked right behind the prompt
            assert_same(on.generate([prompt], params, use_tqdm=False), expected)
            assert scheduler.acceptance.num_accepted_tokens >= (2 if max_tokens > 3 else 1)
        [sequence] = expected[0].outputs
        assert (sequence.token_ids, sequence.finish_reason) == ([97, 97, third], "stop")


def test_a_streamed_run_of_accepted_drafts_gives_the_text_piece_by_piece(on: LLM, off: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=-2)
    pieces = [output.outputs[0] for output in on.stream(HELLO, params)]
    [whole] = generate(off, [(HELLO, params)])
    assert pieces[-1].text == whole.outputs[0].text
    assert all(later.text.startswith(earlier.text) for earlier, later in itertools.pairwise(pieces))


def test_prefixes_that_drafts_have_helped_to_compute_are_found_and_right(on: LLM, off: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, presence_penalty=-2)
    [first] = generate(on, [(HELLO + "!", params)])
    follow_up = first.prompt_token_ids + first.outputs[0].token_ids + [33, 34]
    [again] = on.generate([follow_up], params, use_tqdm=False)
    assert again.num_cached_tokens == 52  # of 24 + 30: all full blocks of 4 that were computed
    [cold] = off.generate([follow_up], params, use_tqdm=False)
    assert_same([again], [cold])
