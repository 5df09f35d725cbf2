"""Ragged paged attention as a Triton kernel: what an NVIDIA GPU runs.

A program takes a block of one row's queries with all heads of their KV group, and walks the row's KV tile by tile with
a running softmax in base 2 (Dao et al., 2022). Steps with few query blocks split the KV into segments, each a program
of its own, and a second kernel reduces them by their log-sum-exp (Flash-Decoding).

Query blocks of row r are numbered from `query_start[r] // BLOCK_Q + r` on, so that a program finds its row by binary
search and every row has as many as it needs. The tokens past the last row's, which are padding, count as one more row
that sees nothing: zeros are written there.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxpage.ops.launch import (
    GPU,
    AttentionLaunch,
    AttentionShape,
    choose_launch,
    next_power_of_two,
    tuned_launches,
)
from jaxpage.ops.triton_call import triton_call


def paged_attention_triton(
    q: jax.Array,
    kv_layer: jax.Array,
    *,
    block_tables: jax.Array,
    query_start: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    gpu: GPU,
    launch: AttentionLaunch | None = None,
) -> jax.Array:
    """See `paged_attention_xla`, whose contract this fulfils for rows whose tokens stand one after another.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim];
    block_tables: [rows, width]; query_start: [rows + 1]; query_lens, kv_lens: [rows]; sinks: [heads] float32;
    kv_scales: [2, num_kv_heads] float32, what keys and values of an 8-bit cache are multiplied by.
    Returns q's shape and dtype. gpu: what to compile for; launch: by default `choose_launch` decides.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    num_rows, width = block_tables.shape
    if launch is None:
        spans = [span for span in (window, chunk) if span is not None]
        shape = AttentionShape(
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_query_len=max_query_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_itemsize=kv_layer.dtype.itemsize,
            max_kv_len=width * block_size,
            span=min(spans, default=None),
        )
        launch = choose_launch(shape, gpu, tuned_launches(gpu))
    segments = launch.num_segments
    split = segments > 1
    padded_dim = max(next_power_of_two(head_dim), 16)  # a product needs as many
    sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded_dim, "NUM_SEGMENTS": segments}
    partial = jax.ShapeDtypeStruct((num_tokens, num_heads, segments, head_dim), jnp.float32)
    statistic = jax.ShapeDtypeStruct((num_tokens, num_heads, segments), jnp.float32)
    one_query = max_query_len == 1
    num_blocks = num_rows if one_query else num_tokens // launch.block_q + num_rows + 1
    out = triton_call(
        _attention_kernel,
        (q, kv_layer, block_tables, query_start, query_lens, kv_lens, sinks, kv_scales, num_tokens, num_rows, width),
        out_type=(partial, statistic, statistic) if split else (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(num_blocks, num_kv_heads, segments),
        gpu=gpu,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants={
            **sizes,
            "SCALE": scale,
            "WINDOW": window,
            "CHUNK": chunk,
            "SOFTCAP": softcap,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": num_heads // num_kv_heads,
            "BLOCK_SIZE": block_size,
            "ONE_QUERY": one_query,
            "BLOCK_Q": launch.block_q,
            "BLOCK_M": launch.block_m,
            "TILE": launch.tile,
        }
        | ({} if split else {"highest_ptr": None, "total_ptr": None}),
    )
    if not split:
        return out[0]
    return triton_call(
        _reduce_kernel,
        out,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tokens, num_heads),
        gpu=gpu,
        num_warps=1 if segments * head_dim <= 2048 else 4,
        constants=sizes,
    )


_LOG2_E: Any = tl.constexpr(math.log2(math.e))


