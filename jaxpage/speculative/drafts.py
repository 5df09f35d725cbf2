"""Drafts on the device: guesses at a row's next tokens, kept in `token_ids` behind the known ones.

A step computes the last known token and the drafts behind it at once, and draws at each of these positions as it would
without drafts: with the same noise, and with the drafts before it as known tokens. A draft that is what has been drawn
in its place is kept; at the first that is not, the draw takes its place. As the proposer is deterministic, this is
rejection sampling (Leviathan et al., 2023), and more than that: the tokens are the very same.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.ops.attention.paged import KVCache
from jaxpage.speculative.proposer import Proposer, Rows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftState:
    """What the batch knows of its rows' drafts."""

    num_drafts: jax.Array  # [rows] int32, those that lie behind the known tokens
    draft_end: jax.Array  # [rows] int32, no token from here on is computed; 0 for rows without speculation

    def admit(self, row: jax.Array, draft_end: jax.Array) -> "DraftState":
        """A request takes a row."""
        return DraftState(self.num_drafts.at[row].set(0), self.draft_end.at[row].set(draft_end))

    def live_query_lens(
        self, rows: jax.Array, query_lens: jax.Array, num_tokens: jax.Array, num_computed: jax.Array
    ) -> jax.Array:
        """How many tokens there are to compute of the `query_lens` that the host has made room for. All [rows] int32.

        The host does not know yet how many drafts there are and which of the last ones were kept; nor, therefore,
        whether a request has reached its end.
        """
        end, speculates = num_tokens + self.num_drafts[rows], self.draft_end[rows] > 0
        end = jnp.where(speculates, jnp.minimum(end, self.draft_end[rows]), end)
        return jnp.clip(end - num_computed, 0, query_lens)

    def propose(
        self,
        known: Rows,
        draws: jax.Array,
        proposer: Proposer,
        params: Any = None,
        kv_cache: KVCache | None = None,
        hidden: dict[str, jax.Array] | None = None,
    ) -> tuple["DraftState", jax.Array, jax.Array]:
        """New drafts behind the tokens of the rows that have drawn: the state, `token_ids` with them, and how many.

        draws: [rows] bool. What the proposer reads of the model comes last.
        """
        token_ids, rows, num_tokens = known.token_ids, known.rows, known.num_tokens
        num_rows, places = token_ids.shape[0], jnp.arange(proposer.max_drafts)
        wanted = draws & (self.draft_end[rows] > num_tokens)
        asked = dataclasses.replace(known, num_tokens=jnp.where(wanted, num_tokens, 0))
        drafts, found = proposer.propose(asked, params, kv_cache, hidden)
        room = jnp.minimum(self.draft_end[rows] - num_tokens, found)
        num_drafts = jnp.where(wanted, jnp.clip(room, 0, proposer.max_drafts), 0)
        target = jnp.where(places < num_drafts[:, None], rows[:, None], num_rows)
        token_ids = token_ids.at[target, num_tokens[:, None] + places].set(drafts, mode="drop")
        return self.set(rows, draws, num_drafts), token_ids, num_drafts

    def set(self, rows: jax.Array, draws: jax.Array, num_drafts: jax.Array) -> "DraftState":
        """Note how many drafts there are of the rows that have drawn. rows, num_drafts: [rows] int32."""
        target = jnp.where(draws, rows, self.num_drafts.shape[0])
        return dataclasses.replace(self, num_drafts=self.num_drafts.at[target].set(num_drafts, mode="drop"))


def empty_drafts(num_rows: int) -> DraftState:
    """Of a batch without requests."""
    return DraftState(jnp.zeros(num_rows, jnp.int32), jnp.zeros(num_rows, jnp.int32))


def count_accepted(drawn: jax.Array, drafts: jax.Array, num_drafts: jax.Array) -> jax.Array:
    """How many drafts of each row are kept: those before the first that differs from the draw in its place.

    drawn: [rows, 1 + k] int32; drafts: [rows, k] int32, of which `num_drafts` ([rows] int32) are there. [rows] int32.
    """
    same = (drawn[:, :-1] == drafts) & (jnp.arange(drafts.shape[1]) < num_drafts[:, None])
    return jnp.argmin(jnp.pad(same, ((0, 0), (0, 1))), axis=1).astype(jnp.int32)
