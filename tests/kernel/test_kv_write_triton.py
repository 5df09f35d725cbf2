"""The kernel that rotates queries and keys and writes the KV cache, in Triton's interpreter."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpret

from jaxpage.ops.attention import kv_write_triton
from jaxpage.ops.attention.kv_write_triton import rotate_and_write_kv_triton
from jaxpage.ops.attention.launch import GPU

H200 = GPU(num_sms=132, compute_capability=90)
NUM_BLOCKS, BLOCK_SIZE = 4, 16
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_write_triton, "triton_call", interpret)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Pairs (i, i + half) of every head as complex numbers, turned. x: [tokens, heads, head_dim] float64."""
    half = angles.shape[1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)


def check(
    slots: list[int],
    *,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    half: int = 8,
    dtype: Any = np.float32,
    kv_dtype: Any = np.float32,
    kv_scales: np.ndarray | None = None,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    num_tokens = len(slots)
    q = rng.normal(size=(num_tokens, num_kv_heads * group, head_dim)).astype(dtype)
    k, v = rng.normal(size=(2, num_tokens, num_kv_heads, head_dim)).astype(dtype)
    angles = rng.uniform(-3, 3, size=(num_tokens, half))
    rope = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if half else None
    before = rng.normal(size=(NUM_BLOCKS, 2, BLOCK_SIZE, num_kv_heads, head_dim)).astype(kv_dtype)

    expected = before.astype(np.float64)
    scales = np.ones((2, num_kv_heads)) if kv_scales is None else kv_scales
    rotated_k = rotate(k.astype(np.float64), angles)
    for token, slot in enumerate(slots):
        if slot < NUM_SLOTS:
            at = expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE]  # [2, kv_heads, head_dim]
            at[:] = np.stack([rotated_k[token], v[token].astype(np.float64)]) / scales[..., None]

    got_q, cache = rotate_and_write_kv_triton(
        q, k, v, rope, jnp.asarray(before), np.array(slots, np.int32), kv_scales=kv_scales, gpu=H200
    )
    assert got_q.dtype == dtype
    assert cache.dtype == kv_dtype
    close = {"atol": tolerance, "rtol": tolerance}
    np.testing.assert_allclose(np.asarray(got_q, np.float64), rotate(q.astype(np.float64), angles), **close)
    np.testing.assert_allclose(np.asarray(cache, np.float64), expected, **close)
    written = {slot for slot in slots if slot < NUM_SLOTS}
    others = [slot for slot in range(NUM_SLOTS) if slot not in written]
    by_slot = [np.asarray(of).swapaxes(1, 2).reshape(NUM_SLOTS, -1)[others] for of in (cache, before)]
    np.testing.assert_array_equal(*by_slot)


@settings(derandomize=True, deadline=None, database=None, max_examples=25)
@given(
    slots=st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=6, unique=True),
    padding=st.lists(st.sampled_from([NUM_SLOTS, NUM_SLOTS + 1, 2**31 - 1]), max_size=2),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    dims=st.sampled_from([(16, 8), (16, 4), (16, 0), (24, 12), (80, 40), (80, 16), (128, 64)]),
    seed=st.integers(0, 2**16),
)
def test_tokens_are_rotated_and_land_in_their_slots(
    slots: list[int], padding: list[int], num_kv_heads: int, group: int, dims: tuple[int, int], seed: int
) -> None:
    slots = slots + padding
    check(slots, num_kv_heads=num_kv_heads, group=group, head_dim=dims[0], half=dims[1], seed=seed)


def test_padding_alone_writes_nothing() -> None:
    check([NUM_SLOTS, NUM_SLOTS + BLOCK_SIZE, 2**31 - 1])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_rotated_in_float32(dtype: Any) -> None:
    check([5, 40, NUM_SLOTS, 17], dtype=dtype, kv_dtype=dtype, tolerance=2**-11 if dtype == np.float16 else 2**-8)


@pytest.mark.parametrize(
    ("kv_dtype", "tolerance"), [(ml_dtypes.float8_e4m3fn, 1 / 16), (ml_dtypes.float8_e5m2, 1 / 8)], ids=["e4m3", "e5m2"]
)
def test_an_eight_bit_cache_holds_what_the_scales_leave(kv_dtype: Any, tolerance: float) -> None:
    scales = np.array([[0.5, 2.0], [0.1, 0.03]], np.float32)
    check([5, 40, NUM_SLOTS, 17], kv_dtype=kv_dtype, kv_scales=scales, tolerance=tolerance)


def test_what_an_eight_bit_cache_cannot_hold_becomes_its_largest_number() -> None:
    k = np.array([1e6, -1e6, 1.0, 0.0], np.float32).reshape(1, 1, 4)
    cache = jnp.zeros((1, 2, BLOCK_SIZE, 1, 4), ml_dtypes.float8_e4m3fn)
    _, cache = rotate_and_write_kv_triton(
        k, k, -k, None, cache, np.array([3], np.int32), kv_scales=np.ones((2, 1), np.float32), gpu=H200
    )
    np.testing.assert_array_equal(np.asarray(cache[0, :, 3, 0], np.float32), [[448, -448, 1, 0], [-448, 448, -1, 0]])
