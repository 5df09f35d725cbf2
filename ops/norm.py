"""Normalization layers."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich, 2019).

    x: [..., embed]; weight: [embed]. Returns x's shape and dtype.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def zero_centered_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The norm of Gemma: scaled by `1 + weight`, in float32 to the end.

    x: [..., embed]; weight: [embed]. Returns x's shape and dtype.
    """
    return rms_norm(x.astype(jnp.float32), 1 + weight.astype(jnp.float32), eps).astype(x.dtype)
