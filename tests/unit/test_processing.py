"""What options make of the logits, and all of them in pairs against the plain numpy reference of the pipeline."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_reference import (
    MAX_MODEL_LEN,
    Row,
    device_states,
    full,
    reference_logprobs,
    reference_process,
    reference_scores,
)

from jaxpage.ops.sampling.processing import LAST_RESORT, process
from jaxpage.ops.sampling.sampling import TokenMask, sample, token_logprobs

VOCAB = 61
PROMPT, OUTPUT = (3, 4, 5, 4, 9, 30), (7, 4, 7, 11, 7)
run_process, run_sample = (jax.jit(function, static_argnames="branch_free") for function in (process, sample))
run_logprobs = jax.jit(token_logprobs, static_argnums=3, static_argnames="branch_free")


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    """Some of a token's logits are positive, some negative, and the tokens of prompt and output are probable."""
    logits = np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 2
    logits[:, [*PROMPT, *OUTPUT]] += 1
    return logits


def processed(logits: np.ndarray, rows: Sequence[Row]) -> np.ndarray:
    return np.asarray(run_process(jnp.asarray(logits), device_states(rows, logits.shape[1])[1]))


def check(rows: Sequence[Row], seed: int = 0) -> np.ndarray:
    """What the device makes of random logits, which must be what the reference does. Returns what it changed."""
    logits = random_logits(len(rows), seed)
    got = processed(logits, rows)
    expected = np.stack([reference_process(row, options) for row, options in zip(logits, rows, strict=True)])
    np.testing.assert_allclose(got, expected, atol=1e-4)
    return np.where(np.isneginf(got), -np.inf, got - logits)


OPTIONS: dict[str, Row] = {
    "hot": {"temperature": 1.9},
    "tiny temperature": {"temperature": 1e-9},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.4},
    "reward of repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "reward of presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.2},
    "reward of frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": {4: 3.0, 7: -2.0, 20: 4.5}},
    "ban and force": {"logit_bias": {11: 100.0, 4: -100.0}},
    "allowed": {"allowed_token_ids": (4, 7, 11, 20, 21, 40, 60)},
    "bad word": {"bad_words": ((20,), (7,))},
    "bad words of several tokens": {"bad_words": ((7, 11), (11, 7, 4), (4, 7, 11, 7, 21), (9, 30, 7), (8, 40))},
    "minimum length": {"min_tokens": 6, "stop_token_ids": (4, 20, 60)},
    "minimum length reached": {"min_tokens": 5, "stop_token_ids": (4, 20, 60)},
}
PAIRS = [
    (f"{one} x {other}", OPTIONS[one] | OPTIONS[other])
    for one, other in itertools.combinations_with_replacement(OPTIONS, 2)
    if one == other or not OPTIONS[one].keys() & OPTIONS[other].keys()
]
"""Every option with every other that can meet it, and each by itself."""
NUM_LOGITS = 3


@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_every_pair_of_options_gives_the_tokens_and_log_probabilities_of_the_reference(
    greedy: bool, branch_free: bool
) -> None:
    """All in one batch, so that rows would disturb each other if they could."""
    rows, names = [], []
    for name, options in PAIRS:
        for seed in range(NUM_LOGITS):
            known = {"prompt": PROMPT, "output": OUTPUT[: 5 - seed % 2], "seed": seed * 2**33 - 7}
            rows.append(known | options | ({"temperature": 0.0} if greedy else {}))
            names.append(name)
    logits = random_logits(len(rows))
    states = device_states(rows, VOCAB)
    expected_logits = np.stack([reference_process(row, options) for row, options in zip(logits, rows, strict=True)])
    got_logits = run_process(jnp.asarray(logits), states[1], branch_free=branch_free)
    np.testing.assert_allclose(np.asarray(got_logits), expected_logits, atol=1e-4)

    expected = [int(reference_scores(row, options).argmax()) for row, options in zip(logits, rows, strict=True)]
    drawn = np.asarray(run_sample(jnp.asarray(logits), *states, branch_free=branch_free))
    wrong = {name for name, got, token in zip(names, drawn.tolist(), expected, strict=True) if got != token}
    assert not wrong
    assert len(set(expected)) > 20
    logprobs = run_logprobs(
        jnp.asarray(logits), jnp.asarray(drawn), jnp.zeros(len(rows), jnp.int32), 5, branch_free=branch_free
    )
    exact = np.take_along_axis(reference_logprobs(logits), drawn[:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(np.asarray(logprobs.token), exact, atol=1e-4)


@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "seeded"])
def test_every_pair_of_options_within_a_grammar_gives_the_tokens_of_the_reference(
    greedy: bool, branch_free: bool
) -> None:
    rows = []
    for index, (_, options) in enumerate(PAIRS):
        chosen = np.random.default_rng(index).choice(VOCAB, size=1 + index % 9, replace=False)
        known = {"prompt": PROMPT, "output": OUTPUT, "seed": index, "mask": tuple(chosen.tolist())}
        rows.append(known | options | ({"temperature": 0.0} if greedy else {}))
    logits = random_logits(len(rows), seed=1)
    masks = np.zeros((len(rows), 64), np.uint8)
    for mask, row in zip(masks, rows, strict=True):
        mask[list(row["mask"])] = 1
    words = jnp.asarray(np.packbits(masks, axis=1, bitorder="little").view("<i4"))
    for index in range(0, len(rows), 3):  # beside rows without a grammar
        del rows[index]["mask"]
    is_on = jnp.asarray(["mask" in row for row in rows])
    states = device_states(rows, VOCAB)
    drawn = np.asarray(
        run_sample(jnp.asarray(logits), *states, TokenMask(is_on, words), branch_free=branch_free)
    ).tolist()
    expected = [int(reference_scores(row, options).argmax()) for row, options in zip(logits, rows, strict=True)]
    assert drawn == expected
    assert all(token in row.get("mask", [token]) for token, row in zip(drawn, rows, strict=True))


