"""KV cache managers to test, and what requests do with them."""

from collections.abc import Sequence

from jaxpage.kv_cache.hashing import BlockKey, block_keys
from jaxpage.kv_cache.manager import KVCacheManager, PrefixHit
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec, StateSpec

FULL = KVSpec(1, 8)
WINDOW = KVSpec(1, 8, window=6)
CHUNK = KVSpec(1, 8, chunk=6)
HALF = KVSpec(1, 4)
"""Keeps half as much per token: its blocks are twice as large."""


def kv_cache(
    blocks: int, *specs: StateSpec, block_size: int = 4, max_step_tokens: int = 64, caching: bool = True
) -> KVCacheManager:
    """A manager of `blocks` usable blocks, with a group per spec."""
    layout = plan_layout([[spec] for spec in specs or [FULL]], block_size)
    return KVCacheManager(blocks + 1, layout, max_step_tokens=max_step_tokens, enable_prefix_caching=caching)


def keys_of(manager: KVCacheManager, token_ids: Sequence[int]) -> list[BlockKey]:
    return block_keys(token_ids, manager.block_size)


def begin(manager: KVCacheManager, request_id: str, token_ids: Sequence[int] = (1,)) -> PrefixHit:
    """Admit a request of these tokens, at least one, with what is found of them."""
    hit = manager.match(keys_of(manager, token_ids), len(token_ids))
    manager.admit(request_id, hit)
    manager.check_integrity()
    return hit


def grow(manager: KVCacheManager, request_id: str, num_computed: int, num_tokens: int) -> dict[int, list[int]]:
    """What was added per group."""
    added = manager.grow(request_id, num_computed, num_tokens)
    assert added is not None
    manager.check_integrity()
    return {new.group: new.block_ids for new in added}


def compute(manager: KVCacheManager, request_id: str, token_ids: Sequence[int]) -> None:
    """Begin a request and compute all of its tokens at once."""
    hit = begin(manager, request_id, token_ids)
    grow(manager, request_id, hit.num_tokens, len(token_ids))
    manager.publish(request_id, keys_of(manager, token_ids), len(token_ids))
    manager.check_integrity()


def lose(manager: KVCacheManager, block_id: int) -> None:
    """Let a block hold something else: what it is published as can no longer be found."""
    manager.pool._forget(block_id)
