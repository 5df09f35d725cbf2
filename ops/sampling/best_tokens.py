"""The best few of a whole vocabulary."""

import jax
import jax.numpy as jnp
from jax import lax

_GROUP = 64
_DEVICES = 8
"""As many may divide a vocabulary among them; each has whole groups, or they would have to exchange logits."""


def best_tokens(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, in a fraction of its time over a vocabulary: the k largest of each row, and where they stand.

    scores: [rows, vocab]. Returns [rows, k] of its dtype and [rows, k] int32; of equal scores the first come first.

    The k best lie in the k groups of tokens with the largest maxima. Taken in their order, these hold what `top_k`
    would prefer among equals, too: a group that is left out stands behind at least as many equals as are wanted.
    """
    rows, vocab_size = scores.shape
    group = next((size for size in (_GROUP, 32, 16) if vocab_size % (size * _DEVICES) == 0), 1)
    if group == 1 or vocab_size // group < 2 * k:
        return lax.top_k(scores, k)
    groups = scores.reshape(rows, -1, group)
    _, chosen = lax.top_k(jnp.max(groups, axis=-1), k)
    chosen = jnp.sort(chosen, axis=-1)
    candidates = jnp.take_along_axis(groups, chosen[:, :, None], axis=1).reshape(rows, -1)
    best, place = lax.top_k(candidates, k)
    return best, jnp.take_along_axis(chosen, place // group, axis=1) * group + place % group
