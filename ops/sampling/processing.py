"""From the model's logits to the ones that tokens are drawn from: what a request says about tokens.

Order: allowed tokens, logit bias; repetition, presence and frequency penalty; minimum length, bad words; the user's own
functions. Every option is an array with a value per row; how often a row holds a token is counted from its token ids
where a penalty asks for it, so that nothing of the vocabulary's size outlives the step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from jaxpage.ops.sampling.on_demand import on_demand
from jaxpage.ops.sampling.token_rules import ANY_TOKEN, UNUSED, RulesLayout

LAST_RESORT = -1e30
"""Logit of a token that is drawn only where all others are -inf."""
_TILE = 512
"""Positions whose tokens are counted at a time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KnownTokens:
    """What a row's next token follows."""

    token_ids: jax.Array  # [rows, max_model_len] int32, prompt and output; left-overs behind them
    num_prompt_tokens: jax.Array  # [rows] int32
    num_tokens: jax.Array  # [rows] int32


LogitsProcessor = Callable[[jax.Array, KnownTokens], jax.Array]
"""A user's own function of logits, [rows, vocab] float32, that gives others of the same shape. It is compiled, and may
look at all rows; rows of requests that do not name it are as they were."""


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
    rules: jax.Array  # [batch rows, layout.size] int32; rows of requests without any hold left-overs
    own: jax.Array  # [rows] int32, bit i is set where `processors[i]` is asked for
    layout: RulesLayout = field(metadata={"static": True})
    processors: tuple[LogitsProcessor, ...] = field(metadata={"static": True})

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
        return jnp.any(self.has_rules | self.holds_back_stops | self.is_penalized | (self.own != 0))


def process(logits: jax.Array, state: ProcessingState, *, branch_free: bool = False) -> jax.Array:
    """Apply the options of each row. logits: [rows, vocab] float32, finite; -inf in the result is never drawn.

    A row always has something to draw: stop tokens before the minimum length and bad words are `LAST_RESORT`.
    branch_free: see `on_demand`.
    """
    vocab_size, row = logits.shape[1], jnp.arange(logits.shape[0])[:, None]
    rules, has_rules = state.layout.unpack(state.rules[state.rows]), state.has_rules[:, None]
    logits = jnp.where(rules.allowed | ~has_rules, logits, -jnp.inf)
    logits = logits.at[row, jnp.where(has_rules, rules.bias_ids, vocab_size)].add(rules.bias, mode="drop")
    logits = _penalize(logits, state, branch_free=branch_free)

    stops = jnp.where(state.holds_back_stops[:, None], state.stop_token_ids, vocab_size)
    bad = jnp.where(has_rules, _completing_tokens(rules.bad_words, state), vocab_size)
    logits = logits.at[row, jnp.concatenate([stops, bad], axis=1)].min(LAST_RESORT, mode="drop")
    return _apply_own(logits, state, branch_free=branch_free) if state.processors else logits


def _apply_own(logits: jax.Array, state: ProcessingState, *, branch_free: bool) -> jax.Array:
    """What they make infinite, or no number, is never drawn while there is anything else."""
    known = KnownTokens(state.token_ids[state.rows], state.num_prompt_tokens, state.num_tokens)
    for index, processor in enumerate(state.processors):
        is_asked = (state.own >> index & 1).astype(bool)[:, None]

        def apply(
            logits: jax.Array, processor: LogitsProcessor = processor, is_asked: jax.Array = is_asked
        ) -> jax.Array:
            changed = processor(logits, known)
            changed = jnp.where(jnp.isnan(changed), LAST_RESORT, jnp.clip(changed, LAST_RESORT, -LAST_RESORT))
            return jnp.where(is_asked, changed.astype(logits.dtype), logits)

        logits = on_demand(jnp.any(is_asked), partial(apply, logits), partial(_same, logits), branch_free=branch_free)
    return logits


def _same(logits: jax.Array) -> jax.Array:
    return logits


def _penalize(logits: jax.Array, state: ProcessingState, *, branch_free: bool) -> jax.Array:
    in_prompt, in_output = _count_tokens(state, logits.shape[1], branch_free=branch_free)
    repetition = state.repetition_penalty[:, None]
    penalized = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_prompt + in_output > 0, penalized, logits)
    logits -= state.frequency_penalty[:, None] * in_output
    return logits - state.presence_penalty[:, None] * (in_output > 0)


def _count_tokens(state: ProcessingState, vocab_size: int, *, branch_free: bool) -> jax.Array:
    """How often prompt and output of each penalized row hold each token, as [2, rows, vocab] int32.

    Takes as long as the longest of these rows; or, at once, as the longest that there may be.
    """
    lengths = jnp.where(state.is_penalized, state.num_tokens, 0)
    num_rows, max_model_len = state.rows.shape[0], state.token_ids.shape[1]
    row, tile = jnp.arange(num_rows)[:, None], max_model_len if branch_free else min(_TILE, max_model_len)

    def count_tile(index: jax.Array, counts: jax.Array) -> jax.Array:
        positions = index * tile + jnp.arange(tile)
        ids = state.token_ids[state.rows[:, None], jnp.minimum(positions, max_model_len - 1)]
        part = (positions >= state.num_prompt_tokens[:, None]).astype(jnp.int32)
        return counts.at[part, row, jnp.where(positions < lengths[:, None], ids, UNUSED)].add(1, mode="drop")

    none = jnp.zeros((2, num_rows, vocab_size), jnp.int32)
    return jax.lax.fori_loop(0, 1 if branch_free else -(-jnp.max(lengths) // tile), count_tile, none)


def _completing_tokens(bad_words: jax.Array, state: ProcessingState) -> jax.Array:
    """Tokens that would complete a bad word that the generated text ends with the rest of.

    bad_words: [rows, words, length] int32. Returns [rows, words] int32, UNUSED where a word is not begun.
    """
    *_, length = bad_words.shape
    positions = state.num_tokens[:, None] - jnp.arange(length - 1, 0, -1)
    is_generated = positions >= state.num_prompt_tokens[:, None]
    last = jnp.where(is_generated, state.token_ids[state.rows[:, None], jnp.maximum(positions, 0)], UNUSED)
    beginnings = bad_words[:, :, :-1]
    is_begun = jnp.all((beginnings == ANY_TOKEN) | (beginnings == last[:, None]), axis=-1)
    return jnp.where(is_begun, bad_words[:, :, -1], UNUSED)
