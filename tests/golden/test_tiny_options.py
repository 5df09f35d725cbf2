"""Options of sampling through the whole engine, on the tiny Llama, against the plain numpy reference of the pipeline.

The reference judges a request's tokens one by one: from the logits behind the prompt and the tokens before.
"""

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from host import exchanged_host
from paged_forward import LoadedModel, compiled_ops
from sampler_reference import Row, reference_logprobs, reference_scores

from jaxpage import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from jaxpage.config import LOOP_NAMES

pytestmark = pytest.mark.usefixtures("quick_compiles")
PROMPT = "Paris Paris Paris"
NUM_TOKENS = 8
MARGIN = 1e-3
"""Tokens whose scores are closer than this may change places: the engine computes in float32."""


@pytest.fixture(scope="module")
def llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LoadedModel]:
    with compiled_ops():
        yield LoadedModel(Path(tiny_options["model"]))


def generate(
    llm: LLM, prompt: str | Sequence[str], params: SamplingParams | list[SamplingParams]
) -> list[RequestOutput]:
    return llm.generate(prompt, params, use_tqdm=False)


def alone(llm: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[list[int]]:
    return [generate(llm, prompt, params)[0].outputs[0].token_ids for prompt, params in requests]


def together(llm: LLM, requests: Sequence[tuple[str, SamplingParams]]) -> list[list[int]]:
    outputs = generate(llm, [prompt for prompt, _ in requests], [params for _, params in requests])
    return [output.outputs[0].token_ids for output in outputs]


def row_of(llm: LLM, output: RequestOutput, params: SamplingParams) -> Row:
    """What the reference needs to know of a request."""
    words = [llm.tokenizer.encode(text) for word in params.bad_words for text in (word, " " + word)]
    names = ("top_k", "top_p", "min_p", "logit_bias", "allowed_token_ids", "min_tokens", "stop_token_ids")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(params, name) for name in (*names, *penalties)} | {
        "temperature": params.effective_temperature,
        "seed": params.seed or 0,
        "bad_words": words,
        "prompt": output.prompt_token_ids,
    }


