"""The n-gram proposer, on the device: what followed the last tokens of a row where they stood before in it.

Saxena, "Prompt Lookup Decoding" (2023). Of the longest matches the latest one counts: texts repeat what is near. One
that overlaps the end is read on into its own drafts, as LZ77 does, so that a short period gives as many drafts as any.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.ops.attention.paged import KVCache
from jaxpage.speculative.config import SpeculativeConfig
from jaxpage.speculative.proposer import Rows

_TILE = 512
"""Positions that are looked at together."""


class NGram:
    """The proposer `ngram`."""

    reads_model = False
    extras: tuple[str, ...] = ()

    def __init__(self, config: SpeculativeConfig) -> None:
        self.key = str(config)
        self.max_drafts = config.num_speculative_tokens
        self._config = config

    def propose(
        self, rows: Rows, params: Any, kv_cache: KVCache | None, hidden: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        """See `proposer.Proposer`."""
        drafts, found = propose(rows.token_ids, rows.rows, rows.num_tokens, self._config, branch_free=rows.branch_free)
        return drafts, jnp.where(found, self.max_drafts, 0)


def propose(
    token_ids: jax.Array,
    rows: jax.Array,
    num_tokens: jax.Array,
    config: SpeculativeConfig,
    *,
    branch_free: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Drafts behind the first `num_tokens` of each row, as [rows, num_speculative_tokens] int32, and which have any.

    token_ids: [batch rows, max_model_len] int32; rows, num_tokens: [rows] int32, no tokens where nothing is wanted.
    Takes as long as the longest of these rows; or, at once, as the longest that there may be: at each turn of a loop of
    unknown length, the host of a GPU would wait for the device.
    """
    longest, max_model_len = config.prompt_lookup_max, token_ids.shape[1]
    tile, back = max_model_len if branch_free else min(_TILE, max_model_len), jnp.arange(longest)

    def tokens_at(positions: jax.Array) -> jax.Array:
        return token_ids[rows[:, None], jnp.clip(positions, 0, max_model_len - 1)]

    last = num_tokens[:, None] - 1
    wanted = tokens_at(last - back)  # [rows, longest], the last token first

    def look(index: jax.Array, best: jax.Array) -> jax.Array:
        ends = index * tile + jnp.arange(tile)  # where a match may end
        seen = tokens_at(jnp.arange(tile + longest - 1)[None] + (index * tile - (longest - 1)))
        length = jnp.zeros((rows.shape[0], tile), jnp.int32)
        goes_on = ends < last
        for i in range(longest):
            goes_on &= (seen[:, longest - 1 - i :][:, :tile] == wanted[:, i : i + 1]) & (ends >= i)
            length += goes_on
        found = jnp.where(length >= config.prompt_lookup_min, length * max_model_len + ends, -1)
        return jnp.maximum(best, jnp.max(found, axis=1))

    best = jnp.full(rows.shape[0], -1, jnp.int32)
    best = jax.lax.fori_loop(0, 1 if branch_free else -(-jnp.max(num_tokens) // tile), look, best)
    end = (best % max_model_len)[:, None]
    period = jnp.maximum(last - end, 1)
    drafts = tokens_at(end + 1 + jnp.arange(config.num_speculative_tokens) % period)
    return drafts, best >= 0
