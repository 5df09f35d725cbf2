"""The one sampler: every option is an array with a value per row, so one compiled program serves every request.

Order: minimum-length mask, temperature, min-p, top-k, top-p, draw. Rows with temperature 0 take the argmax. A draw
adds Gumbel noise that depends on (seed, position) alone: the same request gives the same tokens whatever shares its
batch, in whatever row, and after preemption.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Options of each row that samples in this step."""

    temperature: jax.Array  # [rows] float32, 0 is greedy
    top_k: jax.Array  # [rows] int32, 0 is off
    top_p: jax.Array  # [rows] float32, 1 is off
    min_p: jax.Array  # [rows] float32, 0 is off
    seed: jax.Array  # [rows, 2] uint32, halves of the 64-bit seed
    position: jax.Array  # [rows] int32, of the token to be drawn
    min_position: jax.Array  # [rows] int32, stop tokens are masked before this position
    stop_token_ids: jax.Array  # [rows, stops] int32, vocab size or more where unused


def sample(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Draw one token per row.

    logits: [rows, vocab] float32, finite. Returns [rows] int32.
    """
    logits = _mask_stop_tokens(logits, state)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        scaled = logits / jnp.where(state.temperature > 0, state.temperature, 1)[:, None]
        filtered = jax.lax.cond(
            jnp.any((state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)),
            lambda: _filter(scaled, state),
            lambda: scaled,
        )
        return jnp.argmax(filtered + _gumbel(state, logits.shape[1]), axis=-1).astype(jnp.int32)

    drawn = jax.lax.cond(jnp.any(state.temperature > 0), draw, lambda: greedy)
    return jnp.where(state.temperature > 0, drawn, greedy)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token of each row; zeros where no row asks for them."""

    token: jax.Array  # [rows] float32, of the drawn token
    rank: jax.Array  # [rows] int32, how many tokens are more probable, plus one
    top_ids: jax.Array  # [rows, k] int32, the most probable tokens, in order
    top: jax.Array  # [rows, k] float32


def token_logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array, k: int) -> TokenLogprobs:
    """Log-probabilities of the distribution before any option changes it, if any row has `wanted` >= 0.

    logits: [rows, vocab] float32; tokens, wanted: [rows] int32; k: alternatives to report, at most the vocabulary are.
    """
    rows, k = logits.shape[0], min(k, logits.shape[1])

    def compute() -> TokenLogprobs:
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        token = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
        rank = 1 + jnp.sum(logprobs > token, axis=-1).astype(jnp.int32)
        top, top_ids = jax.lax.top_k(logprobs, k)
        return TokenLogprobs(token[:, 0], rank, top_ids.astype(jnp.int32), top)

    def nothing() -> TokenLogprobs:
        return TokenLogprobs(
            jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k))
        )

    return jax.lax.cond(jnp.any(wanted >= 0), compute, nothing)


def _mask_stop_tokens(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Stop tokens cannot be drawn before the row's minimum length."""

    def mask() -> jax.Array:
        early = state.position < state.min_position
        ids = jnp.where(early[:, None], state.stop_token_ids, logits.shape[1])
        return logits.at[jnp.arange(ids.shape[0])[:, None], ids].set(-jnp.inf, mode="drop")

    return jax.lax.cond(jnp.any(state.position < state.min_position), mask, lambda: logits)


def _gumbel(state: SamplingState, vocab_size: int) -> jax.Array:
    """Noise that is a function of (seed, position) alone, as [rows, vocab] float32."""

    def row_noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row_noise)(state.seed, state.position)


def _filter(logits: jax.Array, state: SamplingState) -> jax.Array:
    """Drop what min-p, then top-k, then top-p exclude. logits: [rows, vocab], already divided by the temperature.

    No sort: the threshold of top-k and of top-p is found by bisection over the ordered bit patterns of the float32
    values, exact after 32 rounds of counting. Ties with the last kept value are kept.
    """
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    probabilities = jnp.exp(shifted)  # relative to the most probable token, in [0, 1]
    probabilities = jnp.where(probabilities >= state.min_p[:, None], probabilities, 0)
    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)  # order-preserving: none is negative

    k = jnp.where(state.top_k > 0, state.top_k, logits.shape[1])
    kept_by_k = _largest_threshold(bits, lambda keep: jnp.sum(keep, axis=-1) >= k)
    probabilities = jnp.where(bits >= kept_by_k[:, None], probabilities, 0)

    bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)
    wanted = state.top_p * jnp.sum(probabilities, axis=-1)
    kept_by_p = _largest_threshold(bits, lambda keep: jnp.sum(jnp.where(keep, probabilities, 0), axis=-1) >= wanted)
    # The most probable token (relative probability 1) stays even where top_p underflows to 0 in float32.
    one = jax.lax.bitcast_convert_type(jnp.float32(1), jnp.int32)
    kept_by_p = jnp.where(state.top_p < 1, jnp.minimum(kept_by_p, one), 0)
    return jnp.where((bits >= kept_by_p[:, None]) & (probabilities > 0), logits, -jnp.inf)


def _largest_threshold(bits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest t for which `enough(bits >= t)` holds, per row; 0 where it never does.

    bits: [rows, vocab] int32, none negative. Builds t from its highest bit down.
    """

    def try_bit(i: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (1 << (30 - i))
        return jnp.where(enough(bits >= candidate[:, None]), candidate, threshold)

    return jax.lax.fori_loop(0, 31, try_bit, jnp.zeros(bits.shape[0], jnp.int32))
