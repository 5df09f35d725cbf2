"""Matrix products with weights, in the layout that checkpoints have: [out, in]."""

from functools import partial

import jax
from jax.typing import DTypeLike

from jaxpage.ops.quantized import QuantizedWeight

# Up to this many rows XLA's CPU matmul is fastest with the weight as its left operand (see `_linear_cpu`).
_MAX_WEIGHT_FIRST_ROWS = 48


def linear(
    x: jax.Array,
    weight: jax.Array | QuantizedWeight,
    bias: jax.Array | None = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """x @ weight.T (+ bias), with any number of output axes.

    x: [tokens, in]; weight: [..., in]; bias: [...]. Returns [tokens, ...] in `out_dtype`, by default x's.
    """
    out_dtype = out_dtype or x.dtype
    if isinstance(weight, QuantizedWeight):
        # A channel's scale is the same for all inputs, so it multiplies the sum.
        y = (_product(x, weight.values.astype(x.dtype), "float32") * weight.scale).astype(out_dtype)
    else:
        y = _product(x, weight, out_dtype)
    return y if bias is None else y + bias


def embed_rows(weight: jax.Array | QuantizedWeight, tokens: jax.Array) -> jax.Array:
    """Rows of an embedding table. weight: [vocab, embed]; tokens: [tokens] int32. Returns [tokens, embed]."""
    if isinstance(weight, QuantizedWeight):
        return (weight.values[tokens] * weight.scale[tokens][:, None]).astype(weight.dtype)
    return weight[tokens]


def _product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    on_cpu, elsewhere = (partial(product, out_dtype=out_dtype) for product in (_linear_cpu, _linear))
    y: jax.Array = jax.lax.platform_dependent(x, weight, cpu=on_cpu, default=elsewhere)
    return y


def _linear(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (weight.ndim - 1,)), ((), ())), preferred_element_type=out_dtype)


def _linear_cpu(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    """The same product, with few rows of x as (weight @ x.T).T.

    XLA's CPU backend repacks the right operand of every matmul; with few rows of x that must not be the weight.
    Measured at 576 x 3072 in float32 on 2 cores, 8 rows: 38 GFLOP/s against 8 for x @ w and 20 for x @ w.T. The
    barrier keeps XLA from folding the transpose back into the product.
    """
    # With more than two axes XLA would copy the weight, transposed, before the product.
    flat = weight.reshape(-1, weight.shape[-1])
    few = x.shape[0] <= _MAX_WEIGHT_FIRST_ROWS
    y = jax.lax.optimization_barrier(_linear(flat, x, out_dtype)).T if few else _linear(x, flat, out_dtype)
    return y.reshape(x.shape[0], *weight.shape[:-1])
