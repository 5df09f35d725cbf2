"""Block tables: which blocks hold each request's KV. Grown on demand, found in the prefix cache, forked.

A request has one table per KV group. What the groups differ in is only which positions a query sees
(`KVSpec.first_visible`): blocks before that are freed while the request runs, and need not be found for a prefix hit.
Recurrent states have no table: a prefix hit, or a fork, begins from a checkpoint of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from jaxpage.kv_cache.checkpoints import Checkpoint, Checkpoints
from jaxpage.kv_cache.hashing import BlockKey
from jaxpage.kv_cache.spec import num_blocks_for
from jaxpage.ops.state_spec import KVGroup, KVLayout

BlockCopy = tuple[int, int]
"""(source, target): block ids."""


class NewBlocks(NamedTuple):
    """What was added to one of a request's tables."""

    group: int
    first_index: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A prefix whose KV is in the cache: the tables that a request would begin with."""

    num_tokens: int
    tables: list[list[int]]
    """Per group; the null block where nothing is needed any more."""
    checkpoint: list[int] = field(default_factory=list)
    """Blocks of the recurrent states behind it; none where there are no such states, or no prefix."""
    num_shared: int = 0
    """Tokens that others have begun with, too, whatever there is a checkpoint of."""


@dataclass(slots=True)
class _Held:
    """What a request holds."""

    tables: list[list[int]]
    capacity: int
    """Token positions that every table covers."""
    first_kept: list[int]
    """Per group: index of the first block that was not yet given up."""
    num_published: list[int]
    """Per group: blocks from the table's head that were published or need not be."""
    untold: list[NewBlocks]
    """Blocks that took the place of others, for `grow` to tell."""
    checkpoint: list[int]
    """Blocks of the recurrent states that the request begins from."""
    num_shared: int = 0
    """Tokens that others have begun with, too, as far as it was known when the request began."""
    num_noted: int = 0
    """Of its first tokens, those that are remembered as computed."""
    newest: BlockKey | None = None
    """The checkpoint that was made last behind tokens of its output."""
    for_forks: BlockKey | None = None
    """The checkpoint that its forks begin from."""


