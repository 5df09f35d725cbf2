"""Writing new keys and values into the paged KV cache."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxpage.ops.rope import apply_rope


def rotate_and_write_kv(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    rope: tuple[jax.Array, jax.Array] | None,
    kv_layer: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Rotate queries and keys, and store each token's key and value in its slot.

    q: [tokens, heads, head_dim]; rope: cos and sin of `rope_cos_sin`, or None to leave all as it is; the rest as in
    `write_kv`. Returns the rotated queries, and the cache.
    """
    if rope is not None:
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
    return q, write_kv(kv_layer, k, v, slots)


def write_kv(kv_layer: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Store each token's key and value in its slot; slots at or past the cache's end (padding) write nowhere.

    kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim];
    slots: [tokens] int32. Returns the cache, updated in place where the caller donated it.
    """
    block_size = kv_layer.shape[2]
    new = jnp.stack([k, v], axis=1).astype(kv_layer.dtype)
    block, offset = lax.div(slots, block_size), lax.rem(slots, block_size)
    return kv_layer.at[block, :, offset].set(new, mode="drop", wrap_negative_indices=False)


def copy_blocks(
    buffers: list[jax.Array], source: jax.Array, target: jax.Array, num_copies: jax.Array, *, branch_free: bool
) -> list[jax.Array]:
    """Copy the blocks `source[:num_copies]` to `target[:num_copies]`.

    No block is a target twice, or a source after it was a target. buffers: one [num_blocks, ...] per layer. source,
    target: [n] int32; what follows the copies lies past the cache's end. One after another, it costs what is copied.
    `branch_free`, it costs n blocks of scratch memory and has no loop of unknown length, at each turn of which the
    host of a GPU would wait for the device.
    """
    if not len(source):  # a model without paged KV never copies any
        return buffers
    if not branch_free:

        def copy_block(index: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
            return [buffer.at[target[index]].set(buffer[source[index]]) for buffer in buffers]

        return lax.fori_loop(0, num_copies, copy_block, buffers)
    # Read in full before anything is written, or XLA would copy a cache that it reads and writes in one kernel.
    blocks = [lax.optimization_barrier(buffer.at[source].get(mode="clip")) for buffer in buffers]
    return [buffer.at[target].set(block, mode="drop") for buffer, block in zip(buffers, blocks, strict=True)]
