"""The one sampler: every option is an array with a value per row, so one compiled program serves every request.

Order: what `processing` makes of the logits, temperature, min-p, top-k, top-p, draw. Rows with temperature 0 take the
argmax. A draw is a race: token i arrives after E_i / p_i, where E_i is exponential noise that depends on (seed,
position, i) alone, and the first one wins, which is i with probability p_i (the Gumbel trick without its logarithms).
The same request gives the same tokens whatever shares its batch, in whatever row, and after preemption.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpage.ops.running_sum import running_sum
from jaxpage.ops.sampling.best_tokens import best_tokens
from jaxpage.ops.sampling.on_demand import on_demand
from jaxpage.ops.sampling.processing import LAST_RESORT, ProcessingState, process


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


_BITS_AT_ONCE = 3
"""Bits of a threshold, of 30, that are found by one look at all of a row, where they are not found one by one."""
_NUM_BEST = 128
"""Tokens of a row that are looked at first; most requests keep fewer."""
Place = Callable[[jax.Array], jax.Array]
"""Says on which devices a [rows, vocab] array lies: XLA gathers the result of a branch unless it is told."""


def _anywhere(array: jax.Array) -> jax.Array:
    return array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenMask:
    """Which tokens a row may draw, before all its other options."""

    is_on: jax.Array  # [rows] bool, whether the row has one
    words: jax.Array  # [rows, ceil(vocab / 32)] int32, bit i of word j is set for token 32 * j + i

    def apply(self, logits: jax.Array) -> jax.Array:
        """-inf for what may not be drawn. Where `logits` leave nothing of what may, they give way."""
        allowed = ((self.words[:, :, None] >> jnp.arange(32)) & 1).astype(bool).reshape(len(self.words), -1)
        allowed = allowed[:, : logits.shape[1]]
        return jnp.where(~self.is_on[:, None], logits, jnp.where(allowed, jnp.maximum(logits, LAST_RESORT), -jnp.inf))


def sample(
    logits: jax.Array,
    state: SamplingState,
    processing: ProcessingState,
    mask: TokenMask | None = None,
    place: Place = _anywhere,
    *,
    branch_free: bool = False,
) -> jax.Array:
    """Draw one token per row by whatever it asks for.

    logits: [rows, vocab] float32, finite. branch_free: see `on_demand`. Returns [rows] int32.
    """

    def processed() -> jax.Array:
        return place(process(logits, processing, branch_free=branch_free))

    chosen = place(on_demand(processing.is_needed, processed, lambda: logits, branch_free=branch_free))
    if mask is not None:
        is_on, masked, unmasked = jnp.any(mask.is_on), lambda: place(mask.apply(chosen)), lambda: chosen
        chosen = place(on_demand(is_on, masked, unmasked, branch_free=branch_free))
    return sample_random(chosen, state, place, branch_free=branch_free)


def sample_random(
    logits: jax.Array,
    state: SamplingState,
    place: Place = _anywhere,
    *,
    branch_free: bool = False,
    filtered: bool = True,
) -> jax.Array:
    """`sample` for rows that ask for nothing but temperature and min-p and, if `filtered`, top-k and top-p."""

    def some_random() -> jax.Array:
        drawn = draw(logits, state, place, branch_free=branch_free, filtered=filtered)
        return jnp.where(state.temperature > 0, drawn, sample_greedy(logits))

    return on_demand(
        jnp.any(state.temperature > 0), some_random, lambda: sample_greedy(logits), branch_free=branch_free
    )


def sample_greedy(logits: jax.Array) -> jax.Array:
    """The most probable token per row. logits: [rows, vocab]; returns [rows] int32."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def draw(
    logits: jax.Array,
    state: SamplingState,
    place: Place = _anywhere,
    *,
    branch_free: bool = False,
    filtered: bool = True,
) -> jax.Array:
    """A token per row at its temperature, where that is not 0; see `sample_random`.

    logits: [rows, vocab], -inf for what is masked. What a row draws is the same, filtered or not, if it has no filter.
    """
    temperature = jnp.where(state.temperature > 0, state.temperature, 1)[:, None]
    # The largest logit goes first: the best token has probability 1 exactly, however small the temperature.
    probabilities = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature)
    if filtered:
        probabilities = on_demand(
            jnp.any((state.top_k > 0) | (state.top_p < 1) | (state.min_p > 0)),
            lambda: filter_probabilities(probabilities, state, branch_free=branch_free),
            lambda: probabilities,
            branch_free=branch_free,
        )
    else:
        probabilities = drop_improbable(probabilities, state)
    probabilities = place(probabilities)
    noise = exponential_noise(state.seed, state.position, logits.shape[1])
    # The barrier keeps XLA from computing the noise inside of the argmax, where it is not vectorized on a CPU.
    return jnp.argmax(jax.lax.optimization_barrier(probabilities / noise), axis=-1).astype(jnp.int32)