class KVCacheManager:
    """The block tables of every running request, over one pool."""

    def __init__(
        self, num_blocks: int, layout: KVLayout, *, max_step_tokens: int, enable_prefix_caching: bool = True
    ) -> None:
        """`max_step_tokens`: most tokens of one request in a step; it bounds what windows hold."""
        self.pool = BlockPool(num_blocks)
        self.layout = layout
        self.block_size = layout.block_size
        self.grain = layout.grain
        """Prefix hits are multiples of it."""
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        """Tokens of admitted requests that were looked for in the prefix cache."""
        self.num_hit_tokens = 0
        """Tokens of these that were found."""
        self._groups = layout.groups
        self._checkpoints = (
            None if layout.checkpoint is None else Checkpoints(self.pool, layout.checkpoint, len(layout.groups))
        )
        self._max_step_tokens = max_step_tokens
        self._held: dict[str, _Held] = {}

    def tables(self, request_id: str) -> list[list[int]]:
        """Block ids of a request per group, in order of position; empty for one that holds nothing."""
        held = self._held.get(request_id)
        return held.tables if held is not None else [[] for _ in self._groups]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of this length ever holds."""
        return num_blocks_for(self.layout, num_tokens, self._max_step_tokens)

    def can_fit(self, num_tokens: int, hit: PrefixHit | None = None) -> bool:
        """Whether a request of `num_tokens`, of which `hit` is found, would fit beside what is held now."""
        needed = self.num_blocks_for(num_tokens)
        for table in hit.tables if hit is not None else ():
            for block_id in table:
                # Found and held by others costs nothing; found and free takes one from the free ones.
                needed -= block_id != NULL_BLOCK_ID and self.pool.ref_counts[block_id] > 0
        return needed <= self.pool.num_free

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> PrefixHit:
        """The longest prefix that all groups can go on from; at least one of `num_tokens` is left to compute."""
        num_hit = num_shared = 0
        checkpoint: list[int] = []
        if self.enable_prefix_caching:
            num_hit = min((num_tokens - 1) // self.grain, len(keys) * self.block_size // self.grain) * self.grain
            num_hit = self._longest_paged_hit(keys, num_hit)
            if self._checkpoints is not None:
                num_shared = self._longest_computed(keys, num_tokens)
                agreed = -1
                while num_hit != agreed:
                    agreed, checkpoint = self._longest_checkpoint(keys, num_hit)
                    num_hit = self._longest_paged_hit(keys, agreed)
        tables = [self._hit_table(index, keys, num_hit) for index in range(len(self._groups))]
        return PrefixHit(num_hit, tables, checkpoint, num_shared)

    def admit(self, request_id: str, hit: PrefixHit) -> None:
        """Begin a request's tables with what was found for it."""
        assert request_id not in self._held
        for table in hit.tables:
            self.pool.share(table)
        first = [self._first_index(group, hit.num_tokens) for group in self._groups]
        published = [hit.num_tokens // group.block_size for group in self._groups]
        tables = [list(table) for table in hit.tables]
        self._held[request_id] = _Held(tables, hit.num_tokens, first, published, [], hit.checkpoint, hit.num_shared)
        if self._checkpoints is not None:
            self._checkpoints.touch(hit.checkpoint)

    def grow(self, request_id: str, num_computed_tokens: int, num_tokens: int) -> Sequence[NewBlocks] | None:
        """Make the request's tables cover `num_tokens` positions; queries come from `num_computed_tokens` on.

        Blocks that no such query sees are given up. Returns what was added or replaced since the last call, or None and
        nothing added when too few blocks are free.
        """
        held = self._held[request_id]
        if num_tokens <= held.capacity and not held.untold:
            return ()
        self._give_up(held, num_computed_tokens)
        missing = [
            -(-num_tokens // group.block_size) - len(table)
            for group, table in zip(self._groups, held.tables, strict=True)
        ]
        taken = self.pool.allocate(sum(missing))
        if taken is None:
            return None
        added, held.untold = held.untold, []
        for index, (table, count) in enumerate(zip(held.tables, missing, strict=True)):
            if count:
                block_ids, taken = taken[:count], taken[count:]
                added.append(NewBlocks(index, len(table), block_ids))
                table.extend(block_ids)
        held.capacity = self._capacity(held.tables)
        return added

    def publish(self, request_id: str, keys: Sequence[BlockKey], num_tokens: int) -> None:
        """Make the blocks that `num_tokens` computed tokens fill findable by others, under the request's `keys`."""
        if not self.enable_prefix_caching:
            return
        held = self._held[request_id]
        for index, (group, table) in enumerate(zip(self._groups, held.tables, strict=True)):
            num_full = num_tokens // group.block_size
            for position in range(held.num_published[index], num_full):
                if table[position] != NULL_BLOCK_ID:
                    self.pool.publish(table[position], index, self._key(group, keys, position))
            held.num_published[index] = max(held.num_published[index], num_full)
        if self._checkpoints is not None:
            for end in range(held.num_noted + self.grain, num_tokens + 1, self.grain):
                self._checkpoints.note(keys[end // self.block_size - 1])
                held.num_noted = end

    def fork(self, source_id: str, target_id: str, num_tokens: int) -> list[BlockCopy] | None:
        """Begin a request with the first `num_tokens` positions of another: full blocks shared, the last one copied.

        Returns the copies to make before the next step, or None when the source no longer holds what is needed, or too
        few blocks are free to go on for a token. Recurrent states begin from the checkpoint of `save_for_forks`.
        """
        source = self._held.get(source_id)
        if source is None or source.capacity < num_tokens or self.pool.num_free < len(self._groups):
            return None
        if any(
            first > self._first_index(group, num_tokens)
            for group, first in zip(self._groups, source.first_kept, strict=True)
        ):
            return None
        checkpoint = None
        if self._checkpoints is not None and num_tokens > 0:
            checkpoint = self._checkpoints.find(source.for_forks) if source.for_forks is not None else None
            if checkpoint is None:
                return None
            self._checkpoints.touch(checkpoint)
        return self._fork(source, target_id, num_tokens, checkpoint or [])

    def reorder(self, request_ids: Sequence[str], sources: Sequence[int], num_tokens: int) -> list[BlockCopy] | None:
        """Let request i go on from the first `num_tokens` positions of `request_ids[sources[i]]`, for all at once.

        The first that goes on from a request takes over its tables, the others fork from it; their next `grow` tells
        the blocks that were copied for them. Requests past the end of `sources` hold nothing afterwards. Returns the
        copies to make before the next step; or None when too few blocks are free, and then none of them holds anything
        any more.
        """
        old = [self._held.pop(request_id, None) for request_id in request_ids]
        for source, held in enumerate(old):
            if held is not None and source not in sources:
                self._free(held)
        forks = []
        for target, source in enumerate(sources):
            held = old[source]
            assert held is not None, "a beam goes on from one that holds nothing"
            if sources.index(source) == target:
                self._held[request_ids[target]] = held
            else:
                forks.append((held, request_ids[target]))
        copies: list[BlockCopy] = []
        for held, target_id in forks:
            copied = self._fork(held, target_id, num_tokens, [])
            if copied is None:
                for request_id in request_ids:
                    self.free(request_id)
                return None
            copies += copied
        return copies

    def free(self, request_id: str) -> None:
        """Give back all blocks of a request, in order of position whatever their group; nothing for an unknown one."""
        held = self._held.pop(request_id, None)
        if held is not None:
            self._free(held)
            if self._checkpoints is not None and held.for_forks is not None:
                self._checkpoints.forget(held.for_forks)

    def checkpoint_of(self, request_id: str) -> list[int]:
        """Blocks of the recurrent states that a request begins from; none for one that begins from nothing."""
        return self._held[request_id].checkpoint

    def num_shared_tokens(self, request_id: str) -> int:
        """Tokens of a request that others have begun with, too, as far as it was known when it began."""
        return self._held[request_id].num_shared

    def save(self, request_id: str, keys: Sequence[BlockKey], num_tokens: int, *, output: bool) -> Checkpoint | None:
        """Make room for a checkpoint of a request's first `num_tokens`, a multiple of `grain`, for others to find.

        output: of those behind tokens of its output, a request keeps the newest only. Returns None when there is one
        already, or too few blocks are free.
        """
        assert self._checkpoints is not None, "there are recurrent states"
        held = self._held[request_id]
        saved = self._checkpoints.make(keys[num_tokens // self.block_size - 1])
        if saved is not None and output:
            if held.newest is not None:
                self._checkpoints.forget(held.newest)
            held.newest = saved.key
        return saved

    def save_for_forks(self, request_id: str) -> Checkpoint | None:
        """Make room for a checkpoint of all of a request's prompt but its last token: only its forks find it."""
        assert self._checkpoints is not None, "there are recurrent states"
        saved = self._checkpoints.make(BlockKey(f"forks of {request_id}".encode(), b""))
        if saved is not None:
            self._held[request_id].for_forks = saved.key
        return saved

    def holds(self, saved: Checkpoint) -> bool:
        """Whether a checkpoint can still be found."""
        return self._checkpoints is not None and self._checkpoints.find(saved.key) == saved.block_ids

    def reset_prefix_cache(self) -> bool:
        """Forget all published blocks. Refused (False) while any block is held."""
        return self.pool.reset_cache()

    def check_integrity(self) -> None:
        """Assert the pool's invariants against the tables; see `BlockPool.check_integrity`."""
        self.pool.check_integrity([(g, table) for held in self._held.values() for g, table in enumerate(held.tables)])

    def _fork(self, source: _Held, target_id: str, num_tokens: int, checkpoint: list[int]) -> list[BlockCopy] | None:
        """Begin a request with the first positions of another; returns the copies, or None without room for them."""
        fresh = self.pool.allocate(sum(num_tokens % group.block_size > 0 for group in self._groups))
        if fresh is None:
            return None
        copies: list[BlockCopy] = []
        tables: list[list[int]] = []
        untold: list[NewBlocks] = []
        for index, (group, table) in enumerate(zip(self._groups, source.tables, strict=True)):
            first, num_full = self._first_index(group, num_tokens), num_tokens // group.block_size
            forked = [NULL_BLOCK_ID] * first + table[first:num_full]
            self.pool.share(forked)
            if num_tokens % group.block_size:
                block_id = fresh.pop()
                copies.append((table[num_full], block_id))
                untold.append(NewBlocks(index, num_full, [block_id]))
                forked.append(block_id)
            tables.append(forked)
        # Whoever filled the full blocks has published them.
        published = [num_tokens // group.block_size for group in self._groups]
        first_kept = [self._first_index(group, num_tokens) for group in self._groups]
        self._held[target_id] = _Held(tables, self._capacity(tables), first_kept, published, untold, checkpoint)
        return copies

    def _capacity(self, tables: Sequence[list[int]]) -> int:
        """Positions that all of a request's tables cover; any number without tables."""
        sizes = (len(table) * group.block_size for group, table in zip(self._groups, tables, strict=True))
        return min(sizes, default=2**31 - 1)

    def _free(self, held: _Held) -> None:
        blocks = [
            (index * group.block_size, block_id)
            for group, table in zip(self._groups, held.tables, strict=True)
            for index, block_id in enumerate(table)
        ]
        self.pool.free(block_id for _, block_id in sorted(blocks, key=itemgetter(0)))

    def _give_up(self, held: _Held, num_computed_tokens: int) -> None:
        """Free the blocks that no query from `num_computed_tokens` on sees."""
        for index, (group, table) in enumerate(zip(self._groups, held.tables, strict=True)):
            if group.spec.span is None:
                continue
            start, end = held.first_kept[index], self._first_index(group, num_computed_tokens)
            if end > start:
                self.pool.free(table[start:end])
                table[start:end] = [NULL_BLOCK_ID] * (end - start)
                held.first_kept[index] = end

    def _longest_hit(self, index: int, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """The most tokens, at most `num_tokens`, that a query right after them finds all of its group's blocks for."""
        group = self._groups[index]
        if group.spec.span is None:
            for position in range(num_tokens // group.block_size):
                if self.pool.find(index, self._key(group, keys, position)) is None:
                    return position * group.block_size // self.grain * self.grain
            return num_tokens
        while num_tokens > 0:
            for position in range(num_tokens // group.block_size - 1, self._first_index(group, num_tokens) - 1, -1):
                if self.pool.find(index, self._key(group, keys, position)) is None:
                    num_tokens = position * group.block_size // self.grain * self.grain
                    break
            else:
                return num_tokens
        return 0

    def _longest_paged_hit(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """The most tokens, at most `num_tokens`, that all groups can go on from."""
        while num_tokens > 0:
            agreed = num_tokens
            for index in range(len(self._groups)):
                agreed = self._longest_hit(index, keys, agreed)
            if agreed == num_tokens:
                break
            num_tokens = agreed
        return num_tokens

    def _longest_computed(self, keys: Sequence[BlockKey], num_tokens: int) -> int:
        """The most tokens, fewer than `num_tokens`, that somebody is known to have computed."""
        assert self._checkpoints is not None
        last = min((num_tokens - 1) // self.grain, len(keys) * self.block_size // self.grain) * self.grain
        for end in range(last, 0, -self.grain):
            if self._checkpoints.was_computed(keys[end // self.block_size - 1]):
                return end
        return 0

    def _longest_checkpoint(self, keys: Sequence[BlockKey], num_tokens: int) -> tuple[int, list[int]]:
        """The most tokens, at most `num_tokens`, that there is a checkpoint behind, and its blocks."""
        assert self._checkpoints is not None
        for end in range(num_tokens, 0, -self.grain):
            checkpoint = self._checkpoints.find(keys[end // self.block_size - 1])
            if checkpoint is not None:
                return end, checkpoint
        return 0, []

    def _hit_table(self, index: int, keys: Sequence[BlockKey], num_tokens: int) -> list[int]:
        group = self._groups[index]
        first = self._first_index(group, num_tokens)
        found = [
            self.pool.find(index, self._key(group, keys, position))
            for position in range(first, num_tokens // group.block_size)
        ]
        return [NULL_BLOCK_ID] * first + [block_id for block_id in found if block_id is not None]

    def _first_index(self, group: KVGroup, num_tokens: int) -> int:
        """Index of the first block that a query right after `num_tokens` sees."""
        return group.spec.first_visible(num_tokens) // group.block_size

    def _key(self, group: KVGroup, keys: Sequence[BlockKey], position: int) -> BlockKey:
        """The key of a group's block: that of its last small block, with the tokens of all."""
        ratio = group.block_size // self.block_size
        if ratio == 1:
            return keys[position]
        parts = keys[position * ratio : (position + 1) * ratio]
        return BlockKey(parts[-1].digest, b"".join(part.tokens for part in parts))
