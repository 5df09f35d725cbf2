"""From the model's logits to the ones that tokens are drawn from: what a request says about tokens.

Order: allowed tokens, logit bias, minimum length; repetition, presence and frequency penalty; bad words. Every option
is an array with a value per row; how often a row holds a token is counted from its token ids where a penalty asks for
it, so that nothing of the vocabulary's size outlives the step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

ANY_TOKEN = -1
"""Stands before a forbidden sequence that is shorter than the longest may be."""
_UNUSED = 2**31 - 1
_TILE = 512
"""Positions whose tokens are counted at a time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenRules:
    """What requests say of single tokens, a row for each. Rows of other requests hold left-overs."""

    allowed: jax.Array  # [rows, vocab / 32, rounded up] uint32: a bit for every token that may be drawn, lowest first
    bias_ids: jax.Array  # [rows, biases] int32, vocab size or more where unused
    bias: jax.Array  # [rows, biases] float32
    bad_words: jax.Array  # [rows, words, length] int32, ends aligned, maximal where unused


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProcessingState:
    """Options of each row of a step. `token_ids` and `rules` are the whole batch's: `rows` says where a row's are."""

    rows: jax.Array  # [rows] int32
    num_prompt_tokens: jax.Array  # [rows] int32
    num_tokens: jax.Array  # [rows] int32, known ones: the position of the token to be drawn
    min_tokens: jax.Array  # [rows] int32, stop tokens are masked before this many are generated
    stop_token_ids: jax.Array  # [rows, stops] int32, vocab size or more where unused
    repetition_penalty: jax.Array  # [rows] float32, 1 is off
    presence_penalty: jax.Array  # [rows] float32, 0 is off
    frequency_penalty: jax.Array  # [rows] float32, 0 is off
    has_rules: jax.Array  # [rows] bool
    token_ids: jax.Array  # [batch rows, max_model_len] int32
    rules: TokenRules

    @property
    def holds_back_stops(self) -> jax.Array:
        """Rows that may not end yet, as [rows] bool."""
        return self.num_tokens < self.num_prompt_tokens + self.min_tokens

    @property
    def is_penalized(self) -> jax.Array:
        """Rows with a penalty, as [rows] bool."""
        return (self.repetition_penalty != 1) | (self.presence_penalty != 0) | (self.frequency_penalty != 0)

    @property
    def is_needed(self) -> jax.Array:
        """Whether any row has an option that changes its logits, as one bool."""
        return jnp.any(self.has_rules | self.holds_back_stops | self.is_penalized)


def process(logits: jax.Array, state: ProcessingState) -> jax.Array:
    """Apply the options of each row. logits: [rows, vocab] float32, finite; -inf in the result is never drawn.

    A token is left in every row of which allowed tokens and minimum length leave one: bad words that would take the
    last one are not obeyed.
    """
    vocab_size, row = logits.shape[1], jnp.arange(logits.shape[0])[:, None]
    rules = jax.tree.map(lambda array: array[state.rows], state.rules)
    logits = jnp.where(_unpack_bits(rules.allowed, vocab_size) | ~state.has_rules[:, None], logits, -jnp.inf)
    bias_ids = jnp.where(state.has_rules[:, None], rules.bias_ids, vocab_size)
    logits = logits.at[row, bias_ids].add(rules.bias, mode="drop")
    stop_ids = jnp.where(state.holds_back_stops[:, None], state.stop_token_ids, vocab_size)
    logits = logits.at[row, stop_ids].set(-jnp.inf, mode="drop")
    logits = _penalize(logits, state)

    completing = jnp.where(state.has_rules[:, None], _completing_tokens(rules.bad_words, state), vocab_size)
    without = logits.at[row, completing].set(-jnp.inf, mode="drop")
    return jnp.where(jnp.any(without > -jnp.inf, axis=-1, keepdims=True), without, logits)


def _unpack_bits(words: jax.Array, count: int) -> jax.Array:
    """[rows, words] uint32 -> the lowest `count` bits of each row as [rows, count] bool."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :count].astype(bool)


def _penalize(logits: jax.Array, state: ProcessingState) -> jax.Array:
    in_prompt, counts = _count_tokens(state, logits.shape[1])
    repetition = state.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt | (counts > 0), penalized, logits)
    logits -= state.frequency_penalty[:, None] * counts
    return logits - state.presence_penalty[:, None] * (counts > 0)


def _count_tokens(state: ProcessingState, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """Which tokens the prompt of a penalized row holds, and how often each was generated: [rows, vocab] bool, int32.

    Takes as long as the longest of these rows.
    """
    lengths = jnp.where(state.is_penalized, state.num_tokens, 0)
    num_rows, max_model_len = state.rows.shape[0], state.token_ids.shape[1]
    row, tile = jnp.arange(num_rows)[:, None], min(_TILE, max_model_len)

    def count_tile(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        in_prompt, counts = found
        positions = index * tile + jnp.arange(tile)
        ids = state.token_ids[state.rows[:, None], jnp.minimum(positions, max_model_len - 1)]
        ids = jnp.where(positions < lengths[:, None], ids, vocab_size)
        is_prompt = positions < state.num_prompt_tokens[:, None]
        in_prompt = in_prompt.at[row, jnp.where(is_prompt, ids, vocab_size)].set(True, mode="drop")
        return in_prompt, counts.at[row, jnp.where(is_prompt, vocab_size, ids)].add(1, mode="drop")

    none = jnp.zeros((num_rows, vocab_size), bool), jnp.zeros((num_rows, vocab_size), jnp.int32)
    return jax.lax.fori_loop(0, -(-jnp.max(lengths) // tile), count_tile, none)


def _completing_tokens(bad_words: jax.Array, state: ProcessingState) -> jax.Array:
    """Tokens that would complete a bad word that the generated text ends with the rest of.

    bad_words: [rows, words, length] int32. Returns [rows, words] int32, maximal where a word is not begun.
    """
    *_, length = bad_words.shape
    positions = state.num_tokens[:, None] - jnp.arange(length - 1, 0, -1)
    is_generated = positions >= state.num_prompt_tokens[:, None]
    last = jnp.where(is_generated, state.token_ids[state.rows[:, None], jnp.maximum(positions, 0)], _UNUSED)
    beginnings = bad_words[:, :, :-1]
    is_begun = jnp.all((beginnings == ANY_TOKEN) | (beginnings == last[:, None]), axis=-1)
    return jnp.where(is_begun, bad_words[:, :, -1], _UNUSED)
