"""The offline API on a tiny model in this process: sequences, beams, log-probabilities, prefix caching, priorities."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from jaxpage import LLM, BeamSearchParams, ConfigError, EngineDeadError, RequestError, SamplingParams
from jaxpage.engine.core import EngineCore
from jaxpage.outputs import CompletionOutput, RequestOutput

pytestmark = pytest.mark.usefixtures("quick_compiles")
BLOCK_SIZE = 4
HELLO = [{"role": "user", "content": "Hi"}]
CHAT_TEMPLATE = "{{ tools[0].function.name }} {{ mood }}: {{ messages[0].content }}{{ add_generation_prompt }}"
GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "tiny_logits.npz")


@pytest.fixture(scope="module")
def shared_llm(
    tiny_options: dict[str, Any], quick_compiles: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    with LLM(**tiny_options, multiprocess=False, chat_template=str(template)) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """Without cached prefixes. Nothing may be left running."""
    assert shared_llm.reset_prefix_cache()
    yield shared_llm
    assert is_idle(shared_llm)


def is_idle(llm: LLM) -> bool:
    stats = llm.stats
    nothing_runs = stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    return nothing_runs and llm.kv_cache_snapshot()["num_used"] == 0


def greedy(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def sampled(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def one(llm: LLM, prompt: str | list[int], params: SamplingParams, **options: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, params, **options)
    assert output.finished
    return output


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.outputs]


# Several sequences.


@pytest.mark.parametrize("length", [1, 4, 5, 15, 16, 17, 50])
def test_several_sequences_are_those_of_single_requests_with_the_next_seeds(llm: LLM, length: int) -> None:
    """Prompts that end within a block, at its end and after it, and one that takes several steps."""
    together = one(llm, tiny.prompt(length), sampled(n=4, seed=11))
    alone = [one(llm, tiny.prompt(length), sampled(seed=11 + i)) for i in range(4)]
    assert [sequence.index for sequence in together.outputs] == [0, 1, 2, 3]
    assert tokens_of(together) == [tokens_of(output)[0] for output in alone]
    assert len(set(map(tuple, tokens_of(together)))) == 4
    assert [sequence.text for sequence in together.outputs] == [output.outputs[0].text for output in alone]


def test_more_sequences_than_rows_take_turns(llm: LLM) -> None:
    together = one(llm, tiny.prompt(9), sampled(8, n=19, seed=100))
    assert tokens_of(together) == [tokens_of(one(llm, tiny.prompt(9), sampled(8, seed=100 + i)))[0] for i in range(19)]


def test_seeds_of_later_sequences_step_over_the_one_that_means_none(llm: LLM) -> None:
    together = one(llm, tiny.prompt(9), sampled(n=3, seed=-2))
    assert tokens_of(together) == [tokens_of(one(llm, tiny.prompt(9), sampled(seed=seed)))[0] for seed in (-2, 0, 1)]


def test_several_sequences_of_several_prompts_are_the_same_as_one_prompt_at_a_time(llm: LLM) -> None:
    prompts = [tiny.prompt(length) for length in (3, 18, 30)]
    params = [sampled(n=n, seed=n) for n in (3, 5, 2)]
    together = llm.generate(prompts, params)
    assert [len(output.outputs) for output in together] == [3, 5, 2]
    alone = [one(llm, prompt, its) for prompt, its in zip(prompts, params, strict=True)]
    assert [tokens_of(output) for output in together] == [tokens_of(output) for output in alone]


def test_unseeded_sequences_differ_from_each_other_and_from_call_to_call(llm: LLM) -> None:
    drawn = [tuple(tokens) for _ in range(2) for tokens in tokens_of(one(llm, tiny.prompt(9), sampled(n=3)))]
    assert len(set(drawn)) == 6


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_stop_string_ends_one_sequence_while_the_others_go_on(llm: LLM, stopped: int) -> None:
    plain = one(llm, tiny.prompt(18), sampled(20, n=3, seed=3)).outputs
    stop = plain[stopped].text[5:8]
    assert [stop in sequence.text for sequence in plain] == [i == stopped for i in range(3)]
    outputs = one(llm, tiny.prompt(18), sampled(20, n=3, seed=3, stop=(stop,))).outputs
    for i, (sequence, unstopped) in enumerate(zip(outputs, plain, strict=True)):
        if i == stopped:
            assert sequence.text == unstopped.text[:5]
            assert (sequence.finish_reason, sequence.stop_reason) == ("stop", stop)
            assert len(sequence.token_ids) == 8
        else:
            assert (sequence.token_ids, sequence.finish_reason) == (unstopped.token_ids, "length")


def test_streamed_sequences_grow_to_those_of_generate(llm: LLM) -> None:
    outputs = list(llm.stream(tiny.prompt(10), sampled(n=3, seed=5)))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in itertools.pairwise(outputs):
        for before, after in zip(tokens_of(earlier), tokens_of(later), strict=True):
            assert after[: len(before)] == before
    assert tokens_of(outputs[-1]) == tokens_of(one(llm, tiny.prompt(10), sampled(n=3, seed=5)))


def test_the_shared_prompt_is_no_cached_one(llm: LLM) -> None:
    assert one(llm, tiny.prompt(18), sampled(n=3, seed=5)).num_cached_tokens == 0
    assert one(llm, tiny.prompt(18), sampled(n=3, seed=5)).num_cached_tokens == 16


# Log-probabilities.


def check_logprobs(sequence: CompletionOutput, asked: int) -> None:
    """What must hold of each entry whatever the model is."""
    assert sequence.logprobs is not None
    assert len(sequence.logprobs) == len(sequence.token_ids)
    for token_id, entry in zip(sequence.token_ids, sequence.logprobs, strict=True):
        ranked = sorted(entry.values(), key=lambda logprob: logprob.rank)
        assert token_id in entry
        assert asked <= len(entry) <= asked + 1
        assert [logprob.rank for logprob in ranked[:asked]] == list(range(1, asked + 1))
        assert all(earlier.logprob >= later.logprob for earlier, later in itertools.pairwise(ranked))
        assert {i: logprob.decoded_token for i, logprob in entry.items()} == {i: chr(i) for i in entry}
    chosen = [entry[token_id] for token_id, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]
    assert sequence.cumulative_logprob == pytest.approx(sum(logprob.logprob for logprob in chosen))


@pytest.mark.parametrize("asked", [0, 1, 5, 20])
@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_every_token_comes_with_as_many_alternatives_as_asked_for(llm: LLM, kind: str, asked: int) -> None:
    params = greedy(logprobs=asked) if kind == "greedy" else sampled(temperature=2, seed=1, logprobs=asked)
    sequence = one(llm, tiny.prompt(20), params).outputs[0]
    check_logprobs(sequence, asked)
    assert sequence.logprobs is not None
    ranks = [entry[i].rank for i, entry in zip(sequence.token_ids, sequence.logprobs, strict=True)]
    assert (set(ranks) == {1}) == (kind == "greedy")


def test_without_asking_there_are_none(llm: LLM) -> None:
    sequence = one(llm, tiny.prompt(20), greedy()).outputs[0]
    assert (sequence.logprobs, sequence.cumulative_logprob, sequence.score) == (None, None, None)


def test_log_probabilities_are_those_of_transformers(llm: LLM) -> None:
    logits = GOLDEN["llama/100/logits"][-1].astype(np.float64)
    expected = logits - np.logaddexp.reduce(logits)
    sequence = one(llm, tiny.prompt(100), greedy(1, logprobs=20)).outputs[0]
    assert sequence.logprobs is not None
    (entry,) = sequence.logprobs
    assert list(entry) == np.argsort(-expected)[:20].tolist()
    np.testing.assert_allclose([found.logprob for found in entry.values()], expected[list(entry)], atol=1e-4)


def test_options_of_the_draw_do_not_change_log_probabilities(llm: LLM) -> None:
    plain = one(llm, tiny.prompt(20), greedy(1, logprobs=5)).outputs[0].logprobs
    options: list[dict[str, Any]] = [{"temperature": 0.3}, {"top_k": 2, "temperature": 2}, {"min_p": 0.5}, {"seed": 9}]
    for changed in options:
        found = one(llm, tiny.prompt(20), sampled(1, **{"seed": 1, "logprobs": 5} | changed)).outputs[0].logprobs
        assert plain is not None
        assert found is not None
        assert {i: found[0][i] for i in plain[0]} == plain[0]


def test_requests_that_ask_for_different_numbers_share_a_batch(llm: LLM) -> None:
    params = [sampled(logprobs=asked, seed=i) for i, asked in enumerate([None, 0, 5, 1])]
    outputs = [output.outputs[0] for output in llm.generate([tiny.prompt(length) for length in (5, 6, 7, 8)], params)]
    assert outputs[0].logprobs is None
    for sequence, asked in zip(outputs[1:], (0, 5, 1), strict=True):
        check_logprobs(sequence, asked)
    silent = [sampled(seed=i) for i in range(4)]
    plain = llm.generate([tiny.prompt(length) for length in (5, 6, 7, 8)], silent)
    assert [sequence.token_ids for sequence in outputs] == [tokens_of(output)[0] for output in plain]


def test_each_of_several_sequences_has_its_own(llm: LLM) -> None:
    for sequence in one(llm, tiny.prompt(20), sampled(n=3, seed=2, logprobs=2)).outputs:
        check_logprobs(sequence, 2)


# Beam search.


def test_beams_are_sorted_by_score_which_is_log_probability_by_length(llm: LLM) -> None:
    for penalty in (0.0, 1.0, 2.0, -0.5):
        params = BeamSearchParams(beam_width=4, max_tokens=10, length_penalty=penalty, stop_token_ids=(7, 116))
        (output,) = llm.beam_search(tiny.prompt(10), params)
        scores = [sequence.score for sequence in output.outputs]
        assert len(scores) == 4
        assert [sequence.index for sequence in output.outputs] == [0, 1, 2, 3]
        assert scores == sorted(scores, reverse=True, key=lambda score: score or 0)
        assert len(set(map(tuple, tokens_of(output)))) == 4
        for sequence in output.outputs:
            assert sequence.cumulative_logprob is not None
            length = len(sequence.token_ids)
            assert sequence.score == pytest.approx(sequence.cumulative_logprob / length**penalty)
            assert sequence.finish_reason == ("stop" if sequence.token_ids[-1] in (2, 7, 116) else "length")


def test_a_beams_log_probability_is_the_sum_over_its_tokens(llm: LLM) -> None:
    prompt = tiny.prompt(10)
    (output,) = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    for sequence in output.outputs:
        total = 0.0
        for position, token_id in enumerate(sequence.token_ids):
            entry = one(llm, prompt + sequence.token_ids[:position], greedy(1, logprobs=20)).outputs[0].logprobs
            assert entry is not None
            total += entry[0][token_id].logprob
        assert sequence.cumulative_logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("length", [3, 16, 17])
def test_one_beam_is_greedy(llm: LLM, length: int) -> None:
    (output,) = llm.beam_search(tiny.prompt(length), BeamSearchParams(beam_width=1, max_tokens=15))
    plain = one(llm, tiny.prompt(length), SamplingParams(temperature=0, max_tokens=15, logprobs=0)).outputs[0]
    (beam,) = output.outputs
    assert (beam.token_ids, beam.text, beam.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert beam.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-4)


def test_searches_that_share_a_batch_find_what_each_finds_alone(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=9)
    prompts = [tiny.prompt(length) for length in (3, 16, 22, 40)]
    together = llm.beam_search(prompts, params)
    assert [tokens_of(output) for output in together] == [tokens_of(llm.beam_search(p, params)[0]) for p in prompts]


def test_a_beam_search_ends_where_the_context_does(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=1000, ignore_eos=True)
    (output,) = llm.beam_search(tiny.prompt(120), params)
    assert [len(tokens) for tokens in tokens_of(output)] == [8, 8]
    assert {sequence.finish_reason for sequence in output.outputs} == {"length"}


def test_a_beam_search_that_cannot_run_is_refused_before_anything_does(llm: LLM) -> None:
    with pytest.raises(RequestError, match="beam_width is 9, and 8 sequences run at once"):
        llm.beam_search(tiny.prompt(5), BeamSearchParams(beam_width=9))
    # 80 blocks: 10 of each of 8 beams, and the last token needs no place.
    fits = BeamSearchParams(beam_width=8, max_tokens=21, ignore_eos=True)
    assert len(llm.beam_search(tiny.prompt(20), fits)[0].outputs) == 8
    with pytest.raises(RequestError, match=r"8 beams of 20 \+ 22 tokens do not fit in the KV cache, which holds 40"):
        llm.beam_search([tiny.prompt(5), tiny.prompt(20)], BeamSearchParams(beam_width=8, max_tokens=22))
    ids = tuple(range(3, 31))  # 28, and EOS
    with pytest.raises(RequestError, match="beam_width is 4, and with 29 ending tokens it must be at most 3"):
        llm.beam_search(tiny.prompt(5), BeamSearchParams(beam_width=4, stop_token_ids=ids))
    assert is_idle(llm)


def test_a_search_finds_the_same_with_its_prompt_in_the_cache(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    cold, warm = (llm.beam_search(tiny.prompt(23), params)[0] for _ in range(2))
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 20)
    assert tokens_of(cold) == tokens_of(warm)


# Prefix caching.


def test_a_chat_goes_through_the_given_template_with_tools_and_variables(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    [chat] = llm.chat(HELLO, greedy(), tools=tools, chat_template_kwargs={"mood": "calm"}, add_generation_prompt=False)
    [plain] = llm.generate("f calm: HiFalse", greedy())
    assert chat.prompt_token_ids == plain.prompt_token_ids
    assert chat.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match="messages"):
        llm.chat(HELLO, chat_template_kwargs={"messages": []})


@pytest.fixture(scope="module")
def uncached_llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize("length", [3, 4, 5, 16, 17, 63, 64, 65])
def test_a_warm_cache_gives_the_same_tokens_as_a_cold_one_and_as_none(llm: LLM, uncached_llm: LLM, length: int) -> None:
    params = [greedy(logprobs=1), sampled(seed=3)]
    prompt = tiny.prompt(length)
    cold = [one(llm, prompt, its) for its in params[:1]] + [one(uncached_llm, prompt, params[1])]
    warm = [one(llm, prompt, its) for its in params]
    off = [one(uncached_llm, prompt, its) for its in params]
    assert [tokens_of(output) for output in warm] == [tokens_of(output) for output in cold]
    assert [tokens_of(output) for output in off] == [tokens_of(output) for output in cold]
    assert [output.num_cached_tokens for output in cold] == [0, 0]
    assert [output.num_cached_tokens for output in off] == [0, 0]
    # Whole blocks, and never the last token: its logits are needed.
    assert {output.num_cached_tokens for output in warm} == {(length - 1) // BLOCK_SIZE * BLOCK_SIZE}


def test_generated_tokens_are_a_prefix_to_go_on_from(llm: LLM) -> None:
    prompt = tiny.prompt(10)
    whole = tokens_of(one(llm, prompt, greedy(20)))[0]
    output = one(llm, prompt + whole[:11], greedy(9))
    assert output.num_cached_tokens == 20
    assert tokens_of(output) == [whole[11:]]


def test_prompts_of_one_batch_share_their_common_start(llm: LLM) -> None:
    start = tiny.prompt(40)
    prompts = [[*start, i] for i in (5, 6, 7)]
    outputs = llm.generate(prompts, greedy())
    assert llm.stats["prefix_cache_hits"] > 0
    assert [tokens_of(output) for output in outputs] == [
        tokens_of(one(llm, prompt, greedy(skip_reading_prefix_cache=True))) for prompt in prompts
    ]


def test_requests_of_another_salt_find_nothing(llm: LLM) -> None:
    prompt = tiny.prompt(21)
    found = [
        one(llm, prompt, greedy(), cache_salt=salt).num_cached_tokens for salt in ("a", "b", None, "a", "b", None, "c")
    ]
    assert found == [0, 0, 0, 20, 20, 20, 0]


def test_a_request_may_compute_its_whole_prompt_though_it_is_cached(llm: LLM) -> None:
    cold = one(llm, tiny.prompt(21), greedy())
    skipping = one(llm, tiny.prompt(21), greedy(skip_reading_prefix_cache=True))
    assert skipping.num_cached_tokens == 0
    assert tokens_of(skipping) == tokens_of(cold)
    assert one(llm, tiny.prompt(21), greedy()).num_cached_tokens == 20


def test_a_reset_forgets_all_prefixes(llm: LLM) -> None:
    one(llm, tiny.prompt(21), greedy())
    assert llm.kv_cache_snapshot()["num_cached"] > 0
    assert llm.reset_prefix_cache()
    assert llm.kv_cache_snapshot()["num_cached"] == 0
    assert one(llm, tiny.prompt(21), greedy()).num_cached_tokens == 0


# Utilities, and calls that overlap.


def test_a_snapshot_shows_each_sequence_with_its_blocks(llm: LLM) -> None:
    outputs = llm.stream(tiny.prompt(18), sampled(n=3, seed=1))
    while len(next(outputs).outputs[2].token_ids) < 2:
        pass
    snapshot = llm.kv_cache_snapshot()
    assert snapshot["num_blocks"] == 80
    assert snapshot["num_used"] + snapshot["num_free"] == 80
    assert snapshot["groups"] == [{"kind": "full", "span": None, "block_size": 4, "num_layers": 2}]
    assert len({request["request_id"] for request in snapshot["requests"]}) == 3
    tables = [request["block_tables"][0] for request in snapshot["requests"]]
    assert [table[:4] for table in tables] == [tables[0][:4]] * 3  # the 16 tokens that all have in common
    own = [block_id for table in tables for block_id in table[4:]]
    assert len(set(own)) == len(own)
    assert snapshot["num_used"] == 4 + len(own)
    for request in snapshot["requests"]:
        assert len(request["block_tables"][0]) == math.ceil(request["num_computed_tokens"] / BLOCK_SIZE)
    list(outputs)
    assert llm.kv_cache_snapshot()["requests"] == []


def test_utilities_between_the_steps_of_a_stream_change_nothing(llm: LLM) -> None:
    expected = tokens_of(one(llm, tiny.prompt(18), sampled(n=3, seed=1)))
    outputs = []
    for output in llm.stream(tiny.prompt(18), sampled(n=3, seed=1)):
        outputs.append(output)
        if not output.finished:
            runs = llm.kv_cache_snapshot()["requests"] != []  # or its last outputs are still to be read
            assert llm.reset_prefix_cache() is not runs
    assert tokens_of(outputs[-1]) == expected


def test_streams_that_take_turns_each_give_their_own_tokens(llm: LLM) -> None:
    params = [sampled(10, n=2, seed=1), greedy(6), sampled(14, seed=8)]
    prompts = [tiny.prompt(length) for length in (5, 18, 33)]
    streams = [llm.stream(prompt, its) for prompt, its in zip(prompts, params, strict=True)]
    last: dict[int, RequestOutput] = {}
    for outputs in itertools.zip_longest(*streams):
        last |= {i: output for i, output in enumerate(outputs) if output is not None}
    alone = [one(llm, prompt, its) for prompt, its in zip(prompts, params, strict=True)]
    assert [tokens_of(last[i]) for i in range(3)] == [tokens_of(output) for output in alone]


def test_a_batch_in_the_middle_of_a_stream_disturbs_neither(llm: LLM) -> None:
    stream = llm.stream(tiny.prompt(6), greedy(20))
    next(stream)
    between = one(llm, tiny.prompt(18), sampled(n=2, seed=4))
    *_, last = stream
    assert tokens_of(last) == tokens_of(one(llm, tiny.prompt(6), greedy(20)))
    assert tokens_of(between) == tokens_of(one(llm, tiny.prompt(18), sampled(n=2, seed=4)))


@pytest.mark.parametrize("num_outputs", [1, 2, 5])
def test_a_stream_that_is_left_early_leaves_nothing_behind(llm: LLM, num_outputs: int) -> None:
    """Its later sequences wait for the first one's prompt, or run."""
    stream = llm.stream(tiny.prompt(18), sampled(40, n=10, seed=1))
    for _ in range(num_outputs):
        next(stream)
    assert not is_idle(llm)
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(llm)


