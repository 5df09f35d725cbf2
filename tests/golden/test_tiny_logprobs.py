"""Log-probabilities of prompts and of whole vocabularies on the tiny Llama: transformers' values, however computed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from host import exchanged_host

from jaxpage import LLM, Logprob, RequestOutput, SamplingParams
from jaxpage.config import LOOP_NAMES

pytestmark = pytest.mark.usefixtures("quick_compiles")
GOLDEN = np.load(Path(__file__).parent / "tiny_logits.npz")
VOCAB = 128
LENGTH = 100
TOLERANCE = 1e-4
Entries = list[dict[int, Logprob] | None]


@pytest.fixture(scope="module")
def llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False) as llm:
        yield llm


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def ask(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def prompt_logprobs(llm: LLM, prompt: list[int], wanted: int, **options: Any) -> Entries:
    [output] = ask(llm, [prompt], greedy(prompt_logprobs=wanted, **options))
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def exact_logprobs(position: int) -> np.ndarray:
    """What transformers gives behind a position of the prompt of 100 tokens whose logits are kept."""
    logits = GOLDEN[f"llama/{LENGTH}/logits"][tiny.positions(LENGTH).index(position)].astype(np.float64)
    return np.asarray(logits - np.logaddexp.reduce(logits))


def check_entry(entry: dict[int, Logprob], token_id: int, exact: np.ndarray, wanted: int) -> None:
    """The token itself goes first, then the most probable ones in order."""
    most_probable = np.argsort(-exact, kind="stable")[: VOCAB if wanted == -1 else wanted].tolist()
    assert list(entry) == [token_id, *(token for token in most_probable if token != token_id)]
    for token, found in entry.items():
        assert found.logprob == pytest.approx(exact[token], abs=TOLERANCE)
        assert found.rank == 1 + np.sum(exact > exact[token])


def check_equal(got: Entries, expected: Entries) -> None:
    assert len(got) == len(expected)
    assert got[0] is expected[0] is None
    for one, other in zip(got[1:], expected[1:], strict=True):
        assert one is not None
        assert other is not None
        assert list(one) == list(other)
        for token_id, found in one.items():
            assert found.logprob == pytest.approx(other[token_id].logprob, abs=TOLERANCE)
            assert found.rank == other[token_id].rank


@pytest.mark.parametrize("wanted", [0, 1, 5, 20, -1])
def test_prompt_log_probabilities_are_those_of_transformers(llm: LLM, wanted: int) -> None:
    prompt = tiny.prompt(LENGTH)
    entries = prompt_logprobs(llm, prompt, wanted)
    assert len(entries) == LENGTH
    assert entries[0] is None
    for position in tiny.positions(LENGTH)[:-1]:
        entry, token_id = entries[position + 1], prompt[position + 1]
        assert entry is not None
        check_entry(entry, token_id, exact_logprobs(position), wanted)


def test_log_probabilities_of_the_whole_vocabulary_are_those_of_transformers(llm: LLM) -> None:
    [output] = ask(llm, [tiny.prompt(LENGTH)], greedy(1, logprobs=-1))
    [entry] = output.outputs[0].logprobs or []
    [token_id] = output.outputs[0].token_ids
    check_entry(entry, token_id, exact_logprobs(LENGTH - 1), -1)
    assert sum(np.exp(found.logprob) for found in entry.values()) == pytest.approx(1, abs=1e-5)
    assert entry[ord("a")].decoded_token == "a"


def test_a_prompts_values_are_those_of_the_same_tokens_when_generated(llm: LLM) -> None:
    """Every token, of a request that generates and of one that has the whole text as its prompt."""
    prompt = tiny.prompt(7)
    [generated] = ask(llm, [prompt], greedy(30, logprobs=3))
    token_ids = [*prompt, *generated.outputs[0].token_ids]
    entries = prompt_logprobs(llm, token_ids, 3)
    check_equal([None, *entries[len(prompt) :]], [None, *(generated.outputs[0].logprobs or [])])


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 32, 33])
def test_prompts_around_chunk_borders_have_an_entry_for_each_token(llm: LLM, length: int) -> None:
    """A step computes 16 tokens: the whole of each prompt, as a shorter one is the start of a longer one."""
    expected = prompt_logprobs(llm, tiny.prompt(LENGTH), 2)[:length]
    check_equal(prompt_logprobs(llm, tiny.prompt(length), 2), expected)


def test_options_of_sampling_change_no_log_probability(llm: LLM) -> None:
    prompt = tiny.prompt(20)
    [plain] = ask(llm, [prompt], greedy(1, prompt_logprobs=3, logprobs=-1))
    options = {"temperature": 1.7, "seed": 3, "top_k": 2, "repetition_penalty": 1.5, "logit_bias": {5: -100}}
    [changed] = ask(llm, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=3, logprobs=-1, **options))
    check_equal(changed.prompt_logprobs or [], plain.prompt_logprobs or [])
    [one], [other] = plain.outputs[0].logprobs or [], changed.outputs[0].logprobs or []
    assert {i: found.rank for i, found in one.items()} == {i: found.rank for i, found in other.items()}


def test_whoever_does_not_ask_gets_none_beside_those_who_do(llm: LLM) -> None:
    prompts = [tiny.prompt(length) for length in (9, 30, 12, 21)]
    params = [greedy(6), greedy(6, prompt_logprobs=1), greedy(6, logprobs=-1), greedy(6, prompt_logprobs=-1)]
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [ask(llm, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [output.prompt_logprobs is None for output in together] == [True, False, True, False]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        check_equal(one.prompt_logprobs or [None], other.prompt_logprobs or [None])
        check_equal([None, *(one.outputs[0].logprobs or [])], [None, *(other.outputs[0].logprobs or [])])
    assert [len(output.outputs[0].logprobs or []) for output in together] == [0, 0, 6, 0]


def test_several_sequences_have_one_prompt(llm: LLM) -> None:
    prompt = tiny.prompt(22)
    [output] = ask(llm, [prompt], SamplingParams(n=3, seed=1, max_tokens=5, prompt_logprobs=2, logprobs=1))
    check_equal(output.prompt_logprobs or [], prompt_logprobs(llm, prompt, 2))
    assert [len(sequence.logprobs or []) for sequence in output.outputs] == [5, 5, 5]


def test_b04_a_prompt_asked_for_again_is_computed_again(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = tiny.prompt(33)
    first, second = (ask(llm, [prompt], greedy(prompt_logprobs=1))[0] for _ in range(2))
    assert len(first.prompt_logprobs or []) == 33
    check_equal(second.prompt_logprobs or [], first.prompt_logprobs or [])
    assert second.num_cached_tokens == 0
    [third] = ask(llm, [prompt], greedy())
    assert third.num_cached_tokens == 32
    assert third.outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("mode", LOOP_NAMES)
def test_b04_chunked_and_preempted_prompts_have_the_values_of_plain_ones(llm: LLM, mode: str) -> None:
    """Three prompts of 40 tokens and 40 more to generate, in chunks of 16, where two of them and a bit fit."""
    prompts = [tiny.prompt(40 + shift)[shift:] for shift in (0, 3, 5)]
    params = greedy(40, prompt_logprobs=1, logprobs=1)
    plain = [ask(llm, [prompt], params)[0] for prompt in prompts]
    with exchanged_host(llm, num_blocks=48, max_num_seqs=4, mode=mode) as small:
        outputs = ask(llm, prompts, params)
        assert small.num_preemptions > 0
        beside = ask(llm, [tiny.prompt(7), *prompts], greedy(40, prompt_logprobs=-1))
    for got, expected in zip(outputs, plain, strict=True):
        assert got.outputs[0].token_ids == expected.outputs[0].token_ids
        check_equal(got.prompt_logprobs or [], expected.prompt_logprobs or [])
        check_equal([None, *(got.outputs[0].logprobs or [])], [None, *(expected.outputs[0].logprobs or [])])
    for output in beside:
        entries = output.prompt_logprobs or []
        assert [len(entry or ()) for entry in entries] == [0, *[VOCAB] * (len(output.prompt_token_ids) - 1)]
