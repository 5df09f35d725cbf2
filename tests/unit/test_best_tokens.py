"""The best few of a vocabulary, against `lax.top_k` over all of it."""

import jax
import numpy as np
import pytest

from jaxpage.ops.sampling.best_tokens import best_tokens


@pytest.mark.parametrize("vocab_size", [64, 4096, 151_936, 50_257 // 7, 48 * 33])
@pytest.mark.parametrize("k", [1, 20, 128])
@pytest.mark.parametrize("num_values", [2, 7, 1000, None], ids=lambda count: f"{count} different scores")
def test_they_are_those_of_top_k_in_its_order_also_among_equals(
    vocab_size: int, k: int, num_values: int | None
) -> None:
    rng = np.random.default_rng(vocab_size + k)
    scores = rng.normal(size=(5, vocab_size)).astype(np.float32)
    if num_values is not None:
        scores = rng.integers(num_values, size=scores.shape).astype(np.float32)
    scores[3, : vocab_size // 2] = -np.inf
    scores[4] = -np.inf
    k = min(k, vocab_size)
    for got, expected in zip(best_tokens(scores, k), jax.lax.top_k(scores, k), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype
