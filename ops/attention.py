"""Paged attention: what a step tells the kernel, and which implementation runs."""

from dataclasses import dataclass, field

import jax

from jaxpage.ops.attention_xla import paged_attention_xla


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch: the tokens of row r are `query_start[r] : query_start[r] + query_lens[r]`.

    Rows without tokens have a query length of 0. `kv_lens` counts the KV of a row after this step's tokens are written;
    its queries are the last `query_lens[r]` of those positions.
    """

    slots: jax.Array  # [tokens] int32, where each token's KV goes; past the cache's end for padding
    block_tables: jax.Array  # [rows, width] int32
    query_start: jax.Array  # [rows + 1] int32
    query_lens: jax.Array  # [rows] int32
    kv_lens: jax.Array  # [rows] int32
    rope_lengths: jax.Array  # [tokens] int32, the sequence length that RoPE scalings see
    max_query_len: int = field(metadata={"static": True})


def paged_attention(
    q: jax.Array, kv_layer: jax.Array, metadata: AttentionMetadata, *, scale: float, window: int | None = None
) -> jax.Array:
    """Causal attention of each row's queries over its KV, read through the block table.

    q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim]; window: how many
    positions a query sees, itself included (None: all). Returns q's shape and dtype; padding tokens give 0.
    """
    return paged_attention_xla(
        q,
        kv_layer,
        block_tables=metadata.block_tables,
        query_start=metadata.query_start,
        query_lens=metadata.query_lens,
        kv_lens=metadata.kv_lens,
        max_query_len=metadata.max_query_len,
        scale=scale,
        window=window,
    )
