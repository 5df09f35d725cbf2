"""Recurrent states as bytes in blocks: whatever they hold comes back bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.checkpoint import load_states, save_states

RING, NOWHERE = 3, np.iinfo(np.int32).max


def bits(values: jax.Array) -> np.ndarray:
    return np.asarray(values).view(np.uint16)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_all_patterns_of_bits_come_back_through_blocks_of_any_dtype(kv_dtype: str) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)  # NaNs of all kinds among them
    states = [jnp.asarray(patterns.view(dtype)).reshape(2, -1) for dtype in (jnp.bfloat16, np.float32)]
    rings = [jnp.zeros((2, RING, *state.shape), state.dtype).at[1, 6 % RING].set(state) for state in states]
    buffers = [jnp.zeros((9, 2, 16, 4, 128), kv_dtype) for _ in range(4)]
    rows, positions = jnp.array([1, NOWHERE], jnp.int32), jnp.array([7, NOWHERE], jnp.int32)
    num_blocks = -(-4 * 2**16 // (4 * buffers[0][0].nbytes))
    blocks = jnp.array([[7, 2, 5, 3][:num_blocks], [NOWHERE] * num_blocks], jnp.int32)
    saved = jax.jit(save_states)(buffers, rings, rows, positions, blocks)
    untouched = np.setdiff1d(np.arange(9), np.asarray(blocks[0]))
    assert not any(np.any(np.asarray(buffer)[untouched]) for buffer in saved)
    empty = [jnp.zeros_like(ring) for ring in rings]
    loaded = jax.jit(load_states)(saved, empty, jnp.array([0, NOWHERE], jnp.int32), positions, blocks)
    for state, ring in zip(states, loaded, strict=True):
        assert np.array_equal(bits(ring[0, 6 % RING]), bits(state))
        assert not np.any(bits(ring[1]))
        assert not np.any(bits(ring[0, [0 if 6 % RING else 1, 2]]))
