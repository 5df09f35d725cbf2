"""Ragged paged attention in plain XLA: the reference for the GPU kernel, and what a CPU runs.

The batch is cut into query blocks of at most `QUERY_BLOCK` consecutive queries of one row, handled in groups. A group
walks the KV tile by tile with a running softmax (Dao et al., 2022). Both loops end at run time, with the last live
query block and the longest live row: cost follows what is scheduled, not the padded shape. In a pure decode step each
query is a block, and all make one group.

Every layer holds a copy of this code, and XLA's time to compile a program grows with its instructions: what layers
share is computed once, before them (`cut_queries`), and shapes are spread in one step each, as jax.numpy does not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.ops.running_sum import running_sum

QUERY_BLOCK = 16
"""Queries of a row that are handled together."""
GROUP = 32
"""Query blocks that walk the KV together; more at a time no longer fit a CPU's caches."""
TILE_TOKENS = 64
"""KV positions read at a time."""

KV_HEADS_TOGETHER = 8
"""The most KV heads that a lone query reads in one product."""

_MASKED = -1e30


class QueryBlocks(NamedTuple):
    """A step's queries in blocks of consecutive queries of one row: n blocks of m queries, live ones first."""

    positions: jax.Array  # [n, m] int32, -1 where there is no query
    block_tables: jax.Array  # [n, width] int32, of each block's row
    tokens: jax.Array | None  # [n, m] int32, which token of the step each query is; None where query block t is token t
    num_groups: jax.Array  # int32, groups of `GROUP` blocks that hold a live one


class _Options(NamedTuple):
    """What a layer's attention is; see `paged_attention_xla`."""

    scale: float
    window: int | None
    softcap: float | None
    chunk: int | None
    sinks: jax.Array | None  # [heads] float32

    def first_visible(self, positions: jax.Array) -> jax.Array | None:
        """The first KV position that a query at each position sees; None for 0. It never falls as positions grow."""
        first = None
        if self.window is not None:
            first = positions - (self.window - 1)
        if self.chunk is not None:
            of_chunk = lax.div(positions, self.chunk) * self.chunk
            first = of_chunk if first is None else jnp.maximum(first, of_chunk)
        return first


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
    blocks: QueryBlocks | None = None,
) -> jax.Array:
    """Attention of a step's ragged batch (`paged.StepContext`) over one layer's KV.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim];
    block_tables: [rows, width]; query_start: [rows + 1]; query_lens, kv_lens: [rows]; sinks: [heads].
    Returns q's shape and dtype; padding tokens get 0.

    max_query_len: bounds every row's; with 1, token r is the one query of row r, if any.
    window: a query sees this many positions, itself included. chunk: a query sees its own chunk of this many positions
    (chunked local attention, Llama 4). Blocks that no query of a row sees may hold anything. softcap: scores become
    `softcap * tanh(scores / softcap)`, after the scale (Gemma 2). sinks: each head's score of one position more, which
    takes weight and has no value (attention sinks, gpt-oss). blocks: what `cut_queries` makes of the batch, if known.
    """
    options = _Options(scale, window, softcap, chunk, sinks)
    num_tokens, num_heads, head_dim = q.shape
    if blocks is None:
        blocks = cut_queries(block_tables, query_start, query_lens, kv_lens, num_tokens, max_query_len)
    num_kv_heads = kv_layer.shape[3]
    grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if blocks.tokens is None:
        out = _attend(grouped[:, None], blocks.positions, blocks.block_tables, kv_layer, options)
        return out.reshape(q.shape).astype(q.dtype)

    of_queries = (blocks.tokens, blocks.positions, blocks.block_tables)
    size = min(GROUP, blocks.tokens.shape[0])

    def run_group(group: jax.Array | int, out: jax.Array) -> jax.Array:
        tokens, positions, tables = (
            lax.dynamic_slice_in_dim(array, group * size, size, allow_negative_indices=False) for array in of_queries
        )
        group_q = grouped.at[tokens].get(mode="clip", wrap_negative_indices=False)
        attended = _attend(group_q, positions, tables, kv_layer, options)
        updates = attended.reshape(-1, num_heads, head_dim).astype(q.dtype)
        return out.at[tokens.reshape(-1)].set(updates, mode="drop", wrap_negative_indices=False)

    if blocks.tokens.shape[0] == size:
        return run_group(0, jnp.zeros_like(q))
    return lax.fori_loop(0, blocks.num_groups, run_group, jnp.zeros_like(q))


