"""Recurrent states as bytes in blocks: what is saved of one row is what another row loads, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.checkpoint import load_states, save_states

RING, ROWS, NUM_BLOCKS = 3, 4, 9
NOWHERE = 2**31 - 1


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_what_a_row_saves_another_loads_bit_for_bit(kv_dtype: str) -> None:
    """Every pattern of bits that a float can have, in blocks of another type."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (ROWS, RING, 2, 5), np.uint32)
    half = rng.integers(0, 2**16, (ROWS, RING, 7), np.uint16)
    states = [
        jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32),
        jax.lax.bitcast_convert_type(jnp.asarray(half), jnp.bfloat16),
        jnp.asarray(rng.integers(-128, 127, (ROWS, RING, 3), np.int8)),
    ]
    buffers = [jnp.asarray(rng.normal(size=(NUM_BLOCKS, 2, 2, 1, 2)), kv_dtype) for _ in range(2)]
    num_bytes = 2 * 5 * 4 + 7 * 2 + 3
    blocks = -(-num_bytes // (2 * 8 * buffers[0].dtype.itemsize))
    ids = jnp.asarray([[5, 2, 7, 1, 3, 8][:blocks], [NOWHERE] * blocks], jnp.int32)
    rows, positions = jnp.asarray([2, NOWHERE], jnp.int32), jnp.asarray([8, 1], jnp.int32)
    saved = jax.jit(save_states)(buffers, states, rows, positions, ids)
    for before, after in zip(buffers, saved, strict=True):
        others = np.setdiff1d(np.arange(NUM_BLOCKS), ids[0])
        np.testing.assert_array_equal(np.asarray(after)[others], np.asarray(before)[others])

    target, here = jnp.asarray([0, NOWHERE], jnp.int32), jnp.asarray([9, 9], jnp.int32)
    for before, after in zip(states, jax.jit(load_states)(saved, states, target, here, ids), strict=True):
        old, new = (np.asarray(array).view(np.uint8) for array in (before, after))
        expected = old.copy()
        expected[0, 8 % RING] = old[2, 7 % RING]
        np.testing.assert_array_equal(new, expected)