def wrong_tokens(
    llm: LLM, model: LoadedModel, outputs: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[int]:
    """Which of the outputs have a token that the reference would not draw, or another log-probability."""
    wrong = []
    for start in range(0, len(outputs), 7):
        batch = outputs[start : start + 7]
        known = [output.prompt_token_ids + output.outputs[0].token_ids for output in batch]
        for index, (output, logits) in enumerate(zip(batch, model.batch_logits(known, chunk=64), strict=True), start):
            row, [sequence] = row_of(llm, output, params[index]), output.outputs
            for count, token_id in enumerate(sequence.token_ids):
                raw = logits[len(output.prompt_token_ids) + count - 1]
                scores = reference_scores(raw, row | {"output": sequence.token_ids[:count]})
                found = (sequence.logprobs or [])[count][token_id].logprob
                if scores[token_id] < scores.max() - MARGIN or abs(found - reference_logprobs(raw)[token_id]) > 1e-4:
                    wrong.append(index)
    return wrong


OPTIONS: dict[str, dict[str, Any]] = {
    "hot": {"temperature": 1.9},
    "tiny temperature": {"temperature": 1e-9},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 1.2},
    "reward of frequency": {"frequency_penalty": -1.7},
    # Of the first greedy tokens, "\x07+Dl\0", some are made impossible by each.
    "bias": {"logit_bias": {ord("a"): 3.0, ord("D"): -4.0, 18: 2.0}},
    "allowed": {"allowed_token_ids": tuple(range(1, 100))},
    "bad words": {"bad_words": ("l", "+D", "a", "DD", "D\0D")},
    "minimum length": {"min_tokens": 5, "stop_token_ids": (7, ord("l"), ord("a"))},
}
PAIRS = [
    OPTIONS[one] | OPTIONS[other]
    for one, other in itertools.combinations_with_replacement(OPTIONS, 2)
    if one == other or not OPTIONS[one].keys() & OPTIONS[other].keys()
]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_every_pair_of_options_gives_the_tokens_and_log_probabilities_of_the_reference(
    llm: LLM, model: LoadedModel, greedy: bool
) -> None:
    """More requests than there are rows: each takes the row of another one with other options."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
    params = [
        SamplingParams(**(common | {"seed": seed} | options | ({"temperature": 0} if greedy else {})))
        for seed, options in enumerate(PAIRS)
    ]
    outputs = generate(llm, [PROMPT[index % 7 :] for index in range(len(params))], params)
    wrong = wrong_tokens(llm, model, outputs, params)
    assert [PAIRS[index] for index in wrong] == []
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 30


NON_SPECULATIVE_B09 = [
    *({"frequency_penalty": penalty} for penalty in (2, -2)),
    {"presence_penalty": 2}, {"repetition_penalty": 1.5}, {"logit_bias": {ord("l"): 2.5}},
    {"bad_words": ("l", "ell")}, {"allowed_token_ids": tuple(map(ord, "hello "))},
]  # fmt: skip


def test_b09_options_hold_on_a_prompt_that_repeats_itself(llm: LLM, model: LoadedModel) -> None:
    params = [SamplingParams(temperature=0, max_tokens=16, logprobs=0, **options) for options in NON_SPECULATIVE_B09]
    outputs = generate(llm, ["hello hello hello hello"] * len(params), params)
    assert wrong_tokens(llm, model, outputs, params) == []


# Whatever a request shares its steps with.

REQUESTS = [
    ("Once upon", {"frequency_penalty": 0.5, "seed": 1}),
    ("a time there was", {"repetition_penalty": 1.4, "presence_penalty": 1, "seed": -2, "top_p": 0.9}),
    ("an engine", {"temperature": 0, "frequency_penalty": 1.5}),
    ("that drew", {"bad_words": ("a", "th"), "seed": 2**50, "temperature": 1.3, "top_k": 20}),
    ("tokens", {"allowed_token_ids": tuple(range(32, 100)), "frequency_penalty": 0.3, "seed": 4}),
    ("one by one", {"logit_bias": {5: 2, 101: -3}, "seed": 5, "min_p": 0.02}),
    ("plain", {"seed": 6}),
]


def varied(max_tokens: int = 30) -> list[tuple[str, SamplingParams]]:
    return [(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)) for prompt, options in REQUESTS]


def test_options_give_the_same_alone_together_in_any_row_and_from_cached_prefixes(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    requests = varied()
    expected = alone(llm, requests)
    assert together(llm, requests) == expected
    assert together(llm, requests[::-1]) == expected[::-1]
    for shift in (2, 5):
        # Others finish meanwhile, and their rows are taken by those that wait.
        short = [(prompt, SamplingParams(max_tokens=shift, seed=7, presence_penalty=2)) for prompt, _ in requests]
        order = [*short[:shift], *requests[shift:], *requests[:shift], *short[shift:]]
        got = together(llm, order)
        assert got[shift : shift + len(requests)] == expected[shift:] + expected[:shift]
    (again,) = generate(llm, *requests[1])
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == expected[1]


@pytest.mark.parametrize("mode", LOOP_NAMES)
def test_b06_options_give_the_same_in_every_mode_after_preemption(llm: LLM, mode: str) -> None:
    """With log-probabilities, which are as many as there are tokens, also where a text is streamed."""
    requests = varied(60)
    expected = alone(llm, requests)
    params = SamplingParams(
        max_tokens=100, ignore_eos=True, frequency_penalty=0.5, logprobs=1, seed=3, skip_special_tokens=False
    )
    solos = [generate(llm, letter * 5, params)[0].outputs[0] for letter in "abc"]
    with exchanged_host(llm, num_blocks=60, mode=mode) as small:
        assert together(llm, requests) == expected
        before = small.num_preemptions
        assert before > 0
        outputs = generate(llm, [letter * 5 for letter in "abc"], params)
        assert small.num_preemptions > before
        for letter, output, solo in zip("abc", outputs, solos, strict=True):
            assert output.outputs[0].token_ids == solo.token_ids
            assert len(output.outputs[0].token_ids) == len(output.outputs[0].logprobs or []) == 100
            *_, last = llm.stream(letter * 5, params)
            assert last.outputs[0].text == solo.text


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (ord("t"),)}, {"logit_bias": {ord("t"): 100}}, {"bad_words": ("P", "I?")},
        {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"min_tokens": 30, "stop_token_ids": tuple(range(32, 64))}, {"logits_processors": ("nowhere",)},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]*")},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_b19_a_constraint_stays_with_its_request_and_leaves_its_row_with_it(llm: LLM, options: dict[str, Any]) -> None:
    """Three rows: the fourth request takes the first one's, the fifth that of the one with a constraint."""
    plain = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    constrained = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **options)
    requests = [
        ("B", SamplingParams(temperature=0, max_tokens=1)),
        ("D is long", plain),
        ("A", constrained),
        ("C comes later", plain),
        ("E", plain),
        ("F", SamplingParams(max_tokens=20, seed=9, ignore_eos=True)),
    ]
    expected = alone(llm, requests)
    with exchanged_host(llm, max_num_seqs=3):
        assert together(llm, requests) == expected
        assert together(llm, requests[::-1]) == expected[::-1]
    assert expected[2] != alone(llm, [("A", plain)])[0]


