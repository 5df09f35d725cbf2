"""RMS norm against its definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.norm import rms_norm, zero_centered_rms_norm


def reference(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * weight.astype(np.float64)


@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 16)], ids=str)
def test_norm_equals_float64_over_the_last_axis(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=shape) * 3 + 1).astype(np.float32)
    weight = rng.normal(size=shape[-1:]).astype(np.float32)
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), weight, 1e-5), reference(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


def test_eps_keeps_tiny_and_zero_rows_finite() -> None:
    x = np.zeros((2, 32), np.float32)
    x[1] = 1e-4
    got = rms_norm(jnp.asarray(x), np.ones(32, np.float32), 1e-6)
    np.testing.assert_array_equal(got[0], np.zeros(32))
    np.testing.assert_allclose(got[1], 1e-4 / np.sqrt(1e-8 + 1e-6), rtol=1e-5)


def test_half_precision_is_normed_in_float32_and_comes_back_in_its_type() -> None:
    # The squares, 90000, are beyond float16.
    x = np.full((1, 64), 300, np.float16)
    x[0, ::2] = -300
    got = rms_norm(jnp.asarray(x), np.ones(64, np.float16), 1e-6)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(got, np.float32), np.sign(x), rtol=1e-3)


def test_zero_centered_norm_multiplies_by_one_more_and_rounds_once() -> None:
    rng = np.random.default_rng(0)
    x, weight = jnp.asarray(rng.normal(size=(5, 64)), jnp.bfloat16), jnp.asarray(rng.normal(size=64), jnp.bfloat16)
    got = zero_centered_rms_norm(x, weight, 1e-6)
    exact = reference(np.asarray(x, np.float32), 1 + np.asarray(weight, np.float32), 1e-6)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float32))