def exponential_noise(seed: jax.Array, position: jax.Array, count: int) -> jax.Array:
    """Exponential noise (rate 1) that is a function of (seed, position, index) alone, as [rows, count] float32.

    seed: [rows, 2] uint32, position: [rows] int32. All are mixed by the 32-bit hash with the least
    known bias (github.com/skeeto/hash-prospector): a tenth of the work that Threefry is over a whole vocabulary.
    """

    def mix(bits: jax.Array) -> jax.Array:
        bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
        bits = (bits ^ (bits >> 15)) * jnp.uint32(0xD35A2D97)
        return bits ^ (bits >> 15)

    def key(position: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return mix(second ^ mix(first ^ mix(position)))

    position, high, low = position.astype(jnp.uint32)[:, None], seed[:, :1], seed[:, 1:]
    keys = key(position + jnp.uint32(0x9E3779B9), high, low), key(position + jnp.uint32(0x85EBCA6B), low, high)
    bits = mix(mix(jax.lax.iota(jnp.uint32, count) ^ keys[0]) ^ keys[1])
    # In (0, 1), and finest near 0: noise may be as small as the probability of a rare token that it lets win.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log1p(-uniform)


def filter_probabilities(probabilities: jax.Array, state: SamplingState, *, branch_free: bool = False) -> jax.Array:
    """Set what min-p, then top-k, then top-p exclude to 0. Ties with the last one that is kept are kept.

    probabilities: [rows, vocab] float32, relative to the most probable token, which has 1.
    """
    probabilities = drop_improbable(probabilities, state)
    # A CPU finds the best tokens of a row in less time than it takes to count the row a few times; a GPU would sort.
    of_all = partial(least_of_all, branch_free=branch_free)
    least = jax.lax.platform_dependent(probabilities, state, cpu=_least_of_the_best, default=of_all)
    return jnp.where(probabilities >= least[:, None], probabilities, 0)


def drop_improbable(probabilities: jax.Array, state: SamplingState) -> jax.Array:
    """Set what min-p excludes to 0. probabilities: as in `filter_probabilities`."""
    return jnp.where(probabilities >= state.min_p[:, None], probabilities, 0)


def _least_of_the_best(probabilities: jax.Array, state: SamplingState) -> jax.Array:
    """`least_of_all`, where it can be told from the best tokens of each row alone. [rows] float32."""
    vocab_size = probabilities.shape[1]
    best, _ = best_tokens(probabilities, min(_NUM_BEST, vocab_size))
    k = jnp.where(state.top_k > 0, state.top_k, vocab_size)
    of_k = jnp.take_along_axis(best, jnp.minimum(k, best.shape[1])[:, None] - 1, axis=1)[:, 0]
    of_k = jnp.where(k < vocab_size, of_k, 0)
    kept = jnp.where(best >= of_k[:, None], best, 0)
    wanted = state.top_p * jnp.sum(jnp.where(probabilities >= of_k[:, None], probabilities, 0), axis=1)
    reaches = running_sum(kept) >= wanted[:, None]
    of_p = jnp.take_along_axis(best, jnp.argmax(reaches, axis=1)[:, None], axis=1)[:, 0]
    least = jnp.where(state.top_p < 1, jnp.maximum(of_p, of_k), of_k)
    # What a row gets must not depend on what others need.
    is_told = ((k >= vocab_size) | (k <= best.shape[1])) & ((state.top_p >= 1) | reaches[:, -1])
    return jax.lax.cond(
        jnp.all(is_told), lambda: least, lambda: jnp.where(is_told, least, least_of_all(probabilities, state))
    )


def least_of_all(probabilities: jax.Array, state: SamplingState, *, branch_free: bool = False) -> jax.Array:
    """What a token's probability must be so that top-k, then top-p keep it, as [rows] float32; 0 where both are off."""
    num_rows, vocab_size = probabilities.shape

    def find_k() -> jax.Array:
        k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, vocab_size), vocab_size).astype(jnp.float32)
        found = _largest_threshold(probabilities, jnp.ones_like(probabilities), k, branch_free=branch_free)
        return jnp.where(state.top_k > 0, found, 0)

    of_k = on_demand(jnp.any(state.top_k > 0), find_k, lambda: jnp.zeros(num_rows), branch_free=branch_free)
    kept = jnp.where(probabilities >= of_k[:, None], probabilities, 0)

    def find_p() -> jax.Array:
        wanted = state.top_p * jnp.sum(kept, axis=-1)
        return jnp.where(state.top_p < 1, _largest_threshold(kept, kept, wanted, branch_free=branch_free), 0)

    of_p = on_demand(jnp.any(state.top_p < 1), find_p, lambda: jnp.zeros(num_rows), branch_free=branch_free)
    return jnp.maximum(of_k, of_p)


