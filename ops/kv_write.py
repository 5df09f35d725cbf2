"""Writing new keys and values into the paged KV cache."""

import jax
import jax.numpy as jnp


def write_kv(kv_layer: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> jax.Array:
    """Store each token's key and value in its slot; slots at or past the cache's end (padding) write nowhere.

    kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim];
    slots: [tokens] int32. Returns the cache, updated in place where the caller donated it.
    """
    block_size = kv_layer.shape[2]
    new = jnp.stack([k, v], axis=1).astype(kv_layer.dtype)
    return kv_layer.at[slots // block_size, :, slots % block_size].set(new, mode="drop")