def test_rows_without_options_keep_their_logits_beside_rows_with_all_of_them() -> None:
    everything = OPTIONS["bias"] | OPTIONS["allowed"] | OPTIONS["bad word"] | OPTIONS["minimum length"]
    everything |= OPTIONS["repetition"] | OPTIONS["presence"] | OPTIONS["frequency"]
    rows = [full({}) | {"output": OUTPUT, **(everything if index % 2 else {})} for index in range(8)]
    changed = check(rows)
    assert not changed[::2].any()
    assert changed[1::2].any(axis=1).all()


def test_b22_repetition_is_over_prompt_and_output_and_the_others_over_output_alone() -> None:
    tokens = {*PROMPT}, {*PROMPT, *OUTPUT}, {*OUTPUT}
    rows: list[Row] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.3, "output": OUTPUT},
        {"presence_penalty": 1.5, "output": OUTPUT},
        {"frequency_penalty": 1.5, "output": OUTPUT},
    ]
    changed = check([{"prompt": PROMPT} | row for row in rows])
    found = [set(np.flatnonzero(row).tolist()) for row in changed]
    assert found == [tokens[0], set(), set(), tokens[1], tokens[2], tokens[2]]
    assert changed[5][7] == pytest.approx(3 * -1.5)
    assert changed[4][7] == pytest.approx(-1.5)


def test_penalties_count_all_of_a_row_however_long_and_nothing_behind_it() -> None:
    """Rows of every length up to the longest there can be; what stands behind them in the state is not theirs."""
    rng = np.random.default_rng(1)
    rows: list[Row] = []
    for length in range(1, MAX_MODEL_LEN + 1):
        known = rng.integers(VOCAB, size=length).tolist()
        num_prompt = int(rng.integers(1, length + 1))
        rows.append({"prompt": known[:num_prompt], "output": known[num_prompt:], "repetition_penalty": 2.0})
        rows.append(rows[-1] | {"frequency_penalty": 0.5, "presence_penalty": 0.25})
    check(rows)


def test_counts_over_several_tiles_equal_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = [
        {"prompt": PROMPT[:n], "output": OUTPUT * m, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
        for n, m in ((1, 1), (6, 6), (2, 3), (3, 0))
    ]
    logits, (_, state) = random_logits(len(rows)), device_states(rows, VOCAB)
    expected = processed(logits, rows)
    for tile in (1, 3, 7, MAX_MODEL_LEN):
        monkeypatch.setattr("jaxpage.ops.sampling.processing._TILE", tile)
        np.testing.assert_array_equal(jax.jit(lambda *args: process(*args))(logits, state), expected)


def test_b17_the_last_token_of_a_bad_word_is_forbidden_only_behind_the_others() -> None:
    words = {"bad_words": ((7, 11), (7, 8, 9), (12,))}
    rows: list[Row] = [
        words | {"output": output} for output in [(), (7,), (5, 7), (7, 8), (8,), (7, 5), (11, 7, 8), (8, 7)]
    ]
    forbidden = [set(np.flatnonzero(row < -1e20).tolist()) for row in check(rows)]
    assert forbidden == [{12}, {11, 12}, {11, 12}, {9, 12}, {12}, {12}, {9, 12}, {11, 12}]


def test_a_bad_word_begun_in_the_prompt_is_no_bad_word() -> None:
    changed = check(
        [{"bad_words": ((7, 11),), "prompt": (5, 7)}, {"bad_words": ((7, 8, 9),), "prompt": (7,), "output": (8,)}]
    )
    assert not changed.any()


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0])
def test_bad_words_that_forbid_the_last_tokens_left_are_drawn_and_no_others(temperature: float) -> None:
    either: Row = {"allowed_token_ids": (7, 11), "bad_words": ((5, 7), (5, 11)), "output": (5,)}
    one = either | {"bad_words": ((5, 7),)}
    rows = [options | {"temperature": temperature, "seed": seed} for options in (either, one) for seed in range(20)]
    drawn = np.asarray(run_sample(jnp.asarray(random_logits(len(rows))), *device_states(rows, VOCAB))).tolist()
    assert set(drawn[:20]) <= {7, 11}
    assert set(drawn[20:]) == {11}


def test_as_many_rules_as_fit_are_all_obeyed() -> None:
    """A vocabulary that does not fill its last word of bits, every second token allowed, 512 biases, 256 words."""
    vocab_size = 1000
    words = tuple((7, *range(i % 13), i) for i in range(256))
    row = full({"logit_bias": {2 * i: i / 100 for i in range(500)} | {2 * i + 1: -1.0 for i in range(12)}})
    row |= {"allowed_token_ids": tuple(range(0, vocab_size, 2)), "bad_words": words, "output": (7,)}
    logits = np.random.default_rng(0).normal(size=(2, vocab_size)).astype(np.float32)
    got = processed(logits, [row, {}])
    np.testing.assert_allclose(got[0], reference_process(logits[0], row), atol=1e-5)
    np.testing.assert_array_equal(got[1], logits[1])
    assert np.isneginf(got[0]).sum() == 500
    assert (got[0] == LAST_RESORT).sum() > 5
