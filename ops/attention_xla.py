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

_MASKED = -1e30


class _Options(NamedTuple):
    """What a layer's attention is; see `paged_attention_xla`."""

    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None

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
) -> jax.Array:
    """See `ops.attention.paged_attention`; `max_query_len` bounds every row's query length.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim];
    block_tables: [rows, width]; query_start: [rows + 1]; query_lens, kv_lens: [rows]. Returns q's shape and dtype.

    window: a query sees this many positions, itself included. chunk: a query sees its own chunk of this many positions
    (chunked local attention, Llama 4). Blocks that no query of a row sees may hold anything. softcap: scores become
    `softcap * tanh(scores / softcap)`, after the scale (Gemma 2).
    """
    options = _Options(scale, window, softcap, chunk)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv_layer.shape[3]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if max_query_len == 1:
        # Each token is its row's only query; rows and tokens are in the same order.
        positions = jnp.where(query_lens > 0, kv_lens - 1, -1)
        blocks = _QueryBlocks(grouped[:, None], positions[:, None], block_tables)
        return _attend(blocks, kv_layer, options)[:, 0].reshape(q.shape).astype(q.dtype)

    # Query blocks are numbered row after row; a step of this shape has at most this many.
    most = num_tokens // QUERY_BLOCK + query_lens.shape[0]
    size = min(GROUP, most)
    per_row = (query_lens + QUERY_BLOCK - 1) // QUERY_BLOCK
    ends = jnp.cumsum(per_row)  # [rows], query blocks up to each row's end

    def run_group(group: jax.Array | int, out: jax.Array) -> jax.Array:
        index = group * size + jnp.arange(size)
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), query_lens.shape[0] - 1)
        offset = (index - ends[row] + per_row[row])[:, None] * QUERY_BLOCK + jnp.arange(QUERY_BLOCK)  # within the row
        live = (offset < query_lens[row][:, None]) & (index < ends[-1])[:, None]
        tokens = jnp.where(live, query_start[row][:, None] + offset, num_tokens)
        positions = jnp.where(live, (kv_lens - query_lens)[row][:, None] + offset, -1)
        blocks = _QueryBlocks(grouped.at[tokens].get(mode="clip"), positions, block_tables[row])
        attended = _attend(blocks, kv_layer, options).reshape(-1, num_heads, head_dim)
        return out.at[tokens.reshape(-1)].set(attended.astype(q.dtype), mode="drop")

    if most <= size:
        return run_group(0, jnp.zeros_like(q))
    return jax.lax.fori_loop(0, (ends[-1] + size - 1) // size, run_group, jnp.zeros_like(q))


def _attend(blocks: _QueryBlocks, kv_layer: jax.Array, options: _Options) -> jax.Array:
    """Attention of every query block over its row's KV, as [n, m, kv_heads, heads per kv head, head_dim] float32."""
    n, m, kv_heads, per_kv_head, head_dim = blocks.q.shape
    block_size = kv_layer.shape[2]
    width = blocks.block_tables.shape[1]
    tile_blocks = max(1, min(TILE_TOKENS // block_size, width))
    tile_tokens = tile_blocks * block_size
    tables = jnp.pad(blocks.block_tables, ((0, 0), (0, -width % tile_blocks)))
    # [n, g, h * m, d]: all queries that read one kv head in one product.
    q = blocks.q.transpose(0, 2, 3, 1, 4).reshape(n, kv_heads, per_kv_head * m, head_dim)
    positions = jnp.tile(blocks.positions, (1, per_kv_head))[:, None, :, None]  # [n, 1, h * m, 1]
    first_visible = options.first_visible(positions)

    # What some query of a block sees, as [n, 1]; nothing where the block has no query.
    newest = jnp.max(blocks.positions, axis=1, keepdims=True)
    oldest = jnp.min(jnp.where(blocks.positions < 0, jnp.iinfo(jnp.int32).max, blocks.positions), 1, keepdims=True)
    first_seen = options.first_visible(oldest)
    first_tile = jnp.minimum(jnp.min(first_seen), width * block_size) // tile_tokens
    num_tiles = jnp.max(newest) // tile_tokens + 1

    def read_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, weighted = state
        ids = jax.lax.dynamic_slice_in_dim(tables, tile * tile_blocks, tile_blocks, axis=1)
        k = kv_layer[ids, 0].reshape(n, tile_tokens, kv_heads, head_dim)
        v = kv_layer[ids, 1].reshape(n, tile_tokens, kv_heads, head_dim)
        kv_positions = tile * tile_tokens + jnp.arange(tile_tokens)
        visible = (kv_positions >= first_visible) & (kv_positions <= positions)
        # A slot that no query sees may hold NaN (unwritten, or another request's), and 0 * NaN is NaN.
        seen = (kv_positions >= first_seen) & (kv_positions <= newest)
        v = jnp.where(seen[:, :, None, None], v, 0)
        scores = jnp.einsum("nghd,nsgd->nghs", q, k, preferred_element_type=jnp.float32) * options.scale
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        scores = jnp.where(visible, scores, _MASKED)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        decay = jnp.exp(highest - new_highest)
        weights = jnp.where(visible, jnp.exp(scores - new_highest[..., None]), 0)
        read = jnp.einsum("nghs,nsgd->nghd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_highest, total * decay + weights.sum(-1), weighted * decay[..., None] + read

    shape = (n, kv_heads, per_kv_head * m)
    start = (jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))
    _, total, weighted = jax.lax.fori_loop(first_tile, num_tiles, read_tile, start)
    out = weighted / jnp.where(total == 0, 1, total)[..., None]
    return out.reshape(n, kv_heads, per_kv_head, m, head_dim).transpose(0, 3, 1, 2, 4)
