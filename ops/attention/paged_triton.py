"""Ragged paged attention as a Triton kernel: what an NVIDIA GPU runs.

A program takes an item of `ops.attention_work`: a block of one row's queries with all heads of their KV group, and a
stretch of the row's KV, which it walks tile by tile with a running softmax in base 2 (Dao et al., 2022). Where the KV
of blocks is split, a second kernel reduces their parts by their log-sum-exp (Flash-Decoding).

While a tile is multiplied, the next ones are on their way to shared memory. Triton pipelines loads whose addresses are
known early, so the block ids of a tile are read one tile ahead and carried through the loop. Long queries walk tiles
that all of them see in a loop of its own, which masks nothing.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jaxpage.ops.attention.launch import GPU, AttentionLaunch, AttentionShape, next_power_of_two, tuned_launches
from jaxpage.ops.attention.work_list import ITEM_FIELDS, WorkList, list_work
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
    work: tuple[WorkList, ...] | None = None,
) -> jax.Array:
    """See `paged_attention_xla`, whose contract this fulfils for rows whose tokens stand one after another.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim];
    block_tables: [rows, width]; query_start: [rows + 1]; query_lens, kv_lens: [rows]; sinks: [heads] float32;
    kv_scales: [2, num_kv_heads] float32, what keys and values of an 8-bit cache are multiplied by. scale is positive.
    Returns q's shape and dtype. gpu: what to compile for; launch: of all rows, by default `choose_launches` decides;
    work: what `list_work` gave for this step and layers of this kind, so that it is not made for each of them.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    num_rows, width = block_tables.shape
    if work is None:
        shape = AttentionShape(
            num_tokens=num_tokens,
            num_rows=num_rows,
            max_query_len=max_query_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_itemsize=kv_layer.dtype.itemsize,
            max_kv_len=width * block_size,
            span=min((span for span in (window, chunk) if span is not None), default=None),
        )
        lengths = (query_start, query_lens, kv_lens)
        launches = None if launch is None else (None, launch)
        options: dict[str, Any] = {"window": window, "chunk": chunk, "tuned": tuned_launches(gpu)}
        work = list_work(*lengths, shape=shape, gpu=gpu, launches=launches, **options)
    run = partial(
        _run,
        operands=(q, kv_layer, block_tables),
        scales=(sinks, kv_scales),
        constants={"SCALE": scale, "WINDOW": window, "CHUNK": chunk, "SOFTCAP": softcap},
        gpu=gpu,
    )
    *few, other = work
    out = run(other)
    if other.parts is not None:
        out = _reduce(other, out, jax.ShapeDtypeStruct(q.shape, q.dtype), gpu)
    for rows in few:
        whole = jax.new_ref(out)
        _reduce(rows, run(rows), whole, gpu)
        out = jax.freeze(whole)
    return out