def test_a_stream_of_a_closed_llm_ends_with_an_error(tiny_options: dict[str, Any]) -> None:
    llm = LLM(**tiny_options, multiprocess=False)
    stream = llm.stream(tiny.prompt(5), greedy())
    next(stream)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        next(stream)
    for call in (llm.reset_prefix_cache, llm.kv_cache_snapshot):
        with pytest.raises(EngineDeadError, match="closed"):
            call()


# Scheduling policies.

PRIORITIES = [5, 0, 9, 3, 7, 1, 8, 2, 6, 4, -1, 10]
"""For twelve prompts at once, on eight rows."""


def order_of_first_tokens(llm: LLM, priorities: list[int]) -> list[set[int]]:
    """Which prompts were served together, in the order of their first tokens; each gets one token only."""
    prompts = [tiny.prompt(1)] * len(priorities)
    # A prompt of one token each: the eight rows take eight of them in one step, and all are done.
    outputs = llm.generate(prompts, [sampled(1, seed=i) for i in range(len(prompts))], priority=priorities)
    times = [output.metrics.first_token_time or 0.0 for output in outputs]
    ranked = sorted(range(len(times)), key=times.__getitem__)
    return [set(ranked[:8]), set(ranked[8:])]


def test_first_come_is_first_served_whatever_its_priority(llm: LLM) -> None:
    assert order_of_first_tokens(llm, PRIORITIES) == [set(range(8)), set(range(8, 12))]