@triton.jit
def _attention_kernel(
    q_ptr,
    kv_ptr,
    block_tables_ptr,
    query_start_ptr,
    query_lens_ptr,
    kv_lens_ptr,
    sinks_ptr,
    kv_scales_ptr,
    num_tokens,
    num_rows,
    width,
    out_ptr,  # [tokens, heads, segments, head_dim]: not yet divided by the total where there are several segments
    highest_ptr,  # [tokens, heads, segments], of the scores; None with one segment
    total_ptr,  # the same, of the weights; 0 where a segment has nothing to see
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ONE_QUERY: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    if ONE_QUERY:  # rows and tokens are in the same order
        row = block
        row_start = block
        row_tokens = 1
        first_query = 0
        is_row = True
    else:
        row = 0  # the last one whose first block is not past this block
        end = num_rows + 1
        while end - row > 1:
            middle = (row + end) // 2
            if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= block:
                row = middle
            else:
                end = middle
        row_start = tl.load(query_start_ptr + row)
        is_row = row < num_rows
        row_tokens = tl.load(query_start_ptr + row + 1, mask=is_row, other=num_tokens) - row_start
        first_query = (block - row_start // BLOCK_Q - row) * BLOCK_Q
    if first_query >= row_tokens:
        return
    query_len = tl.load(query_lens_ptr + row, mask=is_row, other=0)
    kv_len = tl.load(kv_lens_ptr + row, mask=is_row, other=0)

    m = tl.arange(0, BLOCK_M)  # each a query head
    d = tl.arange(0, PADDED_DIM)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    in_row = (m < BLOCK_Q * GROUP) & (query < row_tokens)
    position = kv_len - query_len + query
    out_index = (row_start + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    in_head = d[None, :] < HEAD_DIM
    q = tl.load(  # [BLOCK_M, PADDED_DIM]
        q_ptr + out_index[:, None] * HEAD_DIM + d[None, :], mask=in_row[:, None] & in_head, other=0.0
    )

    # What some query of the block sees: nothing if all of it is padding.
    oldest = kv_len - query_len + first_query
    num_seen = kv_len - query_len + tl.minimum(first_query + BLOCK_Q, query_len)
    num_seen = tl.where(first_query < query_len, num_seen, 0)
    first_seen = 0
    if WINDOW is not None:
        first_seen = tl.maximum(first_seen, oldest - (WINDOW - 1))
    if CHUNK is not None:
        first_seen = tl.maximum(first_seen, oldest // CHUNK * CHUNK)
    first_tile = first_seen // TILE
    end_tile = tl.cdiv(num_seen, TILE)
    if NUM_SEGMENTS > 1:
        per_segment = tl.cdiv(tl.maximum(end_tile - first_tile, 0), NUM_SEGMENTS)
        first_tile += segment * per_segment
        end_tile = tl.minimum(first_tile + per_segment, end_tile)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if sinks_ptr is not None:  # a position with this score and no value, which only the first segment sees
        sink = tl.load(sinks_ptr + head, mask=m < BLOCK_Q * GROUP, other=0.0) * _LOG2_E
        has_sink = (segment == 0) & (first_tile < end_tile)
        highest = tl.where(has_sink, sink, highest)
        total = tl.where(has_sink, 1.0, total)
    scale = SCALE
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)

    token_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    table_ptr = block_tables_ptr + row.to(tl.int64) * width
    kv_head_ptr = kv_ptr + kv_head * HEAD_DIM + d[None, :]
    for tile in range(first_tile, end_tile):
        s = tile * TILE + tl.arange(0, TILE)  # KV positions
        # A slot that no query sees may hold NaN (unwritten, or another request's), and 0 * NaN is NaN.
        seen = (s >= first_seen) & (s < num_seen)
        block_id = tl.load(table_ptr + s // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slot = block_id * (2 * BLOCK_SIZE) + s % BLOCK_SIZE  # of the key; the value's is BLOCK_SIZE further
        tile_ptr = kv_head_ptr + slot[:, None] * token_stride
        readable = seen[:, None] & in_head
        k = tl.load(tile_ptr, mask=readable, other=0.0).to(q.dtype)  # [TILE, PADDED_DIM]
        v = tl.load(tile_ptr + BLOCK_SIZE * token_stride, mask=readable, other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [BLOCK_M, TILE]
        if SOFTCAP is not None:  # softcap * tanh(scores / softcap)
            scores = SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1)
        visible = s[None, :] <= position[:, None]
        if WINDOW is not None:
            visible &= s[None, :] > position[:, None] - WINDOW
        if CHUNK is not None:
            visible &= s[None, :] >= position[:, None] // CHUNK * CHUNK
        scores = tl.where(visible, scores * _LOG2_E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # -inf - -inf is NaN
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(q.dtype), v, weighted * decay[:, None], input_precision="ieee")
        highest = new_highest

    if kv_scales_ptr is not None:
        weighted *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    out_index = out_index * NUM_SEGMENTS + segment
    out_ptrs = out_ptr + out_index[:, None] * HEAD_DIM + d[None, :]
    if NUM_SEGMENTS > 1:
        tl.store(highest_ptr + out_index, highest, mask=in_row)
        tl.store(total_ptr + out_index, total, mask=in_row)
        tl.store(out_ptrs, weighted, mask=(in_row & (total > 0))[:, None] & in_head)
    else:
        out = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_row[:, None] & in_head)


@triton.jit
def _reduce_kernel(
    weighted_ptr,  # [tokens, heads, segments, head_dim]
    highest_ptr,  # [tokens, heads, segments]
    total_ptr,  # [tokens, heads, segments]
    out_ptr,  # [tokens, heads, head_dim]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)
    segment = index * NUM_SEGMENTS + tl.arange(0, NUM_SEGMENTS)
    total = tl.load(total_ptr + segment)
    highest = tl.load(highest_ptr + segment)
    live = total > 0  # the others have written no values
    top = tl.max(tl.where(live, highest, float("-inf")), 0)
    share = tl.where(live, tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top)), 0.0)
    weighted = tl.load(  # [NUM_SEGMENTS, PADDED_DIM]
        weighted_ptr + segment[:, None] * HEAD_DIM + d[None, :],
        mask=live[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    whole = tl.sum(total * share, 0)
    out = tl.sum(weighted * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out_ptr + index * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