def _run(
    work: WorkList,
    *,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    scales: tuple[jax.Array | None, jax.Array | None],
    constants: dict[str, Any],
    gpu: GPU,
) -> Any:
    """One launch: attention of its rows, shaped as q; or, where their KV is split, what `_reduce` takes.

    That is the weighted values of each item, [items, kv_heads, block_q * group, head_dim] float32, and of its weights
    the highest exponent and the total, [items, kv_heads, block_q * group] float32.
    """
    q, kv_layer, block_tables = operands
    launch = work.launch
    _, num_heads, head_dim = q.shape
    _, _, block_size, num_kv_heads, _ = kv_layer.shape
    group = num_heads // num_kv_heads
    num_items, split = len(work.items), work.parts is not None
    statistic = jax.ShapeDtypeStruct((num_items, num_kv_heads, launch.block_q * group), jnp.float32)
    weighted = jax.ShapeDtypeStruct((*statistic.shape, head_dim), jnp.float32)
    out = triton_call(
        _attention_kernel,
        (*operands, work.items, *scales, block_tables.shape[1]),
        out_type=(weighted, statistic, statistic) if split else (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        grid=(num_kv_heads, num_items),  # heads of an item beside each other, as they are in memory
        gpu=gpu,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        constants=constants
        | {
            "HEAD_DIM": head_dim,
            "PADDED_DIM": max(next_power_of_two(head_dim), 16),  # a product needs as many
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "BLOCK_SIZE": block_size,
            "ITEM_FIELDS": ITEM_FIELDS,
            "BLOCK_Q": launch.block_q,
            "BLOCK_M": launch.block_m,
            "TILE": launch.tile,
            "FULL_TILE": launch.full_tile,
            "SPLIT": split,
        }
        | ({} if split else {"highest_ptr": None, "total_ptr": None}),
    )
    return out if split else out[0]


def _reduce(work: WorkList, parts: tuple[jax.Array, jax.Array, jax.Array], out: Any, gpu: GPU) -> Any:
    """Put tokens together from the items of their blocks. out: what all tokens are written to, or a `Ref` for some."""
    assert work.parts is not None
    weighted = parts[0]
    _, num_kv_heads, block_heads, head_dim = weighted.shape
    group = block_heads // work.launch.block_q
    in_place = not isinstance(out, jax.ShapeDtypeStruct)
    return triton_call(
        _reduce_kernel,
        (*parts, work.parts, *((out,) if in_place else ())),
        out_type=() if in_place else out,
        grid=(len(work.parts), num_kv_heads * group),
        gpu=gpu,
        num_warps=4,
        constants={
            "HEAD_DIM": head_dim,
            "PADDED_DIM": next_power_of_two(head_dim),
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP": group,
            "BLOCK_Q": work.launch.block_q,
            "PARTS": 16,
        },
    )


_LOG2_E: Any = tl.constexpr(math.log2(math.e))


@triton.jit
def _block_ids(table_ptr, start, first_seen, num_seen, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Of the positions from `start` on; 0 where no query sees them. [TILE] int32."""
    s = start + tl.arange(0, TILE)
    return tl.load(table_ptr + s // BLOCK_SIZE, mask=(s >= first_seen) & (s < num_seen), other=0)


@triton.jit
def _walk(
    q,  # [BLOCK_M, PADDED_DIM]
    table_ptr,
    kv_head_ptr,
    position,  # [BLOCK_M], of the queries
    first_seen,
    num_seen,
    first_start,  # position where the first tile begins
    num_tiles,
    gap_start,  # position where tiles begin to be left out
    gap,  # how many positions these have
    scale,
    highest,  # [BLOCK_M]
    total,  # [BLOCK_M]
    weighted,  # [BLOCK_M, PADDED_DIM]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # whether there is a position in some tile that some query does not see, or a gap
):
    """Attend over some tiles of a row, and return the running softmax: highest, total, weighted."""
    in_head = tl.arange(0, PADDED_DIM)[None, :] < HEAD_DIM
    start = first_start
    if MASKED:
        start += tl.where(start >= gap_start, gap, 0)
    block_ids = _block_ids(table_ptr, start, first_seen, num_seen, TILE, BLOCK_SIZE)
    for tile in range(num_tiles):
        start = first_start + tile * TILE
        following = start + TILE
        if MASKED:
            start += tl.where(start >= gap_start, gap, 0)
            following += tl.where(following >= gap_start, gap, 0)
        s = start + tl.arange(0, TILE)  # KV positions
        slot = block_ids.to(tl.int64) * (2 * BLOCK_SIZE) + s % BLOCK_SIZE  # the value's is BLOCK_SIZE further
        tile_ptr = kv_head_ptr + slot[:, None] * SLOT_STRIDE
        if MASKED:
            # A slot that no query sees may hold NaN (unwritten, or another request's), and 0 * NaN is NaN.
            readable = ((s >= first_seen) & (s < num_seen))[:, None] & in_head
            k = tl.load(tile_ptr, mask=readable, other=0.0).to(q.dtype)  # [TILE, PADDED_DIM]
            v = tl.load(tile_ptr + BLOCK_SIZE * SLOT_STRIDE, mask=readable, other=0.0).to(q.dtype)
        elif HEAD_DIM < PADDED_DIM:
            k = tl.load(tile_ptr, mask=in_head, other=0.0).to(q.dtype)
            v = tl.load(tile_ptr + BLOCK_SIZE * SLOT_STRIDE, mask=in_head, other=0.0).to(q.dtype)
        else:
            k = tl.load(tile_ptr).to(q.dtype)
            v = tl.load(tile_ptr + BLOCK_SIZE * SLOT_STRIDE).to(q.dtype)
        # Of the next tile, which can so be asked for before this one is multiplied.
        block_ids = _block_ids(table_ptr, following, first_seen, num_seen, TILE, BLOCK_SIZE)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, TILE]
        exponent = scale * _LOG2_E  # of a score of 1; one multiplication with the subtraction of the highest
        if SOFTCAP is not None:  # softcap * tanh(scores / softcap)
            scores = SOFTCAP * (2 * tl.sigmoid(scores * (scale * (2 / SOFTCAP))) - 1)
            exponent = _LOG2_E
        if MASKED:
            visible = s[None, :] <= position[:, None]
            if WINDOW is not None:
                visible &= s[None, :] > position[:, None] - WINDOW
            if CHUNK is not None:
                visible &= s[None, :] >= position[:, None] // CHUNK * CHUNK
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1) * exponent)
        base = new_highest
        if MASKED:
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # -inf - -inf is NaN
        weights = tl.exp2(scores * exponent - base[:, None])
        decay = tl.exp2(highest - base)
        total = total * decay + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(q.dtype), v, weighted * decay[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, weighted


@triton.jit
def _attention_kernel(
    q_ptr,
    kv_ptr,
    block_tables_ptr,
    items_ptr,  # [items, ITEM_FIELDS]
    sinks_ptr,
    kv_scales_ptr,
    width,
    out_ptr,  # [tokens, heads, head_dim], or [items, kv_heads, BLOCK_Q * GROUP, head_dim] not divided by the total
    highest_ptr,  # [items, kv_heads, BLOCK_Q * GROUP], of the scores; None where nothing is split
    total_ptr,  # the same, of the weights; 0 where an item has nothing to see
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    FULL_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    item_ptr = items_ptr + item * ITEM_FIELDS
    num_tokens = tl.load(item_ptr + 2)
    if num_tokens == 0:
        return
    row = tl.load(item_ptr)
    token = tl.load(item_ptr + 1)
    num_queries = tl.load(item_ptr + 3)
    oldest = tl.load(item_ptr + 4)
    first_tile = tl.load(item_ptr + 5)
    end_tile = tl.load(item_ptr + 6)
    is_first = tl.load(item_ptr + 7) != 0

    m = tl.arange(0, BLOCK_M)  # each a query head
    d = tl.arange(0, PADDED_DIM)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    in_row = (m < BLOCK_Q * GROUP) & (query < num_tokens)
    position = oldest + query
    out_index = (token + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    in_head = d[None, :] < HEAD_DIM
    q = tl.load(  # [BLOCK_M, PADDED_DIM]
        q_ptr + out_index[:, None] * HEAD_DIM + d[None, :], mask=in_row[:, None] & in_head, other=0.0
    )

    # What some query of the block sees.
    num_seen = oldest + num_queries
    first_seen = 0
    if WINDOW is not None:
        first_seen = tl.maximum(first_seen, oldest - (WINDOW - 1))
    if CHUNK is not None:
        first_seen = tl.maximum(first_seen, oldest // CHUNK * CHUNK)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if sinks_ptr is not None:  # a position with this score and no value, which only the first part sees
        sink = tl.load(sinks_ptr + head, mask=m < BLOCK_Q * GROUP, other=0.0) * _LOG2_E
        highest = tl.where(is_first, sink, highest)
        total = tl.where(is_first, 1.0, total)
    scale = SCALE
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)

    slot_stride: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    table_ptr = block_tables_ptr + row.to(tl.int64) * width
    kv_head_ptr = kv_ptr + kv_head * HEAD_DIM + d[None, :]
    first_full = end_tile  # the tiles that all queries of the block see in full
    num_full = 0
    if FULL_TILE > 0:
        newest = num_seen - 1
        first_full = first_tile
        if WINDOW is not None:
            first_full = tl.maximum(first_full, tl.cdiv(tl.maximum(newest - (WINDOW - 1), 0), TILE))
        if CHUNK is not None:
            first_full = tl.maximum(first_full, tl.cdiv(newest // CHUNK * CHUNK, TILE))
        first_full = tl.minimum(first_full, end_tile)
        end_full = tl.minimum(end_tile, (oldest + 1) // TILE)
        num_full = tl.maximum(end_full - first_full, 0) // (FULL_TILE // TILE)  # larger ones
    gap = num_full * (FULL_TILE // TILE)
    highest, total, weighted = _walk(
        q,
        table_ptr,
        kv_head_ptr,
        position,
        first_seen,
        num_seen,
        first_tile * TILE,
        end_tile - first_tile - gap,
        first_full * TILE,
        gap * TILE,
        scale,
        highest,
        total,
        weighted,
        HEAD_DIM,
        PADDED_DIM,
        slot_stride,
        BLOCK_SIZE,
        TILE,
        WINDOW,
        CHUNK,
        SOFTCAP,
        True,
    )
    if FULL_TILE > 0:
        highest, total, weighted = _walk(
            q,
            table_ptr,
            kv_head_ptr,
            position,
            first_full * TILE,
            (first_full + gap) * TILE,
            first_full * TILE,
            num_full,
            0,
            0,
            scale,
            highest,
            total,
            weighted,
            HEAD_DIM,
            PADDED_DIM,
            slot_stride,
            BLOCK_SIZE,
            FULL_TILE,
            WINDOW,
            CHUNK,
            SOFTCAP,
            False,
        )

    if kv_scales_ptr is not None:
        weighted *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    if SPLIT:
        in_block = m < BLOCK_Q * GROUP
        part_index = (item.to(tl.int64) * NUM_KV_HEADS + kv_head) * (BLOCK_Q * GROUP) + m
        tl.store(highest_ptr + part_index, highest, mask=in_block)
        tl.store(total_ptr + part_index, total, mask=in_block)
        part_ptrs = out_ptr + part_index[:, None] * HEAD_DIM + d[None, :]
        tl.store(part_ptrs, weighted, mask=(in_row & (total > 0))[:, None] & in_head)
    else:
        is_seeing = (total > 0) & (query < num_queries)
        out = tl.where(is_seeing[:, None], weighted / tl.where(is_seeing, total, 1.0)[:, None], 0.0)
        out_ptrs = out_ptr + out_index[:, None] * HEAD_DIM + d[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=in_row[:, None] & in_head)


@triton.jit
def _reduce_kernel(
    weighted_ptr,  # [items, kv_heads, BLOCK_Q * GROUP, head_dim]
    highest_ptr,  # [items, kv_heads, BLOCK_Q * GROUP]
    total_ptr,  # [items, kv_heads, BLOCK_Q * GROUP]
    parts_ptr,  # [slots, 4], see `WorkList`
    out_ptr,  # [tokens, heads, head_dim]
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PARTS: tl.constexpr,
):
    slot = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(parts_ptr + slot * 4)
    if token < 0:
        return
    first_item = tl.load(parts_ptr + slot * 4 + 1)
    num_items = tl.load(parts_ptr + slot * 4 + 2)
    place = tl.load(parts_ptr + slot * 4 + 3)
    d = tl.arange(0, PADDED_DIM)
    in_head = (d < HEAD_DIM)[None, :]
    in_block = (head // GROUP) * (BLOCK_Q * GROUP) + place * GROUP + head % GROUP
    top = tl.full([1], float("-inf"), tl.float32)
    whole = tl.zeros([1], tl.float32)
    out = tl.zeros([PADDED_DIM], tl.float32)
    for start in range(0, num_items, PARTS):
        part = start + tl.arange(0, PARTS)
        index = (first_item + part).to(tl.int64) * (NUM_KV_HEADS * BLOCK_Q * GROUP) + in_block
        total = tl.load(total_ptr + index, mask=part < num_items, other=0.0)
        highest = tl.load(highest_ptr + index, mask=part < num_items, other=float("-inf"))
        weighted = tl.load(  # [PARTS, PADDED_DIM]; not waiting for the total, without which it may be anything
            weighted_ptr + index[:, None] * HEAD_DIM + d[None, :],
            mask=(part < num_items)[:, None] & in_head,
            other=0.0,
        )
        live = total > 0
        weighted = tl.where(live[:, None], weighted, 0.0)
        new_top = tl.maximum(top, tl.max(tl.where(live, highest, float("-inf")), 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        share = tl.where(live, tl.exp2(highest - base), 0.0)
        decay = tl.exp2(top - base)
        whole = whole * decay + tl.sum(total * share, 0)
        out = out * decay + tl.sum(weighted * share[:, None], 0)
        top = new_top
    out = out / tl.where(whole > 0, whole, 1.0)
    out_index = token.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
    tl.store(out_ptr + out_index * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
