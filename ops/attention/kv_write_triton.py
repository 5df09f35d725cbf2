"""Rotating queries and keys and writing keys and values into the paged KV cache, as one Triton kernel.

The cache is changed in place: a `jax.Ref` of it is an operand that the compiled program aliases with its result.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxpage.ops.attention.launch import GPU, next_power_of_two
from jaxpage.ops.triton_call import triton_call


def rotate_and_write_kv_triton(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    kv_layer: jax.Array,
    slots: jax.Array,
    *,
    kv_scales: jax.Array | None = None,
    gpu: GPU,
) -> tuple[jax.Array, jax.Array]:
    """See `ops.kv_write.rotate_and_write_kv`, whose contract this fulfils; `gpu` says what to compile for.

    kv_scales: [2, num_kv_heads] float32, what keys and values are divided by where the cache has 8-bit numbers, held
    within their range.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, _, block_size, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    half = 0 if rope is None else rope[0].shape[-1]
    cos, sin = (None, None) if rope is None else rope
    # As projections give them, where XLA sees that: then nothing is copied; otherwise one kernel instead of three.
    by_group = (q.reshape(num_tokens, num_kv_heads, group, head_dim), k[:, :, None], v[:, :, None])
    qkv = jnp.concatenate(by_group, axis=2)
    cache = jax.new_ref(kv_layer)
    rotated = triton_call(
        _kernel,
        (qkv, cos, sin, slots, kv_scales, cache, num_blocks * block_size),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tokens, num_kv_heads),
        gpu=gpu,
        num_warps=1,
        constants={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": next_power_of_two(head_dim),
            "HALF": half,
            "GROUP": group,
            "PADDED_GROUP": next_power_of_two(group),
            "BLOCK_SIZE": block_size,
            "LARGEST": float(jnp.finfo(kv_layer.dtype).max) if kv_scales is not None else None,
        },
    )
    return rotated, jax.freeze(cache)


@triton.jit
def _rotated(x_ptr, d, mask, cos, sin, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Heads at `x_ptr` in float32: the first half of what is rotated pairs with the second, the rest stays."""
    x = tl.load(x_ptr + d, mask=mask & (d < HEAD_DIM), other=0.0).to(tl.float32)
    if HALF == 0:
        return x
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    is_turned = d < 2 * HALF
    other = tl.load(x_ptr + partner, mask=mask & is_turned, other=0.0).to(tl.float32)
    return x * cos + tl.where(d < HALF, -other, other) * sin


@triton.jit
def _kernel(
    qkv_ptr,  # [tokens, kv_heads, GROUP + 2, head_dim]
    cos_ptr,  # [tokens, HALF]
    sin_ptr,
    slots_ptr,  # [tokens]
    kv_scales_ptr,  # [2, kv_heads]
    cache_ptr,  # [num_blocks, 2, BLOCK_SIZE, kv_heads, head_dim]
    num_slots,
    rotated_ptr,  # [tokens, kv_heads, GROUP, head_dim]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    d = tl.arange(0, PADDED_DIM)[None, :]
    cos = 1.0
    sin = 0.0
    if HALF > 0:
        angle = token * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=d < 2 * HALF, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=d < 2 * HALF, other=0.0)

    kv_index = token.to(tl.int64) * num_kv_heads + kv_head
    q_ptr = qkv_ptr + kv_index * (GROUP + 2) * HEAD_DIM
    k_ptr = q_ptr + GROUP * HEAD_DIM
    v_ptr = k_ptr + HEAD_DIM
    head = tl.arange(0, PADDED_GROUP)[:, None]
    q = _rotated(q_ptr + head * HEAD_DIM, d, head < GROUP, cos, sin, HEAD_DIM, HALF)  # [PADDED_GROUP, PADDED_DIM]
    out_ptr = rotated_ptr + (kv_index * GROUP + head) * HEAD_DIM + d
    tl.store(out_ptr, q.to(rotated_ptr.dtype.element_ty), mask=(head < GROUP) & (d < HEAD_DIM))

    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < num_slots:  # padding has none
        k = _rotated(k_ptr, d, d >= 0, cos, sin, HEAD_DIM, HALF)  # [1, PADDED_DIM]
        k = k.to(k_ptr.dtype.element_ty).to(tl.float32)  # rounded as a key that was not written with its rotation
        v = tl.load(v_ptr + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        if kv_scales_ptr is not None:
            k = tl.clamp(k / tl.load(kv_scales_ptr + kv_head), -LARGEST, LARGEST)
            v = tl.clamp(v / tl.load(kv_scales_ptr + num_kv_heads + kv_head), -LARGEST, LARGEST)
        key_row = slot // BLOCK_SIZE * (2 * BLOCK_SIZE) + slot % BLOCK_SIZE
        key_ptr = cache_ptr + (key_row * num_kv_heads + kv_head) * HEAD_DIM + d
        value_ptr = key_ptr + BLOCK_SIZE * num_kv_heads * HEAD_DIM
        tl.store(key_ptr, k.to(cache_ptr.dtype.element_ty), mask=d < HEAD_DIM)
        tl.store(value_ptr, v.to(cache_ptr.dtype.element_ty), mask=d < HEAD_DIM)
