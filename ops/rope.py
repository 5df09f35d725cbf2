"""Rotary position embeddings (Su et al., 2021) and every scaling of them that the Llama family uses.

A scaling's frequencies are a pure function of the request's length class and the position alone. Two kinds look at
the length of the sequence ("dynamic" and "longrope"); the length they see is `max(prompt length, position + 1)`, which
does not depend on how the prompt was chunked, so chunked prefill and preemption never change an answer.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclass(frozen=True)
class RopeConfig:
    """One kind of rotary embedding; only the fields of its own kind are read.

    Names and formulas follow transformers' `modeling_rope_utils`.
    """

    kind: str = "default"
    """default, linear, dynamic, yarn, longrope or llama3."""
    theta: float = 10000.0
    rotary_dim: int = 64
    """Leading components of a head that are rotated."""
    max_position: int = 2048
    """The model's max_position_embeddings; "dynamic" scales beyond it."""
    original_max_position: int = 2048
    factor: float = 1.0
    attention_scaling: float = 1.0
    """Multiplies cos and sin."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on the sequence's length and not on the position alone."""
        return self.kind in ("dynamic", "longrope")


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Frequencies for lengths within the original context, as [rotary_dim / 2] float32."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    base = np.float32(rope.theta) ** exponents
    match rope.kind:
        case "default" | "dynamic":
            return (1.0 / base).astype(np.float32)
        case "linear":
            return (1.0 / base / np.float32(rope.factor)).astype(np.float32)
        case "longrope":
            return (1.0 / (np.asarray(rope.short_factor, np.float32) * base)).astype(np.float32)
        case "yarn":
            return _yarn(rope, base)
        case "llama3":
            return _llama3(rope, base)
    raise AssertionError(f"unknown RoPE kind {rope.kind}")


def _yarn(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Peng et al., 2023: interpolate low frequencies, keep high ones, ramp between."""

    def dim_with_rotations(rotations: float) -> float:
        wavelengths = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return rope.rotary_dim * wavelengths / (2 * math.log(rope.theta))

    low, high = dim_with_rotations(rope.beta_fast), dim_with_rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * base) * (1 - keep) + 1.0 / base * keep).astype(np.float32)


def _llama3(rope: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Llama 3.1: divide long wavelengths by the factor, keep short ones, blend between."""
    freq = 1.0 / base
    wavelength = 2 * math.pi / freq
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * freq / rope.factor + smooth * freq
    scaled = np.where(wavelength > longest, freq / rope.factor, np.where(wavelength < shortest, freq, blended))
    return scaled.astype(np.float32)


def rope_cos_sin(positions: jax.Array, lengths: jax.Array, rope: RopeConfig) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of each token's rotation.

    positions: [tokens] int32; lengths: [tokens] int32, the length that each token's sequence counts as (only read by
    kinds that depend on it). Returns two [tokens, rotary_dim / 2] float32, attention scaling included.
    """
    frequencies: jax.Array = jnp.asarray(inverse_frequencies(rope))[None, :]
    if rope.kind == "longrope":
        base = rope.theta ** (jnp.arange(0, rope.rotary_dim, 2, dtype=jnp.float32) / rope.rotary_dim)
        long = 1.0 / (jnp.asarray(rope.long_factor, jnp.float32) * base)
        frequencies = jnp.where(lengths[:, None] > rope.original_max_position, long, frequencies)
    elif rope.kind == "dynamic":
        length = jnp.maximum(lengths, rope.max_position).astype(jnp.float32)
        growth = rope.factor * length / rope.max_position - (rope.factor - 1)
        theta = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
        exponents = jnp.arange(0, rope.rotary_dim, 2, dtype=jnp.float32) / rope.rotary_dim
        frequencies = 1.0 / theta[:, None] ** exponents
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos_sin = jnp.cos(angles) * rope.attention_scaling, jnp.sin(angles) * rope.attention_scaling
    # Fused with what uses them, they would be computed again in every layer, for every head.
    return jax.lax.optimization_barrier(cos_sin)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the first `2 * cos.shape[-1]` components of every head (halves paired, as in Hugging Face checkpoints).

    x: [tokens, heads, head_dim]; cos, sin: [tokens, rotary_dim / 2]. Returns x's shape and dtype.
    """
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second = x32[..., :half], x32[..., half : 2 * half]
    c, s = (lax.broadcast_in_dim(angle, first.shape, (0, 2)) for angle in (cos, sin))
    parts = [first * c - second * s, second * c + first * s]
    if x.shape[-1] > 2 * half:
        parts.append(x32[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
