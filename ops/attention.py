"""Paged attention: the cache, what a step tells the kernel, and which implementation runs."""

from dataclasses import dataclass, field

import jax

from jaxpage.ops.attention_xla import paged_attention_xla
from jaxpage.ops.kv_spec import KVGroup, KVLayout
from jaxpage.ops.kv_write import write_kv


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The KV cache on its devices."""

    buffers: list[jax.Array]  # each [num_blocks, 2, block_size, num_kv_heads, head_dim] of its first layer
    layout: KVLayout = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.buffers[0].shape[0]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch: the tokens of row r are `query_start[r] : query_start[r] + query_lens[r]`.

    Rows without tokens have a query length of 0. `kv_lens` counts the KV of a row after this step's tokens are written;
    its queries are the last `query_lens[r]` of those positions.
    """

    slots: list[jax.Array]  # per KV group [tokens] int32, where each token's KV goes; past the cache's end for padding
    block_tables: jax.Array  # [groups, rows, width] int32
    query_start: jax.Array  # [rows + 1] int32
    query_lens: jax.Array  # [rows] int32
    kv_lens: jax.Array  # [rows] int32
    rope_lengths: jax.Array  # [tokens] int32, the sequence length that RoPE scalings see
    max_query_len: int = field(metadata={"static": True})

    def of_group(self, index: int, layout: KVLayout) -> "LayerMetadata":
        """The batch as the layers of KV group `index` see it."""
        return LayerMetadata(
            slots=self.slots[index],
            block_tables=self.block_tables[index],
            query_start=self.query_start,
            query_lens=self.query_lens,
            kv_lens=self.kv_lens,
            max_query_len=self.max_query_len,
            group=layout.groups[index],
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerMetadata:
    """One step's ragged batch for the layers of one KV group; fields as in `AttentionMetadata`."""

    slots: jax.Array  # [tokens] int32
    block_tables: jax.Array  # [rows, width] int32
    query_start: jax.Array  # [rows + 1] int32
    query_lens: jax.Array  # [rows] int32
    kv_lens: jax.Array  # [rows] int32
    max_query_len: int = field(metadata={"static": True})
    group: KVGroup = field(metadata={"static": True})


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    buffer: jax.Array,
    metadata: LayerMetadata,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write a layer's new keys and values, then attend over all that its kind (`KVSpec`) lets each query see.

    q: [tokens, heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim]; buffer: the layer's array of the `KVCache`.
    All of a step's KV is written first: a row may read blocks that another row fills in the same step. Returns q's
    shape and dtype (0 for padding), and the buffer.
    """
    spec = metadata.group.spec
    # Layers that keep less per token see the same page as a larger block.
    kv_layer = buffer.reshape(buffer.shape[0], 2, metadata.group.block_size, spec.num_kv_heads, spec.head_dim)
    kv_layer = write_kv(kv_layer, k, v, metadata.slots)
    out = paged_attention_xla(
        q,
        kv_layer,
        block_tables=metadata.block_tables,
        query_start=metadata.query_start,
        query_lens=metadata.query_lens,
        kv_lens=metadata.kv_lens,
        max_query_len=metadata.max_query_len,
        scale=scale,
        window=spec.window,
        chunk=spec.chunk,
        softcap=softcap,
    )
    return out, kv_layer.reshape(buffer.shape)
