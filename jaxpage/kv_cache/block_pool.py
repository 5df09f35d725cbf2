"""Blocks of the KV cache: who uses them, and what the freed ones still hold. Knows nothing of requests or devices."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxpage.kv_cache.hashing import BlockKey

NULL_BLOCK_ID = 0
"""Never allocated: what unused entries of a block table point to."""


class CacheEntry(NamedTuple):
    """What makes a block worth finding: whose KV it holds."""

    group: int
    key: BlockKey


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free or referenced by tables. Every call is O(blocks it names).

    A free block may still hold the KV of a published key, until it is allocated for something else. The free list is
    the order of eviction: blocks that hold nothing worth finding first, then the least recently freed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_cached = 0
        """Blocks that a prefix can be found in, free or not."""
        self.ref_counts = [0] * num_blocks
        self._entries: list[CacheEntry | None] = [None] * num_blocks
        self._block_ids: dict[tuple[int, bytes], int] = {}
        # The free list is doubly linked through these, with the null block as its two ends.
        self._next = [*range(1, num_blocks), NULL_BLOCK_ID]
        self._previous = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated: all but the null block."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is referenced, 0 to 1."""
        return 1 - self.num_free / self.num_usable

    def free_list(self) -> list[int]:
        """Free blocks in the order in which they would be taken. O(free blocks)."""
        order = []
        block_id = self._next[NULL_BLOCK_ID]
        while block_id != NULL_BLOCK_ID:
            order.append(block_id)
            block_id = self._next[block_id]
        return order

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` free blocks with a reference each, or None and nothing taken when there are not as many.

        What a block held can no longer be found.
        """
        if count > self.num_free:
            return None
        taken = []
        block_id = NULL_BLOCK_ID
        for _ in range(count):
            block_id = self._next[block_id]
            taken.append(block_id)
            self.ref_counts[block_id] = 1
            if self._entries[block_id] is not None:
                self._forget(block_id)
        if taken:
            after = self._next[block_id]
            self._next[NULL_BLOCK_ID] = after
            self._previous[after] = NULL_BLOCK_ID
            self.num_free -= count
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, free or not; the null block needs none."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK_ID:
                continue
            if self.ref_counts[block_id] == 0:
                before, after = self._previous[block_id], self._next[block_id]
                self._next[before] = after
                self._previous[after] = before
                self.num_free -= 1
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block of a table, given in order of position; the null block has none.

        Blocks that nobody refers to any more become free, the tail before the head: what hangs on a longer prefix is
        evicted first. Those that hold nothing findable are taken before all others.
        """
        last_in_front = NULL_BLOCK_ID
        for block_id in reversed(list(block_ids)):
            if block_id == NULL_BLOCK_ID:
                continue
            assert self.ref_counts[block_id] > 0, f"block {block_id} is freed twice"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] > 0:
                continue
            if self._entries[block_id] is None:
                before, last_in_front = last_in_front, block_id
            else:
                before = self._previous[NULL_BLOCK_ID]
            after = self._next[before]
            self._next[before] = self._previous[after] = block_id
            self._previous[block_id], self._next[block_id] = before, after
            self.num_free += 1

    def publish(self, block_id: int, group: int, key: BlockKey) -> None:
        """Make a referenced block findable by `key`. Nothing happens when another block holds the same already."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} is published and held by nobody"
        if self._entries[block_id] is None and self._block_ids.setdefault((group, key.digest), block_id) == block_id:
            self._entries[block_id] = CacheEntry(group, key)
            self.num_cached += 1

    def discard(self, block_id: int) -> None:
        """Forget what a free block holds; it will be taken before all others."""
        assert self.ref_counts[block_id] == 0, f"block {block_id} is discarded and held"
        self._forget(block_id)
        self.share([block_id])
        self.free([block_id])

    def find(self, group: int, key: BlockKey) -> int | None:
        """The block that holds exactly this; a digest alone is no proof, its tokens must agree, too."""
        block_id = self._block_ids.get((group, key.digest))
        if block_id is None:
            return None
        entry = self._entries[block_id]
        return block_id if entry is not None and entry.key.tokens == key.tokens else None

    def reset_cache(self) -> bool:
        """Forget everything that could be found. Refused (False) while any block is referenced."""
        if self.num_free != self.num_usable:
            return False
        for entry_key in list(self._block_ids):
            self._forget(self._block_ids[entry_key])
        return True

    def cached_block_ids(self) -> list[int]:
        """The blocks that a prefix can be found in, in the order of publication. O(such blocks)."""
        return list(self._block_ids.values())

    def check_integrity(self, held: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Assert the pool's invariants against every table as (group, block ids).

        A block is free or referenced, never both, as often as tables hold it; what can be found is what was published.
        """
        counts = [0] * self.num_blocks
        for group, table in held:
            for block_id in table:
                counts[block_id] += block_id != NULL_BLOCK_ID
                entry = self._entries[block_id]
                assert entry is None or entry.group == group, "a block is held by one group and found by another"
        assert counts == self.ref_counts, "reference counts differ from what the tables hold"
        free = self.free_list()
        assert len(free) == len(set(free)) == self.num_free, "the free list is broken"
        assert sorted(free) == [i for i in range(1, self.num_blocks) if counts[i] == 0], (
            "a block is lost, or free and held"
        )
        back = [self._previous[NULL_BLOCK_ID]] if free else []
        while back and self._previous[back[-1]] != NULL_BLOCK_ID:
            back.append(self._previous[back[-1]])
        assert back[::-1] == free, "the free list differs backwards"
        published = {(entry.group, entry.key.digest): i for i, entry in enumerate(self._entries) if entry is not None}
        assert self._block_ids == published, "what can be found differs from what blocks hold"
        assert self.num_cached == len(published)

    def _forget(self, block_id: int) -> None:
        entry = self._entries[block_id]
        assert entry is not None
        del self._block_ids[entry.group, entry.key.digest]
        self._entries[block_id] = None
        self.num_cached -= 1
