"""Ragged paged attention in plain XLA: the reference for the GPU kernel, and what a CPU runs.

The batch is cut into query blocks of at most `QUERY_BLOCK` consecutive queries of one row, handled in groups. A group
walks the KV tile by tile with a running softmax (Dao et al., 2022). Both loops end at run time, with the last live
query block and the longest live row: cost follows what is scheduled, not the padded shape. In a pure decode step each
query is a block, and all make one group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

QUERY_BLOCK = 16
"""Queries of a row that are handled together."""
GROUP = 32
"""Query blocks that walk the KV together; more at a time no longer fit a CPU's caches."""
TILE_TOKENS = 64
"""KV positions read at a time."""

KV_HEADS_TOGETHER = 8
"""The most KV heads that a lone query reads in one product."""

_MASKED = -1e30


class _Options(NamedTuple):
    """What a layer's attention is; see `paged_attention_xla`."""

    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None
    sinks: jax.Array | None  # [heads] float32

    def first_visible(self, positions: jax.Array) -> jax.Array:
        """The first KV position that a query at each position sees. It never falls as the position grows."""
        first = jnp.zeros_like(positions)
        if self.window is not None:
            first = jnp.maximum(first, positions - (self.window - 1))
        if self.chunk is not None:
            first = jnp.maximum(first, positions // self.chunk * self.chunk)
        return first


class _QueryBlocks(NamedTuple):
    """Consecutive queries of one row each; n blocks of m queries."""

    q: jax.Array  # [n, m, kv_heads, heads per kv head, head_dim]
    positions: jax.Array  # [n, m] int32, -1 where there is no query
    block_tables: jax.Array  # [n, width] int32


def paged_attention_xla(
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
) -> jax.Array:
    """Attention of a step's ragged batch (`ops.attention.AttentionMetadata`) over one layer's KV.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim];
    block_tables: [rows, width]; query_start: [rows + 1]; query_lens, kv_lens: [rows]; sinks: [heads].
    Returns q's shape and dtype; padding tokens get 0.

    max_query_len: bounds every row's; with 1, token r is the one query of row r, if any.
    window: a query sees this many positions, itself included. chunk: a query sees its own chunk of this many positions
    (chunked local attention, Llama 4). Blocks that no query of a row sees may hold anything. softcap: scores become
    `softcap * tanh(scores / softcap)`, after the scale (Gemma 2). sinks: each head's score of one position more, which
    takes weight and has no value (attention sinks, gpt-oss).
    """
    options = _Options(scale, window, softcap, chunk, sinks)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[3]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if max_query_len == 1:
        # Each token is its row's only query; rows and tokens are in the same order.
        positions = jnp.where(query_lens > 0, kv_lens - 1, -1)
        blocks = _QueryBlocks(grouped[:, None], positions[:, None], block_tables)
        return _attend(blocks, kv_layer, options)[:, 0].reshape(q.shape).astype(q.dtype)

    # Query blocks are numbered row after row; a step of this shape has at most this many, in whole groups.
    most = num_tokens // QUERY_BLOCK + query_lens.shape[0]
    size = min(GROUP, most)
    index = jnp.arange(-(-most // size) * size)
    per_row = (query_lens + QUERY_BLOCK - 1) // QUERY_BLOCK
    ends = jnp.cumsum(per_row)  # [rows], query blocks up to each row's end
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), query_lens.shape[0] - 1)
    offset = (index - ends[row] + per_row[row])[:, None] * QUERY_BLOCK + jnp.arange(QUERY_BLOCK)  # within the row
    live = (offset < query_lens[row][:, None]) & (index < ends[-1])[:, None]
    tokens = jnp.where(live, query_start[row][:, None] + offset, num_tokens)
    positions = jnp.where(live, (kv_lens - query_lens)[row][:, None] + offset, -1)
    # Fused with the reads that they index, these would be computed again for every element read.
    row, tokens, positions = jax.lax.optimization_barrier((row, tokens, positions))

    def run_group(group: jax.Array | int, out: jax.Array) -> jax.Array:
        group_row, group_tokens, group_positions = (
            jax.lax.dynamic_slice_in_dim(array, group * size, size) for array in (row, tokens, positions)
        )
        group_q = grouped.at[group_tokens].get(mode="clip")
        attended = _attend(_QueryBlocks(group_q, group_positions, block_tables[group_row]), kv_layer, options)
        updates = attended.reshape(-1, num_heads, head_dim).astype(q.dtype)
        return out.at[group_tokens.reshape(-1)].set(updates, mode="drop")

    if most <= size:
        return run_group(0, jnp.zeros_like(q))
    return jax.lax.fori_loop(0, (ends[-1] + size - 1) // size, run_group, jnp.zeros_like(q))


def _attend(blocks: _QueryBlocks, kv_layer: jax.Array, options: _Options) -> jax.Array:
    """Attention of every query block over its row's KV, as [n, m, kv_heads, heads per kv head, head_dim] float32.

    A product reads `together` kv heads as one of their joint size, and a query is zero outside its own kv head. With
    one query per block that beats a product for each kv head: their keys and values need not be separated.
    Letters: b a product, h its queries, s kv positions, x the components of the kv heads that it reads.
    """
    n, m, kv_heads, per_kv_head, head_dim = blocks.q.shape
    block_size = kv_layer.shape[2]
    width = blocks.block_tables.shape[1]
    tile_blocks = max(1, min(TILE_TOKENS // block_size, width))
    tile_tokens = tile_blocks * block_size
    tables = jnp.pad(blocks.block_tables, ((0, 0), (0, -width % tile_blocks)))
    together = 1 if m > 1 else max(c for c in range(1, KV_HEADS_TOGETHER + 1) if kv_heads % c == 0)
    products = kv_heads // together  # of a query block
    own = jnp.eye(together, dtype=bool)[:, None, None, :, None]
    q = blocks.q.transpose(0, 2, 3, 1, 4).reshape(-1, together, per_kv_head, m, 1, head_dim)
    q = jnp.where(own, q, 0).reshape(n * products, together * per_kv_head * m, together * head_dim)  # [b, h, x]
    positions = jnp.tile(jnp.repeat(blocks.positions, products, axis=0), (1, together * per_kv_head))
    positions = positions[:, :, None]  # [b, h, 1]
    first_visible = options.first_visible(positions)

    # What some query of a block sees, as [n, 1]; nothing where the block has no query.
    newest = jnp.max(blocks.positions, axis=1, keepdims=True)
    oldest = jnp.min(jnp.where(blocks.positions < 0, jnp.iinfo(jnp.int32).max, blocks.positions), 1, keepdims=True)
    first_seen = options.first_visible(oldest)
    first_tile = jnp.minimum(jnp.min(first_seen), width * block_size) // tile_tokens
    num_tiles = jnp.max(newest) // tile_tokens + 1
    kv_rows = kv_layer.reshape(-1, kv_heads * head_dim)  # per block its keys, then its values

    def read_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, weighted = state
        ids = jax.lax.dynamic_slice_in_dim(tables, tile * tile_blocks, tile_blocks, axis=1)
        key_rows = (ids[:, :, None] * (2 * block_size) + jnp.arange(block_size)).reshape(-1)
        # Fused with the reads that they index, these would be computed again for every element read.
        key_rows = jax.lax.optimization_barrier(key_rows)
        kv_positions = tile * tile_tokens + jnp.arange(tile_tokens)
        visible = (kv_positions >= first_visible) & (kv_positions <= positions)
        # A slot that no query sees may hold NaN (unwritten, or another request's), and 0 * NaN is NaN. Keys might stay
        # as they are, but XLA's CPU backend runs a gather on all cores only when it is fused with something.
        seen = (kv_positions >= first_seen) & (kv_positions <= newest)

        def read(rows: jax.Array) -> jax.Array:
            """[b, s, x]"""
            read = kv_rows.at[rows].get(mode="promise_in_bounds").reshape(n, tile_tokens, -1)
            read = jnp.where(seen[:, :, None], read, 0).reshape(n, tile_tokens, products, -1)
            return read.swapaxes(1, 2).reshape(n * products, tile_tokens, -1)

        k, v = read(key_rows), read(key_rows + block_size)
        scores = jnp.einsum("bhx,bsx->bhs", q, k, preferred_element_type=jnp.float32) * options.scale
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        scores = jnp.where(visible, scores, _MASKED)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        decay = jnp.exp(highest - new_highest)
        weights = jnp.where(visible, jnp.exp(scores - new_highest[..., None]), 0)
        update = jnp.einsum("bhs,bsx->bhx", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_highest, total * decay + weights.sum(-1), weighted * decay[..., None] + update

    start = (jnp.full(q.shape[:2], _MASKED), jnp.zeros(q.shape[:2]), jnp.zeros(q.shape))
    if options.sinks is not None:
        sinks = jnp.repeat(options.sinks.reshape(products, -1), m, axis=1)
        start = (jnp.tile(sinks, (n, 1)), jnp.ones(q.shape[:2]), start[2])
    _, total, weighted = jax.lax.fori_loop(first_tile, num_tiles, read_tile, start)
    out = weighted / jnp.where(total == 0, 1, total)[..., None]
    out = out.reshape(-1, together, per_kv_head, m, together, head_dim)
    out = jnp.where(own, out, 0).sum(-2)
    return out.reshape(n, kv_heads, per_kv_head, m, head_dim).transpose(0, 3, 1, 2, 4)