def test_lower_priorities_go_first_under_the_priority_policy(tiny_options: dict[str, Any]) -> None:
    with LLM(**tiny_options, multiprocess=False, scheduling_policy="priority") as llm:
        by_priority = sorted(range(12), key=PRIORITIES.__getitem__)
        assert order_of_first_tokens(llm, PRIORITIES) == [set(by_priority[:8]), set(by_priority[8:])]
        with pytest.raises(RequestError, match="2 priority for 3 prompts"):
            llm.generate([[1], [2], [3]], greedy(), priority=[1, 2])


def test_a_policy_of_ones_own_is_named_by_its_import_path(
    tiny_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last_come.py").write_text(
        "class LastComeFirstServed:\n"
        "    def key(self, request): return -request.arrival, request.index\n"
        "    def victim(self, running): return running[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with LLM(**tiny_options, multiprocess=False, scheduling_policy="last_come:LastComeFirstServed") as llm:
        assert order_of_first_tokens(llm, PRIORITIES) == [set(range(4, 12)), set(range(4))]


def test_a_policy_that_is_none_is_refused_before_the_weights_are_read(tiny_options: dict[str, Any]) -> None:
    """What the model's config refuses would come after them."""
    options = tiny_options | {"max_model_len": 10**9, "scheduling_policy": "lifo"}
    with pytest.raises(ConfigError, match="--scheduling-policy is 'lifo': it must be one of fcfs, priority"):
        LLM(**options, multiprocess=False)


def test_options_for_another_number_of_prompts_are_refused(llm: LLM) -> None:
    for params in ([], [greedy()], [greedy()] * 3):
        with pytest.raises(RequestError, match=f"{len(params)} sampling_params for 2 prompts"):
            llm.generate([[1], [2]], params)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"priority": 1.5}, "priority is 1.5"),
        ({"priority": 2**63}, "priority is 9223372036854775808"),
        ({"cache_salt": ""}, "cache_salt is ''"),
        ({"cache_salt": 5}, "cache_salt is 5"),
    ],
)
def test_a_bad_priority_or_salt_is_refused_by_value(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([5], greedy(), **options)


def test_a_step_that_fails_is_the_engines_death_here_too(
    tiny_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: EngineCore) -> Any:
        raise ValueError("a kernel of ours is wrong")

    with LLM(**tiny_options, multiprocess=False) as llm:
        monkeypatch.setattr(EngineCore, "step", fails)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="a kernel of ours is wrong"):
                one(llm, tiny.prompt(5), greedy())
