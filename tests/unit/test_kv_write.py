"""Keys and values land in their slots, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.attention.kv_write import copy_blocks, write_kv

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 5, 4, 2, 8
PADDING = NUM_BLOCKS * BLOCK_SIZE
write = jax.jit(write_kv)


def random_case(num_tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cache with something in every slot, and new keys and values."""
    rng = np.random.default_rng(seed)
    cache = rng.normal(size=(NUM_BLOCKS, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)).astype(np.float32)
    k, v = rng.normal(size=(2, num_tokens, KV_HEADS, HEAD_DIM)).astype(np.float32)
    return cache, k, v


@pytest.mark.parametrize(
    "slots",
    [
        [0, 1, 2, 3, 4, 5],
        [19, 3, 4, 12, 7, 8],
        [4, PADDING, 5, PADDING, PADDING, 6],
        [PADDING] * 6,
        [PADDING - 1, PADDING, PADDING + 1, PADDING + BLOCK_SIZE, 2**31 - 1, 0],
    ],
    ids=["in_order", "scattered", "padding_between", "only_padding", "around_the_end"],
)
def test_tokens_land_in_their_slots_and_padding_nowhere(slots: list[int]) -> None:
    cache, k, v = random_case(len(slots), seed=1)
    expected = cache.copy()
    for token, slot in enumerate(slots):
        if slot < PADDING:
            expected[slot // BLOCK_SIZE, 0, slot % BLOCK_SIZE] = k[token]
            expected[slot // BLOCK_SIZE, 1, slot % BLOCK_SIZE] = v[token]
    np.testing.assert_array_equal(write(cache, k, v, jnp.array(slots, jnp.int32)), expected)


def test_values_are_stored_in_the_type_of_the_cache() -> None:
    cache, k, v = random_case(6, seed=2)
    got = write(cache.astype(jnp.bfloat16), k, v, jnp.arange(6, dtype=jnp.int32))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[0, 0, :4], k[:4].astype(jnp.bfloat16))
    np.testing.assert_array_equal(got[1, 1, :2], v[4:].astype(jnp.bfloat16))


@pytest.mark.parametrize("branch_free", [False, True])
@pytest.mark.parametrize("copies", [[], [(1, 2)], [(1, 2), (1, 4), (3, 0)], [(2, 3), (4, 2), (0, 4)]])
def test_blocks_are_copied_one_after_another_and_at_once(copies: list[tuple[int, int]], branch_free: bool) -> None:
    """Where a block is a source and a target, it is read before it is written."""
    cache, _, _ = random_case(1, seed=3)
    before = [cache, cache[:, :, :, :1] + 1]
    source, target = np.full((2, 5), 2**31 - 1, np.int32)
    for index, copy in enumerate(copies):
        source[index], target[index] = copy
    copied = jax.jit(copy_blocks, static_argnames="branch_free")(
        before, source, target, len(copies), branch_free=branch_free
    )
    for after, old in zip(copied, before, strict=True):
        expected = old.copy()
        for origin, copy in copies:
            expected[copy] = old[origin]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("branch_free", [False, True])
def test_without_room_for_copies_buffers_stay_as_they_are(branch_free: bool) -> None:
    none, buffer = jnp.zeros(0, jnp.int32), jnp.ones((3, 8), jnp.uint8)
    (kept,) = copy_blocks([buffer], none, none, jnp.int32(0), branch_free=branch_free)
    assert kept is buffer
