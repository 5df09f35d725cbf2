"""Host-side bookkeeping of the paged KV cache. No JAX."""