def cut_queries(
    block_tables: jax.Array,
    query_start: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    num_tokens: int,
    max_query_len: int,
) -> QueryBlocks:
    """Cut a step's ragged batch of `num_tokens` into query blocks; arguments as in `paged_attention_xla`."""
    if max_query_len == 1:
        # Each token is its row's only query; rows and tokens are in the same order.
        positions = jnp.where(query_lens > 0, kv_lens - 1, -1)
        return QueryBlocks(positions[:, None], block_tables, None, jnp.int32(1))

    block = min(QUERY_BLOCK, max_query_len)
    # Query blocks are numbered row after row; a step of this shape has at most this many, in whole groups.
    most = num_tokens // block + query_lens.shape[0]
    size = min(GROUP, most)
    index = jnp.arange(-(-most // size) * size)
    per_row = lax.div(query_lens + (block - 1), block)
    ends = running_sum(per_row)  # [rows], query blocks up to each row's end
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), query_lens.shape[0] - 1)
    offset = (index - ends[row] + per_row[row])[:, None] * block + jnp.arange(block)  # within the row
    live = (offset < query_lens[row][:, None]) & (index < ends[-1])[:, None]
    tokens = jnp.where(live, query_start[row][:, None] + offset, num_tokens)
    positions = jnp.where(live, (kv_lens - query_lens)[row][:, None] + offset, -1)
    blocks = QueryBlocks(positions, block_tables[row], tokens, lax.div(ends[-1] + (size - 1), size))
    # Fused with the reads that they index, these would be computed again for every element read.
    return lax.optimization_barrier(blocks)


