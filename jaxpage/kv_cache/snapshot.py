"""How the KV cache stands at one moment, as plain data that a page can draw. No JAX."""

from collections.abc import Sequence
from typing import Any

from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.requests.request import Request


def take_snapshot(kv_cache: KVCacheManager, running: Sequence[Request]) -> dict[str, Any]:
    """The pool, the KV groups, and every running request's block tables.

    `cached` blocks are those that a prefix can be found in, held or not. In `requests`, a block table may hold the null
    block (`null_block_id`) where its kind of attention has given up what it no longer sees.
    """
    pool = kv_cache.pool
    groups = [
        {
            "kind": "window" if group.spec.window else "chunk" if group.spec.chunk else "full",
            "span": group.spec.span,
            "block_size": group.block_size,
            "num_layers": sum(index == of_layer for of_layer, _ in kv_cache.layout.paged_places),
        }
        for index, group in enumerate(kv_cache.layout.groups)
    ]
    requests = [
        {
            "request_id": request.request_id,
            "num_tokens": request.num_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.num_cached_tokens or 0,
            "block_tables": [list(table) for table in kv_cache.tables(request.request_id)],
        }
        for request in running
    ]
    return {
        "null_block_id": 0,
        "num_blocks": pool.num_usable,
        "num_used": pool.num_usable - pool.num_free,
        "num_free": pool.num_free,
        "num_cached": pool.num_cached,
        "cached_block_ids": pool.cached_block_ids(),
        "num_queried_tokens": kv_cache.num_queried_tokens,
        "num_hit_tokens": kv_cache.num_hit_tokens,
        "groups": groups,
        "requests": requests,
    }