def _largest_threshold(
    probabilities: jax.Array, weights: jax.Array, wanted: jax.Array, *, branch_free: bool
) -> jax.Array:
    """The largest t in [0, 1] for which the weights of all probabilities >= t sum to `wanted`, per row; else 0.

    probabilities: [rows, vocab] float32 in [0, 1]; weights: [rows, vocab] float32, not negative; wanted: [rows]. No
    sort: t is built from its highest bits down, as floats that are not negative stand in the order of their bit
    patterns. Exact after 30 bits.
    """

    def find_bits(shift: jax.Array | int, threshold: jax.Array) -> jax.Array:
        candidates = [threshold | (bits << shift) for bits in range(1, 1 << num_bits)]
        least = [jax.lax.bitcast_convert_type(candidate, jnp.float32)[:, None] for candidate in candidates]
        sums = _sums_of_rows([jnp.where(probabilities >= each, weights, 0) for each in least])
        reached = jnp.sum(sums >= wanted[:, None], axis=1)  # the smaller a candidate, the more it keeps
        return threshold | (reached << shift)

    # A GPU compares a number several times while it reads the next, and is told of all that is no loop in one graph.
    num_bits, found = _BITS_AT_ONCE if branch_free else 1, jnp.zeros(probabilities.shape[0], jnp.int32)
    if branch_free:
        for shift in range(30 - num_bits, -1, -num_bits):
            found = find_bits(shift, found)
    else:
        found = jax.lax.fori_loop(0, 30, lambda i, threshold: find_bits(29 - i, threshold), found)
    # Beyond 1 where nothing is wanted, as of a top-p that is 0 in float32.
    return jnp.minimum(jax.lax.bitcast_convert_type(found, jnp.float32), 1)


def _sums_of_rows(arrays: list[jax.Array]) -> jax.Array:
    """Of several [rows, vocab] float32, as [rows, arrays]; all are added up in one go."""

    def add(sums: list[jax.Array], more: list[jax.Array]) -> list[jax.Array]:
        return [one + other for one, other in zip(sums, more, strict=True)]

    return jnp.stack(jax.lax.reduce(arrays, [jnp.float32(0)] * len(arrays), add, [1]), axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token of each row; anything for rows that do not ask for them."""

    token: jax.Array  # [rows] float32, of the drawn token
    rank: jax.Array  # [rows] int32, how many tokens are more probable, plus one
    top_ids: jax.Array  # [rows, k] int32, the most probable tokens, in order
    top: jax.Array  # [rows, k] float32


def logprobs_at(logits: jax.Array, tokens: jax.Array, k: int) -> TokenLogprobs:
    """Log-probabilities of the distribution before any option changes it.

    logits: [rows, vocab] float32; tokens: [rows] int32; k: alternatives to report, at most the vocabulary are.
    """
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    token = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > token, axis=-1).astype(jnp.int32)
    top, top_ids = best_tokens(logits, min(k, logits.shape[1]))
    return TokenLogprobs((token - total)[:, 0], rank, top_ids, top - total)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, wanted: jax.Array, k: int, *, branch_free: bool = False
) -> TokenLogprobs:
    """`logprobs_at`, if any row has `wanted` >= 0. wanted: [rows] int32; branch_free: see `on_demand`."""
    rows, k = logits.shape[0], min(k, logits.shape[1])

    def nothing() -> TokenLogprobs:
        return TokenLogprobs(
            jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros((rows, k), jnp.int32), jnp.zeros((rows, k))
        )

    found: TokenLogprobs = on_demand(
        jnp.any(wanted >= 0), lambda: logprobs_at(logits, tokens, k), nothing, branch_free=branch_free
    )
    return found