def _attend(
    q: jax.Array, positions: jax.Array, block_tables: jax.Array, kv_layer: jax.Array, options: _Options
) -> jax.Array:
    """Attention of query blocks over their rows' KV; positions, block_tables: of `QueryBlocks`.

    q: [n, m, kv_heads, heads per kv head, head_dim]. Returns q's shape, float32.

    A product reads `together` kv heads as one of their joint size, and a query is zero outside its own kv head. With
    one query per block that beats a product for each kv head: their keys and values need not be separated.
    Letters: b a product, h its queries, s kv positions, x the components of the kv heads that it reads.
    """
    n, m, kv_heads, per_kv_head, head_dim = q.shape
    block_size = kv_layer.shape[2]
    width = block_tables.shape[1]
    tile_blocks = max(1, min(TILE_TOKENS // block_size, width))
    tile_tokens = tile_blocks * block_size
    if width % tile_blocks:
        block_tables = jnp.pad(block_tables, ((0, 0), (0, -width % tile_blocks)))
    together = 1 if m > 1 else max(c for c in range(1, KV_HEADS_TOGETHER + 1) if kv_heads % c == 0)
    products = kv_heads // together  # of a query block
    shape = (n * products, together * per_kv_head * m, together * head_dim)  # [b, h, x]
    own = jnp.eye(together, dtype=bool)[:, None, None, :, None]
    q = q.transpose(0, 2, 3, 1, 4)
    if together > 1:
        q = jnp.where(own, q.reshape(-1, together, per_kv_head, m, 1, head_dim), 0)
    q = q.reshape(shape)
    newest = lax.broadcast_in_dim(positions, (n, products, together * per_kv_head, m), (0, 3)).reshape(shape[:2])
    first = options.first_visible(newest)

    # What some query of a block sees, as [n]; nothing where the block has no query.
    newest_seen = jnp.max(positions, axis=1)
    oldest = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
    first_seen = options.first_visible(oldest)
    first_tile: jax.Array | int = 0
    if first_seen is not None:
        first_tile = lax.div(jnp.clip(jnp.min(first_seen), 0, width * block_size), tile_tokens)
    num_tiles = lax.div(jnp.max(newest_seen) + tile_tokens, tile_tokens)
    kv_rows = kv_layer.reshape(-1, kv_heads * head_dim)  # per block its keys, then its values

    def read_tile(tile: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest, total, weighted = state
        ids = lax.dynamic_slice_in_dim(block_tables, tile * tile_blocks, tile_blocks, 1, allow_negative_indices=False)
        per_slot = (n, tile_blocks, block_size)
        key_rows = _spread(ids * (2 * block_size), per_slot) + lax.broadcasted_iota(jnp.int32, per_slot, 2)
        # Fused with the reads that they index, these would be computed again for every element read.
        key_rows = lax.optimization_barrier(key_rows.reshape(-1))
        # A slot that no query sees may hold NaN (unwritten, or another request's), and 0 * NaN is NaN. Keys might stay
        # as they are, but XLA's CPU backend runs a gather on all cores only when it is fused with something.
        visible = _within(first, newest, tile * tile_tokens, tile_tokens)
        seen = _within(first_seen, newest_seen, tile * tile_tokens, tile_tokens)
        seen = _spread(seen, (n, tile_tokens, kv_heads * head_dim))

        def read(rows: jax.Array) -> jax.Array:
            """[b, s, x]"""
            read = kv_rows.at[rows].get(mode="promise_in_bounds", wrap_negative_indices=False).reshape(seen.shape)
            read = lax.select(seen, read, jnp.zeros_like(read)).reshape(n, tile_tokens, products, -1)
            return read.swapaxes(1, 2).reshape(n * products, tile_tokens, -1)

        k, v = read(key_rows), read(key_rows + block_size)
        scores = jnp.einsum("bhx,bsx->bhs", q, k, preferred_element_type=jnp.float32) * options.scale
        if options.softcap is not None:
            scores = options.softcap * jnp.tanh(scores / options.softcap)
        scores = lax.select(visible, scores, jnp.full_like(scores, _MASKED))
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        decay = jnp.exp(highest - new_highest)
        weights = jnp.exp(scores - _spread(new_highest, scores.shape))
        weights = lax.select(visible, weights, jnp.zeros_like(weights))
        update = jnp.einsum("bhs,bsx->bhx", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_highest, total * decay + weights.sum(-1), weighted * _spread(decay, shape) + update

    start = (jnp.full(shape[:2], _MASKED), jnp.zeros(shape[:2]), jnp.zeros(shape))
    if options.sinks is not None:
        sinks = jnp.repeat(options.sinks.reshape(products, -1), m, axis=1)
        start = (jnp.tile(sinks, (n, 1)), jnp.ones(shape[:2]), start[2])
    _, total, weighted = lax.fori_loop(first_tile, num_tiles, read_tile, start)
    out = weighted / _spread(jnp.where(total == 0, 1, total), shape)
    if together > 1:
        out = out.reshape(-1, together, per_kv_head, m, together, head_dim)
        out = jnp.where(own, out, 0).sum(-2)
    return out.reshape(n, kv_heads, per_kv_head, m, head_dim).transpose(0, 3, 1, 2, 4)


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat along new last axes."""
    return lax.broadcast_in_dim(x, shape, range(x.ndim))


def _within(first: jax.Array | None, last: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Which of `length` positions from `start` on lie in `first` to `last`: [..., length] for bounds of [...]."""
    shape = (*last.shape, length)
    offset = lax.broadcasted_iota(jnp.int32, shape, last.ndim)
    within = offset <= _spread(last - start, shape)
    return within if first is None else within & (offset >= _spread(first - start, shape))
