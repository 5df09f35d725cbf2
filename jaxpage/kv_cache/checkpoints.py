"""Checkpoints: the recurrent states of a sequence at a position, kept in blocks of the pool for others to go on from.

A checkpoint is complete or of no use. Nobody refers to its blocks: they are free ones that hold something findable, and
are evicted like all others. A step writes and reads checkpoints before anything else is written into its blocks, so
that what is evicted while the step is put together can still be read. No JAX.
"""

from dataclasses import dataclass

from jaxpage.kv_cache.block_pool import BlockPool
from jaxpage.kv_cache.hashing import BlockKey
from jaxpage.ops.state_spec import CheckpointLayout

_MAX_NAMES = 2**16
"""Prefixes that are remembered; of a million tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Recurrent states, and the name of the tokens that they are behind."""

    key: BlockKey
    block_ids: list[int]


class Checkpoints:
    """All checkpoints of an engine, by the name of the tokens before them."""

    def __init__(self, pool: BlockPool, layout: CheckpointLayout, first_group: int) -> None:
        """The i-th block of a checkpoint is found in group `first_group + i` of the pool."""
        self._pool = pool
        self._groups = range(first_group, first_group + layout.num_blocks)
        self._computed: dict[bytes, None] = {}
        """Digests of prefixes that were computed, the newest last, whether there is a checkpoint of them or not."""

    def find(self, key: BlockKey) -> list[int] | None:
        """The blocks of a complete checkpoint."""
        block_ids = []
        for group in self._groups:
            block_id = self._pool.find(group, key)
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def make(self, key: BlockKey) -> Checkpoint | None:
        """A checkpoint to be written, findable from now on; None if there is one, or too few blocks are free."""
        if self.find(key) is not None:
            return None
        self.forget(key)
        block_ids = self._pool.allocate(len(self._groups))
        if block_ids is None:
            return None
        for group, block_id in zip(self._groups, block_ids, strict=True):
            self._pool.publish(block_id, group, key)
        self._pool.free(block_ids)
        return Checkpoint(key, block_ids)

    def note(self, key: BlockKey) -> None:
        """Remember that a prefix was computed. Who comes with the same one may leave a checkpoint where they part."""
        self._computed.pop(key.digest, None)
        self._computed[key.digest] = None
        if len(self._computed) > _MAX_NAMES:
            del self._computed[next(iter(self._computed))]

    def was_computed(self, key: BlockKey) -> bool:
        """Whether a prefix is remembered."""
        return key.digest in self._computed

    def touch(self, block_ids: list[int]) -> None:
        """Let a checkpoint be evicted after all others: it has been of use."""
        self._pool.share(block_ids)
        self._pool.free(block_ids)

    def forget(self, key: BlockKey) -> None:
        """Drop a checkpoint, or what is left of it, if there is any."""
        for group in self._groups:
            block_id = self._pool.find(group, key)
            if block_id is not None:
                self._pool.discard(block_id)
