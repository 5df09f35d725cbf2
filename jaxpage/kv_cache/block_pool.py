"""Which KV cache blocks are free. Knows nothing of requests or of the device."""

from collections.abc import Iterable

NULL_BLOCK_ID = 0
"""Never allocated: what unused entries of a block table point to."""


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free or held by exactly one owner. Every call is O(blocks it names)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the block that was freed last, which caches may still hold, is taken first.
        self._free_ids = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))
        self._is_free = [False] + [True] * (num_blocks - 1)

    @property
    def num_free(self) -> int:
        return len(self._free_ids)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated: all but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is held, 0 to 1."""
        return 1 - self.num_free / self.num_usable

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks, or None and nothing taken when there are not as many."""
        if count > len(self._free_ids):
            return None
        taken = [self._free_ids.pop() for _ in range(count)]
        for block_id in taken:
            self._is_free[block_id] = False
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Give a table's blocks back; its tail is reused first."""
        for block_id in block_ids:
            assert not self._is_free[block_id], f"block {block_id} is freed twice"
            self._is_free[block_id] = True
            self._free_ids.append(block_id)

    def check_integrity(self, held: Iterable[Iterable[int]]) -> None:
        """Assert that every block is free or in exactly one of the `held` tables."""
        seen = [block_id for table in held for block_id in table]
        assert len(seen) == len(set(seen)), "a block is in two tables"
        assert NULL_BLOCK_ID not in seen, "the null block is held"
        assert len(self._free_ids) == len(set(self._free_ids)), "a block is twice in the free list"
        assert sorted([*seen, *self._free_ids]) == list(range(1, self.num_blocks)), (
            "a block is lost or both free and held"
        )
