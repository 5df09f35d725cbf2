"""A user's own proposers: one guesses at random, the other reads the model."""

import jax
import jax.numpy as jnp

from jaxpage.ops.attention.paged import KVCache
from jaxpage.speculative.config import SpeculativeConfig
from jaxpage.speculative.proposer import Rows


class AtRandom:
    """As many guesses as there may be, below 64: `--speculative-config '{"method": "own_proposer:AtRandom", ...}'`."""

    key = ""
    reads_model = False
    extras = ()

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_drafts = config.num_speculative_tokens

    def propose(
        self, rows: Rows, params: None, kv_cache: KVCache | None, hidden: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        place = rows.num_tokens[:, None] + jnp.arange(self.max_drafts)
        mixed = (place.astype(jnp.uint32) * jnp.uint32(2654435761) + rows.seed[:, :1]) >> 7
        return (mixed % 64).astype(jnp.int32), jnp.full_like(rows.num_tokens, self.max_drafts)


class NearestEmbedding:
    """Drafts the token whose logits the last hidden state of the step favours: right where the row stood last in it."""

    key = ""
    reads_model = True
    extras = ("layer_0",)

    def __init__(self, config: SpeculativeConfig) -> None:
        self.max_drafts = config.num_speculative_tokens

    def propose(
        self, rows: Rows, params: dict[str, jax.Array], kv_cache: KVCache | None, hidden: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        assert hidden is not None
        assert kv_cache is not None
        scores = hidden["layer_0"][: len(rows.rows)] @ params["head"]
        guess = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        count = jnp.minimum(1 + rows.num_tokens % 2, self.max_drafts)
        return jnp.repeat(guess[:, None], self.max_drafts, axis=1), count
