"""Recurrent layers over a ragged step: each row's tokens in order, from the state behind the token before them.

What a row keeps lies in a ring: the state behind the token at position p is entry `p % ring`. A row that goes back by a
few tokens (rejected drafts, an undone draw) goes on from the entry of where it stands, and nothing has to be undone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Update = Callable[[jax.Array, Any], tuple[jax.Array, Any]]
"""One token of every row: (carry [rows, *shape], pytree of [rows, ...]) -> (carry, pytree of [rows, ...]).

What it gives a row depends on that row's carry and inputs alone.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentState:
    """A layer's recurrent state during a step, and what the layer must know of the step."""

    values: jax.Array  # [batch rows, ring, *shape], what each row keeps behind its newest tokens
    rows: jax.Array  # [rows] int32, rows of the batch
    query_start: jax.Array  # [rows + 1] int32, where each row's tokens begin
    query_lens: jax.Array  # [rows] int32, 0 in padding
    num_computed: jax.Array  # [rows] int32, tokens computed before the step
    max_query_len: int = field(metadata={"static": True})

    @property
    def ring(self) -> int:
        """States that each row keeps."""
        return self.values.shape[1]

    def at_start(self) -> jax.Array:
        """What each row begins the step with: zeros where nothing is computed. [rows, *shape]"""
        values = self.values[self.rows, (self.num_computed - 1) % self.ring]
        return jnp.where(_beside(self.num_computed > 0, values), values, 0)

    def kept(self, step: jax.Array | int, carry: jax.Array) -> "RecurrentState":
        """With the state behind token `step` of each row; dropped where it has none, or `ring` more follow on it."""
        stays = (step < self.query_lens) & (step + self.ring >= self.query_lens)
        rows = jnp.where(stays, self.rows, self.values.shape[0])
        values = self.values.at[rows, (self.num_computed + step) % self.ring].set(carry, mode="drop")
        return replace(self, values=values)


def recur(update: Update, inputs: Any, state: RecurrentState) -> tuple[Any, RecurrentState]:
    """Run `update` over the tokens of each row in order, over all rows at once.

    inputs: pytree of [tokens, ...]; row r's tokens are `query_start[r] : query_start[r] + query_lens[r]`, the first of
    them at position `num_computed[r]`. Returns outputs, a pytree of [tokens, ...] (0 for padding), and the state with
    what is behind the last `ring` tokens of each row. A carry is rounded to the state's dtype behind every token: the
    arithmetic of a token is the same however its row is cut into steps, and whoever shares them.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    first = state.query_start[:-1]

    def run(step: jax.Array | int, carry: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        """The tokens of index `step` in their rows: where they are [rows], the carry behind them and their outputs."""
        live = step < state.query_lens
        tokens = jnp.where(live, first + step, num_tokens)
        given = jax.tree.map(lambda leaf: jnp.take(leaf, tokens, axis=0, mode="clip"), inputs)
        # The barriers keep XLA from fusing a token's arithmetic with what differs between steps.
        after, outputs = lax.optimization_barrier(update(*lax.optimization_barrier((carry, given))))
        after = jnp.where(_beside(live, after), after.astype(carry.dtype), carry)
        return tokens, after, outputs

    carry = state.at_start()
    shapes = jax.eval_shape(lambda carry: run(0, carry)[2], carry)
    outputs = jax.tree.map(lambda shape: jnp.zeros((num_tokens, *shape.shape[1:]), shape.dtype), shapes)

    def advance(
        step: jax.Array | int, loop: tuple[jax.Array, Any, RecurrentState]
    ) -> tuple[jax.Array, Any, RecurrentState]:
        carry, outputs, state = loop
        tokens, carry, found = run(step, carry)
        outputs = jax.tree.map(lambda leaf, new: leaf.at[tokens].set(new, mode="drop"), outputs, found)
        return carry, outputs, state.kept(step, carry)

    if state.max_query_len == 1:
        _, outputs, state = advance(0, (carry, outputs, state))
    else:
        _, outputs, state = lax.fori_loop(0, jnp.max(state.query_lens), advance, (carry, outputs, state))
    return outputs, state


def _beside(mask: jax.Array, values: jax.Array) -> jax.Array:
    """A mask [rows] as it spreads over [rows, ...]."""
    return mask.reshape(mask.shape[0], *[1] * (values.ndim - 1))