# What each is for.


def test_a16_a_bias_forces_and_bans_tokens_and_what_is_no_token_is_refused(llm: LLM) -> None:
    [plain] = alone(llm, [(PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))])
    forced, banned = ({5: 100.0}, {plain[0]: -100.0})
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=bias) for bias in (forced, banned)
    ]
    assert together(llm, [(PROMPT, params[0])]) == [[5] * 5]
    [without] = together(llm, [(PROMPT, params[1])])
    assert plain[0] not in without
    with pytest.raises(ValueError, match="logit_bias holds 138, and token ids are below 128"):
        generate(llm, PROMPT, SamplingParams(logit_bias={138: 5}))
    assert alone(llm, [(PROMPT, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))]) == [plain]


def test_b17_bad_words_hold_for_every_sequence(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=60, ignore_eos=True)
    [plain] = generate(llm, PROMPT, params)
    texts = [sequence.text for sequence in plain.outputs]
    one = max(set("".join(texts)), key="".join(texts).count)
    two = texts[0][10:12]
    [without] = generate(llm, PROMPT, SamplingParams(n=3, seed=1, max_tokens=60, ignore_eos=True, bad_words=(one, two)))
    for sequence in without.outputs:
        assert one not in sequence.text
        assert two not in sequence.text
    # The parts of a phrase are allowed by themselves.
    phrase = SamplingParams(n=3, seed=1, max_tokens=60, ignore_eos=True, bad_words=(two,))
    joined = "".join(sequence.text for sequence in generate(llm, PROMPT, phrase)[0].outputs)
    assert two not in joined
    assert two[0] in joined
    assert two[1] in joined


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.5}], ids=str
)
def test_b22_penalties_are_over_the_right_tokens_also_from_a_cached_prefix_and_after_preemption(
    llm: LLM, model: LoadedModel, options: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=5, ignore_eos=True, **options)
    assert llm.reset_prefix_cache()
    outputs = [generate(llm, PROMPT, params)[0] for _ in range(2)]
    assert [output.num_cached_tokens > 0 for output in outputs] == [False, True]
    assert wrong_tokens(llm, model, outputs, [params] * 2) == []
    with exchanged_host(llm, num_blocks=22) as small:
        preempted = generate(llm, [PROMPT, PROMPT[1:], PROMPT[2:]], params)
        assert small.num_preemptions > 0
    assert wrong_tokens(llm, model, preempted, [params] * 3) == []
    plain = generate(llm, PROMPT, SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True))[0]
    first = outputs[0].outputs[0]
    if "repetition_penalty" not in options:  # nothing is generated yet
        assert first.token_ids[0] == plain.outputs[0].token_ids[0]


@pytest.fixture(scope="module")
def two_ends(tiny_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model with two EOS tokens: "x" and "y"."""
    folder = tmp_path_factory.mktemp("ends") / "model"
    shutil.copytree(tiny_options["model"], folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ord("x"), ord("y")]}))
    with LLM(**tiny_options | {"model": str(folder)}, multiprocess=False) as llm:
        yield llm


@pytest.mark.parametrize("end", "xy")
def test_b13_minimum_length_holds_back_every_way_to_end(two_ends: LLM, end: str) -> None:
    def run(**options: Any) -> Any:
        return generate(two_ends, PROMPT, SamplingParams(temperature=0, **{"max_tokens": 20} | options))[0].outputs[0]

    towards_end = {"logit_bias": {ord(end): 100}}
    held = run(min_tokens=10, **towards_end)
    assert len(held.token_ids) == 11
    assert not {ord("x"), ord("y")} & set(held.token_ids[:10])
    assert (held.token_ids[10], held.finish_reason) == (ord(end), "stop")

    plain = run(ignore_eos=True)
    stop = plain.text[1:3]
    stopped = run(stop=(stop,), min_tokens=10, ignore_eos=True)
    assert stopped.token_ids[:10] == plain.token_ids[:10]
    third = plain.token_ids[2]
    masked = run(stop_token_ids=(third,), min_tokens=10, ignore_eos=True)
    assert third not in masked.token_ids[:10]
    assert len(masked.token_ids) >= 10

    ignored = run(max_tokens=8, ignore_eos=True, **towards_end)
    assert (ignored.token_ids, ignored.finish_reason) == ([ord(end)] * 8, "length")
    branch_free = run(max_tokens=8, **towards_end)
    assert (branch_free.text, branch_free.finish_reason, len(branch_free.token_ids)) == ("", "stop", 1)
