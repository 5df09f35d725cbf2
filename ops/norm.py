"""Normalization layers."""

import jax
import jax.numpy as jnp
from jax import lax


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich, 2019).

    x: [..., embed]; weight: [embed]. Returns x's shape and dtype.
    """
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1) + eps)
    scaled = x32 * lax.broadcast_in_dim(scale, x.shape, range(x.ndim - 1))
    return scaled.astype(x.dtype) * lax.broadcast_in_dim(weight, x.shape, (x.ndim - 1,))


def zero_centered_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm of Gemma: scaled by `1 + weight`, in float32 to the end.

    x: [..., embed]; weight: [embed]. Returns x's shape and dtype.
    """
    return rms_norm(x.astype(jnp.float32), 1 + weight.astype(jnp.float32), eps).astype(x.dtype)
