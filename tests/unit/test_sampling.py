"""The sampler against a sorted float64 reference, and what a draw may and may not depend on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sampler_reference import device_states, reference_logprobs, reference_support

from jaxpage.ops.sampling.sampling import (
    SamplingState,
    TokenLogprobs,
    exponential_noise,
    filter_probabilities,
    least_of_all,
    sample,
    sample_random,
    token_logprobs,
)
from jaxpage.sampling_params import SamplingParams

ROWS, VOCAB = 8, 97
NUM_DRAWS = 4096
run_sample, run_filter = jax.jit(sample), jax.jit(filter_probabilities)
run_noise = jax.jit(exponential_noise, static_argnums=2)
run_logprobs = jax.jit(token_logprobs, static_argnames="k")


def draw(logits: np.ndarray, rows: Sequence[dict[str, Any]]) -> list[int]:
    tokens: list[int] = np.asarray(run_sample(jnp.asarray(logits), *device_states(rows, logits.shape[1]))).tolist()
    return tokens


def random_logits(seed: int = 0, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * 3


@jax.jit
def filter_as_on_a_gpu(probabilities: jax.Array, state: SamplingState) -> jax.Array:
    probabilities = jnp.where(probabilities >= state.min_p[:, None], probabilities, 0)
    return jnp.where(probabilities >= least_of_all(probabilities, state, branch_free=True)[:, None], probabilities, 0)


def kept(logits: np.ndarray, rows: Sequence[dict[str, Any]]) -> np.ndarray:
    """What the filter leaves, here and on a GPU, as [rows, vocab] bool; what it leaves is unchanged."""
    probabilities = np.exp(logits - logits.max(axis=-1, keepdims=True))
    arguments = jnp.asarray(probabilities), device_states(rows, logits.shape[1])[0]
    got = np.asarray(run_filter(*arguments))
    is_kept = got > 0
    np.testing.assert_array_equal(got[is_kept], probabilities[is_kept])
    np.testing.assert_array_equal(got, np.asarray(filter_as_on_a_gpu(*arguments)))
    return is_kept


def test_temperature_zero_takes_the_argmax_of_every_row() -> None:
    logits = random_logits()
    assert draw(logits, [{"temperature": 0.0, "seed": i} for i in range(ROWS)]) == logits.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals() -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, [5, 40]] = 1
    assert draw(logits, [{"temperature": 0.0}] * ROWS) == [5] * ROWS


@pytest.mark.parametrize("temperature", [1e-8, 1e-6, 1e-5, 1e-4])
def test_b14_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits()
    effective = SamplingParams(temperature=temperature).effective_temperature
    for value in (temperature, effective):  # the sampler alone, and as requests reach it
        rows = [{"temperature": value, "seed": i, "top_p": 1 - 0.1 * (i % 2)} for i in range(ROWS)]
        assert draw(logits * 10, rows) == logits.argmax(-1).tolist()


def test_b14_greedy_tiny_and_random_rows_share_a_batch() -> None:
    logits = random_logits()
    best = logits.argmax(-1).tolist()
    rows = [
        {"temperature": 0.0},
        {"temperature": 0.01},
        {"top_p": 1e-4},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 2.0, "seed": 1},
        {"temperature": 2.0, "seed": 2},
    ]
    for seed in range(20):
        drawn = draw(logits * 2, [row | {"seed": seed + 10 * i} for i, row in enumerate(rows)])
        assert drawn[:6] == best[:6]
        assert all(0 <= token < VOCAB for token in drawn)


@pytest.mark.parametrize("num_rows", [1, ROWS])
def test_draws_depend_on_seed_and_position_alone(num_rows: int) -> None:
    """The same request in every row of batches of several sizes, beside neighbours of every kind."""
    logits = random_logits(1, rows=1)
    requests = [
        {"seed": 7, "position": 33},
        {"seed": -5, "position": 33, "top_k": 20},
        {"seed": 2**40 + 7, "position": 34, "top_p": 0.9},
        {"seed": 7, "position": 1000, "min_p": 0.01, "temperature": 1.7},
    ]
    neighbours = [
        {"temperature": 0.0},
        {"temperature": 0.01, "seed": 7},
        {"top_k": 3, "top_p": 0.5, "seed": 8},
        {"min_tokens": 90, "stop_token_ids": (1, 2, 3), "seed": 9},
        {"seed": 7, "position": 34},
    ]
    alone = [draw(logits, [request])[0] for request in requests]
    for request, expected in zip(requests, alone, strict=True):
        for row in range(num_rows):
            others = [neighbours[(row + i) % len(neighbours)] for i in range(num_rows)]
            batch = random_logits(row + 2, rows=num_rows)
            batch[row] = logits[0]
            others[row] = request
            assert draw(batch, others)[row] == expected


def test_what_is_decided_on_the_way_and_what_is_not_draw_the_same() -> None:
    """For rows of every kind that need no more, alone and beside each other."""
    kinds = [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 1.8, "top_k": 30}]
    run_random = jax.jit(sample_random, static_argnames=("place", "branch_free"))
    for seed in range(20):
        logits = jnp.asarray(random_logits(seed, rows=len(kinds)))
        for rows in (kinds, *([kind] * len(kinds) for kind in kinds)):
            seeded = [row | {"seed": seed + index} for index, row in enumerate(rows)]
            state, processing = device_states(seeded, VOCAB)
            expected = np.asarray(run_sample(logits, state, processing))
            np.testing.assert_array_equal(run_random(logits, state), expected)
            np.testing.assert_array_equal(run_random(logits, state, branch_free=True), expected)


def test_rows_without_top_k_and_top_p_draw_the_same_where_nothing_is_filtered() -> None:
    """A GPU has a program for steps in which no row filters; company that does must not change what a row draws."""
    rows = [{"temperature": 0.0}, {"temperature": 0.3, "seed": 1}, {"temperature": 1.5, "min_p": 0.2, "seed": 2}, {}]
    rows = [{"seed": index, **row} for index, row in enumerate(rows * (ROWS // len(rows)))]
    for step in range(16):
        logits = jnp.asarray(random_logits(step))
        state, _ = device_states(rows, VOCAB)
        unfiltered, filtered = (
            np.asarray(jax.jit(partial(sample_random, branch_free=True, filtered=filtered))(logits, state))
            for filtered in (False, True)
        )
        np.testing.assert_array_equal(unfiltered, filtered)


def test_other_seeds_and_positions_give_other_draws() -> None:
    flat = np.zeros((NUM_DRAWS, 8), np.float32)
    base = draw(flat, [{"seed": 3, "position": i} for i in range(NUM_DRAWS)])
    others = (
        [{"seed": 4, "position": i} for i in range(NUM_DRAWS)],
        [{"seed": 3 + 2**32, "position": i} for i in range(NUM_DRAWS)],  # the high half of the seed counts, too
        [{"seed": 3, "position": i + 1} for i in range(NUM_DRAWS)],
    )
    for rows in others:
        same = sum(a == b for a, b in zip(base, draw(flat, rows), strict=True))
        assert abs(same - NUM_DRAWS / 8) < 85  # four standard deviations of what chance gives


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}], ids=str)
@pytest.mark.parametrize("varies", ["seed", "position"])
def test_frequencies_of_draws_match_the_distribution(options: dict[str, Any], varies: str) -> None:
    row = np.array([2.0, 1.5, 1.0, 1.0, 0.5, 0.0, -0.5, -2.0], np.float32)
    rows = [options | {varies: 1000 + i} for i in range(NUM_DRAWS)]
    counts = np.bincount(draw(np.tile(row, (NUM_DRAWS, 1)), rows), minlength=len(row))

    scaled = row / options.get("temperature", 1.0)
    filters = {name: value for name, value in options.items() if name != "temperature"}
    allowed = np.flatnonzero(reference_support(scaled, filters))
    assert counts.sum() == counts[allowed].sum()
    expected = np.exp(scaled[allowed].astype(np.float64))
    expected *= NUM_DRAWS / expected.sum()
    chi_square = float(((counts[allowed] - expected) ** 2 / expected).sum())
    assert chi_square < 30  # 7 degrees of freedom at most: by chance once in 10,000 seeds


# The noise.

NUM_KEYS, NUM_NOISES = 64, 4096


def uniform_noise(seeds: Sequence[int], positions: Sequence[int], count: int) -> np.ndarray:
    """The noise as numbers that are uniform in (0, 1), [keys, count] float64."""
    halves = jnp.array([[seed >> 32, seed & (2**32 - 1)] for seed in seeds], jnp.uint32)
    noise = np.asarray(run_noise(halves, jnp.array(positions, jnp.int32), count))
    assert np.all((noise > 0) & (noise < 40))
    return np.exp(-noise.astype(np.float64))


KEYS = {
    "seeds": (range(NUM_KEYS), [100] * NUM_KEYS),
    "positions": ([5] * NUM_KEYS, range(NUM_KEYS)),
    "seed and position together": (range(NUM_KEYS), range(NUM_KEYS)),
    "high half of the seed": ([i << 32 for i in range(NUM_KEYS)], [0] * NUM_KEYS),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())
def test_noise_is_exponential_for_neighbouring_keys(keys: tuple[Sequence[int], Sequence[int]]) -> None:
    """Kolmogorov-Smirnov over all, and over the noise of each key and of each token by itself."""
    uniform = uniform_noise(*keys, NUM_NOISES)

    def distances(samples: np.ndarray) -> np.ndarray:
        """The largest distance from the uniform distribution of each row, times the root of its length."""
        count = samples.shape[1]
        ordered, steps = np.sort(samples, axis=1), np.arange(count + 1) / count
        largest = np.maximum(np.abs(ordered - steps[1:]), np.abs(ordered - steps[:-1])).max(axis=1)
        return np.asarray(largest * np.sqrt(count))

    assert distances(uniform.reshape(1, -1))[0] < 2.2  # by chance once in 8,000
    assert distances(uniform).max() < 2.7  # once in a million, for each of the keys
    assert distances(uniform.T).max() < 2.9


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS.keys())
def test_noise_of_neighbouring_keys_and_tokens_is_uncorrelated(keys: tuple[Sequence[int], Sequence[int]]) -> None:
    centred = uniform_noise(*keys, NUM_NOISES) - 0.5
    between_keys = np.corrcoef(centred)[~np.eye(NUM_KEYS, dtype=bool)]
    between_tokens = np.array([np.mean(centred[:, :-lag] * centred[:, lag:]) * 12 for lag in (1, 2, 3, 32, 1024)])
    assert np.abs(between_keys).max() < 5.5 / np.sqrt(NUM_NOISES)
    assert np.abs(between_tokens).max() < 5 / np.sqrt(NUM_KEYS * (NUM_NOISES - 1024))


def test_every_bit_of_seed_and_position_changes_all_of_the_noise() -> None:
    changes = [(1 << bit, 0) for bit in range(64)] + [(0, 1 << bit) for bit in range(31)]
    uniform = uniform_noise([seed for seed, _ in changes], [position for _, position in changes], NUM_NOISES)
    [base] = uniform_noise([0], [0], NUM_NOISES)
    below = (uniform < 0.5) ^ (base < 0.5)
    assert np.abs(below.mean(axis=1) - 0.5).max() < 5 / np.sqrt(4 * NUM_NOISES)


def test_tokens_of_a_large_vocabulary_win_as_often_as_they_are_probable() -> None:
    """Each of 262,144 equal tokens: winners fall into 16 ranges alike, few twice, and noise gets as small as it may."""
    vocab_size, num_draws = 262_144, 128
    halves = jnp.stack([jnp.zeros(num_draws, jnp.uint32), jnp.arange(num_draws, dtype=jnp.uint32)], axis=1)
    noise = np.asarray(run_noise(halves, jnp.full(num_draws, 9, jnp.int32), vocab_size))
    winners = noise.argmin(axis=1)
    counts = np.bincount(winners // (vocab_size // 16), minlength=16)
    assert float(((counts - num_draws / 16) ** 2 / (num_draws / 16)).sum()) < 45  # 15 degrees of freedom
    assert len(set(winners.tolist())) > num_draws - 4
    assert 20 < np.sum(noise < 2.0**-19.5) < 80  # 45 expected; with 24 bits, they would be multiples of 2**-24
    assert len(np.unique(noise[noise < 2.0**-16] % 2.0**-24)) > 100


ROW_FILTERS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 2, VOCAB - 1, VOCAB, VOCAB + 1, 9999999]) | st.integers(1, VOCAB),
        "top_p": st.sampled_from([1.0, 1e-9, 1e-4, 0.5, 0.999]) | st.floats(0.01, 0.99),
        "min_p": st.sampled_from([0.0, 1.0, 1e-6, 0.3]) | st.floats(0.0, 1.0),
    }
)


@settings(derandomize=True, deadline=None, max_examples=150, database=None)
@given(
    rows=st.lists(ROW_FILTERS, min_size=ROWS, max_size=ROWS),
    seed=st.integers(0, 2**16),
    steps=st.sampled_from([1, 4, 64]),
)
@example(rows=[{"top_k": 1, "top_p": 1.0, "min_p": 0.0}] * ROWS, seed=0, steps=1)
@example(rows=[{"top_k": 0, "top_p": 1.0, "min_p": 0.0}] * ROWS, seed=0, steps=64)
def test_filters_keep_what_a_sorted_reference_keeps(rows: list[dict[str, Any]], seed: int, steps: int) -> None:
    # On a grid: logits have many ties where `steps` is small, and never differ by less than float32 can tell.
    logits = (np.random.default_rng(seed).integers(-8 * steps, 8 * steps + 1, size=(ROWS, VOCAB)) / steps).astype(
        np.float32
    )
    for row, (got, options) in enumerate(zip(kept(logits, rows), rows, strict=True)):
        supports = (reference_support(logits[row], options, slack=slack) for slack in (-1e-5, 1e-5))
        least, most = (set(np.flatnonzero(support).tolist()) for support in supports)
        tokens = set(np.flatnonzero(got).tolist())
        assert least <= tokens <= most, f"{options}: {tokens - most} too many, {least - tokens} missing"
        assert int(logits[row].argmax()) in tokens


def test_b16_top_k_that_is_off_or_beyond_the_vocabulary_keeps_all() -> None:
    logits = random_logits(3)
    params = [SamplingParams(top_k=k) for k in (-1, 0, VOCAB, VOCAB + 1, 9999999, 2**31 - 1)]
    # As a request's value reaches the device: -1 is 0 there.
    rows = [{"top_k": max(p.top_k, 0), "seed": 3} for p in params] + [{"seed": 3}] * 2
    assert kept(logits, rows).all()
    same = np.tile(logits[0], (ROWS, 1))
    assert len(set(draw(same, rows))) == 1


def test_edges_keep_the_most_probable_token_and_its_equals() -> None:
    logits = random_logits(4)
    logits[:, [11, 50]] = 20
    rows = [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1, "top_p": 0.1, "min_p": 1.0}] * 2
    for got in kept(logits, rows):
        assert np.flatnonzero(got).tolist() == [11, 50]


def test_the_smallest_top_p_that_a_request_may_have_keeps_the_most_probable_token() -> None:
    logits = random_logits(4)
    rows = [{"top_p": SamplingParams(top_p=p).top_p} for p in (1e-30, 1e-38, 1e-40, 1e-45, 1e-46, 1e-100, 5e-324, 1e-9)]
    for got, row in zip(kept(logits, rows), logits, strict=True):
        assert np.flatnonzero(got).tolist() == [int(row.argmax())]


def test_stop_tokens_are_masked_before_the_minimum_length_only() -> None:
    logits = random_logits(5)
    logits[:, 20], logits[:, 30], logits[:, 40] = 60, 50, 40
    early = {"output": (7,), "min_tokens": 2}
    rows = [
        early | {"temperature": 0.0, "stop_token_ids": (20, 30)},
        early | {"temperature": 1.0, "stop_token_ids": (20, 30)},
        early | {"temperature": 1.0, "stop_token_ids": (20,), "top_k": 1},
        early | {"temperature": 0.0},
        {"output": (7, 8), "min_tokens": 2, "temperature": 0.0, "stop_token_ids": (20, 30)},
        {"output": (7, 8), "min_tokens": 2, "temperature": 1.0, "stop_token_ids": (20, 30)},
        {"output": (7, 8, 9), "min_tokens": 2, "temperature": 0.0, "stop_token_ids": (20,)},
        {"temperature": 0.0, "stop_token_ids": (20, 30)},
    ]
    assert draw(logits, rows) == [40, 40, 30, 20, 20, 20, 20, 20]


# Log-probabilities.


def logprobs_of(logits: np.ndarray, tokens: Sequence[int], wanted: Sequence[int], k: int) -> TokenLogprobs:
    got = run_logprobs(jnp.asarray(logits), jnp.asarray(tokens, jnp.int32), jnp.asarray(wanted, jnp.int32), k=k)
    return jax.tree.map(np.asarray, got)


@pytest.mark.parametrize("k", [1, 5, VOCAB, VOCAB + 1, 500])
@pytest.mark.parametrize("scale", [0.1, 1, 10, 1000])
def test_log_probabilities_equal_the_float64_reference(k: int, scale: float) -> None:
    """Also with a vocabulary smaller than `k`, of which all tokens are reported."""
    logits = random_logits(1) * np.float32(scale) / 3
    tokens = np.random.default_rng(2).integers(VOCAB, size=ROWS)
    expected = reference_logprobs(logits)
    got = logprobs_of(logits, tokens.tolist(), [0] * ROWS, k)
    tolerance = 1e-5 * max(1, scale)  # float32 holds a logit of 3000 to 1e-4
    of_tokens = expected[np.arange(ROWS), tokens]
    np.testing.assert_allclose(got.token, of_tokens, atol=tolerance)
    assert got.rank.tolist() == (1 + np.sum(expected > of_tokens[:, None], axis=-1)).tolist()
    assert got.top_ids.tolist() == np.argsort(-expected, axis=-1, kind="stable")[:, :k].tolist()
    assert got.top_ids.shape == got.top.shape == (ROWS, min(k, VOCAB))
    np.testing.assert_allclose(got.top, np.take_along_axis(expected, got.top_ids, axis=-1), atol=tolerance)


def test_the_most_probable_token_has_rank_one_and_equals_share_a_rank() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[:, 7], logits[:, [3, 50]] = 2, 1
    got = logprobs_of(logits, [7, 3, 50, 0], [0] * 4, 4)
    assert got.rank.tolist() == [1, 2, 2, 4]
    assert got.top_ids[0].tolist() == [7, 3, 50, 0]


@pytest.mark.parametrize("asking", [0, 3, ROWS - 1])
def test_one_row_that_asks_is_enough_and_none_gives_zeros(asking: int) -> None:
    logits = random_logits(3)
    wanted = [-1] * ROWS
    nothing = logprobs_of(logits, [5] * ROWS, wanted, 4)
    assert not any(field.any() for field in jax.tree.leaves(nothing))
    wanted[asking] = 0
    got = logprobs_of(logits, [5] * ROWS, wanted, 4)
    np.testing.assert_allclose(got.token[asking], reference_logprobs(logits)[asking, 5], atol=1e-5)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), nothing) == jax.tree.map(lambda a: (a.shape, a.dtype), got)
