"""Recurrent states of sequences as bytes in blocks of the KV cache, for others to go on from.

A block id names a page in every array of paged KV. What a sequence keeps of all its recurrent states, one behind the
other, fills the pages of its first block, then those of the second, and so on. Each device keeps its own part.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def save_states(
    buffers: Sequence[jax.Array], states: Sequence[jax.Array], rows: jax.Array, positions: jax.Array, blocks: jax.Array
) -> list[jax.Array]:
    """Write what rows keep behind their first `positions` tokens into blocks.

    buffers: [num_blocks, ...] each; states: [batch rows, ring, ...] each; rows, positions: [n] int32; blocks: [n, m]
    int32, past the cache's end where nothing is to be written. Returns the buffers, updated in place where donated.
    """
    parts = []
    for state in states:
        kept = state[jnp.minimum(rows, state.shape[0] - 1), (positions - 1) % state.shape[1]]
        parts.append(_as_bytes(kept))
    found = jnp.concatenate(parts, axis=1)
    page, itemsize = _page_size(buffers[0]), buffers[0].dtype.itemsize
    room = blocks.shape[1] * len(buffers) * page * itemsize
    found = jnp.pad(found, ((0, 0), (0, room - found.shape[1])))
    pages = _from_bytes(found, buffers[0].dtype).reshape(*blocks.shape, len(buffers), page)
    return [
        buffer.at[blocks].set(pages[:, :, index].reshape(*blocks.shape, *buffer.shape[1:]), mode="drop")
        for index, buffer in enumerate(buffers)
    ]


def load_states(
    buffers: Sequence[jax.Array], states: Sequence[jax.Array], rows: jax.Array, positions: jax.Array, blocks: jax.Array
) -> list[jax.Array]:
    """Let rows go on behind their first `positions` tokens from what blocks hold; arguments as in `save_states`.

    Rows past the batch's end are not written. Returns the states.
    """
    pages = [buffer.at[blocks].get(mode="clip").reshape(*blocks.shape, 1, -1) for buffer in buffers]
    found = _as_bytes(jnp.concatenate(pages, axis=2))
    loaded, start = [], 0
    for state in states:
        size = int(np.prod(state.shape[2:])) * state.dtype.itemsize
        kept = _from_bytes(found[:, start : start + size], state.dtype).reshape(-1, *state.shape[2:])
        loaded.append(state.at[rows, (positions - 1) % state.shape[1]].set(kept, mode="drop"))
        start += size
    return loaded


def _page_size(buffer: jax.Array) -> int:
    return int(np.prod(buffer.shape[1:]))


def _as_bytes(values: jax.Array) -> jax.Array:
    """[n, ...] -> [n, bytes] uint8"""
    return lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], -1)


def _from_bytes(found: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[n, bytes] uint8 -> [n, numbers]"""
    if dtype.itemsize == 1:
        return lax.bitcast_convert_type(found, dtype)
    return lax.bitcast_convert_type(found.reshape(found.shape[0], -1, dtype.itemsize), dtype)
