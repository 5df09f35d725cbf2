"""What each program of the attention kernel does in a step: worked out once on the device, for all layers of a kind.

The grid of a kernel is fixed when it is compiled. Which row, queries and stretch of the KV a program takes is an item
of a list that plain XLA makes from the lengths of the step, so that the KV of the rows that there are is split until it
fills the GPU, however many rows the program has room for.

All rows of a step are split at the same power of two of tiles, the smallest that needs no more items than there are.
Rows that need none but their own stay whole, and a long one among short ones is split as if it were alone. The sums of
a row are therefore cut at other places in other company, which changes them by less than their rounding to bfloat16;
splits that depend on the row alone would need items for as many long rows as there are places.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpage.ops.attention.launch import GPU, AttentionLaunch, AttentionShape, Launches, choose_launches
from jaxpage.ops.running_sum import running_sum

ITEM_FIELDS = 8
"""Numbers of an item: row; first token, number of tokens (0: there is no such item) and of these, how many are queries;
position of the first; first tile and the one past the last; whether the first tile is the first that the block sees."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """What the programs of one launch of the kernel do."""

    items: jax.Array  # [items, ITEM_FIELDS] int32
    parts: jax.Array | None
    """[slots, 4] int32, where the KV is split: token (-1 for none), its first item, how many, its place in a block."""
    launch: AttentionLaunch = field(metadata={"static": True})


def list_work(
    query_start: jax.Array,
    query_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    shape: AttentionShape,
    gpu: GPU,
    window: int | None,
    chunk: int | None,
    tuned: Launches | None = None,
    launches: tuple[AttentionLaunch | None, AttentionLaunch] | None = None,
) -> tuple[WorkList, ...]:
    """The work of a step: one list, or one for rows of a few queries and behind it one for the others and for padding.

    query_start: [rows + 1]; query_lens, kv_lens: [rows]; all int32. shape: what they are padded to. launches: by
    default `choose_launches` decides.
    """
    few, other = launches or choose_launches(shape, gpu, tuned)
    if shape.max_query_len == 1:  # rows and tokens are in the same order
        query_start = jnp.arange(shape.num_rows + 1, dtype=jnp.int32)
    rows = _Rows(query_start, query_lens, kv_lens, shape, window, chunk)
    room = query_start[1:] - query_start[:-1]
    if few is None:
        return (rows.list_for(other, jnp.ones(shape.num_rows, bool), shape.max_query_len),)
    has_few = room <= few.block_q
    return (
        rows.list_for(few, has_few, few.block_q),
        rows.list_for(other, ~has_few, shape.max_query_len),
    )


@dataclass(frozen=True)
class _Rows:
    """The rows of a step, which `list_work` describes."""

    query_start: jax.Array
    query_lens: jax.Array
    kv_lens: jax.Array
    shape: AttentionShape
    window: int | None
    chunk: int | None

    def list_for(self, launch: AttentionLaunch, chosen: jax.Array, max_query_len: int) -> WorkList:
        """The work of the `chosen` rows, [rows] bool, none of which has more queries than `max_query_len`."""
        shape, block_q = self.shape, launch.block_q
        # Behind the rows is one more, which sees nothing: where no reduction does, its program writes zeros.
        pads = launch.spare_items == 0 and shape.max_query_len > 1
        start = self.query_start if pads else self.query_start[:-1]
        end = jnp.append(self.query_start[1:], shape.num_tokens) if pads else self.query_start[1:]
        query_lens, kv_lens, chosen = (
            jnp.append(of, fill) if pads else of
            for of, fill in ((self.query_lens, 0), (self.kv_lens, 0), (chosen, True))
        )
        room = jnp.where(chosen, end - start, 0)
        num_blocks = -(-room // block_q)
        if max_query_len <= block_q and not pads:
            max_blocks = shape.num_rows
        else:
            max_blocks = shape.num_tokens // block_q + shape.num_rows + 1
        max_items = max_blocks + launch.spare_items

        first = self._first_seen(kv_lens - query_lens) // launch.tile
        num_tiles = jnp.where(query_lens > 0, -(-kv_lens // launch.tile) - first, 0)
        num_parts = jnp.ones_like(num_tiles)
        if launch.spare_items:
            num_parts = _split(num_blocks, num_tiles, max_items, -(-shape.max_kv_len // launch.tile))
        num_items = num_blocks * num_parts
        item_end = running_sum(num_items)

        item = jnp.arange(max_items, dtype=jnp.int32)
        row = jnp.searchsorted(item_end, item, side="right", method="compare_all")
        is_live = row < len(start)
        row = jnp.minimum(row, len(start) - 1)
        within = item - (item_end - num_items)[row]
        parts = jnp.maximum(num_parts[row], 1)
        block = within // parts
        if not launch.spare_items:  # those that see most begin first, so that none of them is left to the end
            block = num_blocks[row] - 1 - block
        first_query = block * block_q
        part = within % parts
        tokens = jnp.where(is_live, jnp.clip(room[row] - first_query, 0, block_q), 0)
        queries = jnp.clip(query_lens[row] - first_query, 0, block_q)
        position = kv_lens[row] - query_lens[row] + first_query
        first_tile = self._first_seen(position) // launch.tile
        end_tile = jnp.where(queries > 0, -(-(position + queries) // launch.tile), first_tile)
        per_part = -(-(end_tile - first_tile) // parts)
        from_tile = first_tile + part * per_part
        to_tile = jnp.clip(from_tile + per_part, from_tile, jnp.maximum(end_tile, from_tile))
        is_first = (part == 0) & (to_tile > from_tile)
        fields = (row, start[row] + first_query, tokens, queries, position, from_tile, to_tile, is_first)
        items = jnp.stack([of.astype(jnp.int32) for of in fields], axis=1)
        if not launch.spare_items:
            return WorkList(items, None, launch)
        first_item = item_end - num_items
        return WorkList(items, self._parts(launch, chosen, max_query_len, first_item, num_parts), launch)

    def _parts(
        self, launch: AttentionLaunch, chosen: jax.Array, max_query_len: int, first_item: jax.Array, num: jax.Array
    ) -> jax.Array:
        """Which items each token is to be put together from; see `WorkList`."""
        shape, block_q, start = self.shape, launch.block_q, self.query_start
        if max_query_len < shape.max_query_len:  # some rows: room for all that they may have
            slot = jnp.arange(shape.num_rows * block_q, dtype=jnp.int32)
            row, query = slot // block_q, slot % block_q
            token = start[row] + query
            is_token = chosen[row] & (query < start[row + 1] - start[row])
        else:  # all tokens, those of padding as well
            token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
            row = token
            if shape.max_query_len > 1:
                row = jnp.searchsorted(start[1:], token, side="right", method="compare_all").astype(jnp.int32)
                row = jnp.minimum(row, shape.num_rows - 1)
            query = token - start[row]
            is_token = jnp.ones(shape.num_tokens, bool)
        is_query = is_token & (query < self.query_lens[row])
        fields = (
            jnp.where(is_token, token, -1),
            first_item[row] + query // block_q * num[row],
            jnp.where(is_query, num[row], 0),
            query % block_q,
        )
        return jnp.stack([of.astype(jnp.int32) for of in fields], axis=1)

    def _first_seen(self, position: jax.Array) -> jax.Array:
        """The first position that a query sees. position: [...] int32."""
        first = jnp.zeros_like(position)
        if self.window is not None:
            first = jnp.maximum(first, position - (self.window - 1))
        if self.chunk is not None:
            first = jnp.maximum(first, position // self.chunk * self.chunk)
        return first


def _split(num_blocks: jax.Array, num_tiles: jax.Array, max_items: int, most_tiles: int) -> jax.Array:
    """Into how many parts the tiles of each row's blocks are split, so that all rows need `max_items` at most.

    num_blocks, num_tiles: [rows]. Returns [rows] int32, 0 where a row has no tiles.
    """
    sizes = 1 << jnp.arange(most_tiles.bit_length() + 1, dtype=jnp.int32)  # [sizes], tiles of a part
    num_parts = -(-num_tiles // sizes[:, None])  # [sizes, rows]
    fits = jnp.sum(num_blocks * num_parts, axis=1) <= max_items
    return num_parts[jnp.argmax(fits)]
