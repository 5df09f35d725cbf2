"""Products with weights equal numpy's in both operand orders, with any number of output axes."""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import pytest

from jaxpage.ops import matmul
from jaxpage.ops.matmul import embed_rows, linear

IN = 48


def case(num_tokens: int, out: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [tokens, in], weight [*out, in], bias [*out]."""
    rng = np.random.default_rng(num_tokens)
    x, weight = rng.normal(size=(num_tokens, IN)), rng.normal(size=(*out, IN))
    return x.astype(np.float32), weight.astype(np.float32), rng.normal(size=out).astype(np.float32)


# 48 rows are the most that put the weight first.
@pytest.mark.parametrize("num_tokens", [1, 48, 49])
@pytest.mark.parametrize("out", [(40,), (2, 20), (2, 5, 8)], ids=str)
def test_product_equals_numpy_with_and_without_bias(num_tokens: int, out: tuple[int, ...]) -> None:
    x, weight, bias = case(num_tokens, out)
    expected = np.einsum("ti,oi->to", x.astype(np.float64), weight.reshape(-1, IN)).reshape(num_tokens, *out)
    without, with_bias = jax.jit(lambda *args: (linear(args[0], args[1]), linear(*args)))(x, weight, bias)
    assert without.shape == with_bias.shape == (num_tokens, *out)
    np.testing.assert_allclose(without, expected, atol=2e-5)
    np.testing.assert_allclose(with_bias, expected + bias, atol=2e-5)


def test_a_row_has_the_same_product_on_either_side_of_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = case(8, (2, 20))
    weight_first = np.asarray(linear(x, weight, bias))
    monkeypatch.setattr(matmul, "_MAX_WEIGHT_FIRST_ROWS", 0)
    np.testing.assert_allclose(weight_first, linear(x, weight, bias), atol=2e-5)


def test_result_has_the_type_of_the_input() -> None:
    x, weight, bias = (array.astype("bfloat16") for array in case(4, (2, 20)))
    got = linear(x, weight, bias)
    assert got.dtype == x.dtype
    expected = np.einsum("ti,poi->tpo", x.astype(np.float64), weight.astype(np.float64)) + bias.astype(np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.2)


@pytest.mark.parametrize("num_tokens", [4, 64])
def test_a_float32_result_of_bfloat16_is_not_rounded(num_tokens: int) -> None:
    x, weight = (array.astype("bfloat16") for array in case(num_tokens, (40,))[:2])
    got = linear(x, weight, out_dtype="float32")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x.astype(np.float64) @ weight.astype(np.float64).T, atol=2e-5)


@pytest.mark.parametrize("num_tokens", [4, 64])
def test_an_array_is_multiplied_and_looked_up_as_if_there_were_no_other_kind_of_weight(num_tokens: int) -> None:
    x, weight, _ = case(num_tokens, (40,))
    tokens = np.arange(num_tokens) % 40

    def linear_alone(x: jax.Array, weight: jax.Array) -> jax.Array:
        on_cpu, elsewhere = (partial(it, out_dtype=x.dtype) for it in (matmul._linear_cpu, matmul._linear))
        y: jax.Array = jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)
        return y

    def text(function: Callable[..., jax.Array], *args: np.ndarray) -> str:
        named = lambda *args: function(*args)  # noqa: E731 - the program's name is the function's
        return jax.jit(named).lower(*args).as_text()

    assert text(linear, x, weight) == text(linear_alone, x, weight)
    assert text(embed_rows, weight, tokens) == text(lambda weight, tokens: weight[tokens], weight, tokens)
