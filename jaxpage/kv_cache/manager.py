"""Block tables: which blocks hold each request's KV, grown on demand."""

from jaxpage.kv_cache.block_pool import BlockPool


class KVCacheManager:
    """The block table of every running request."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, list[int]] = {}

    @property
    def max_request_tokens(self) -> int:
        """Token positions that a single request can ever have."""
        return self.pool.num_usable * self.block_size

    def can_fit(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` would fit beside what is held now."""
        return self._num_blocks_for(num_tokens) <= self.pool.num_free

    def table(self, request_id: str) -> list[int]:
        """Block ids of a request in order of position; empty for an unknown one."""
        return self._tables.get(request_id, [])

    def grow(self, request_id: str, num_tokens: int) -> list[int] | None:
        """Make the request's table cover `num_tokens` positions.

        Returns the block ids that were added, or None and nothing changed when too few blocks are free.
        """
        table = self._tables.get(request_id)
        missing = self._num_blocks_for(num_tokens) - (len(table) if table else 0)
        if missing <= 0:
            return []
        added = self.pool.allocate(missing)
        if added is not None:
            self._tables.setdefault(request_id, []).extend(added)
        return added

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request; nothing happens for an unknown one."""
        self.pool.free(self._tables.pop(request_id, ()))

    def check_integrity(self) -> None:
        """Assert the pool's invariants against the tables; see `BlockPool.check_integrity`."""
        self.pool.check_integrity(self._tables.values())

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
