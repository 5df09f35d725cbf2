"""What a layer keeps in the KV cache, and which of it a query sees. No JAX: the host's bookkeeping reads it, too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSpec:
    """One attention layer's demands. Full attention unless `window` or `chunk` says otherwise.

    Kinds that keep something else (recurrent state, cross attention) will differ in `first_visible` alone: what a
    query needs is what must stay, and what a prefix hit must find.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Sliding window: how many positions a query sees, itself included."""
    chunk: int | None = None
    """Chunked local attention: a query sees its own chunk of this many positions, up to itself."""
    num_heads: int | None = None
    """Query heads that attend over it, which GPUs must know before a layer is traced; None: as many as KV heads."""

    @property
    def num_query_heads(self) -> int:
        return self.num_heads or self.num_kv_heads

    def first_visible(self, position: int) -> int:
        """The first position that a query at `position`, or any later one, sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0

    @property
    def span(self) -> int | None:
        """Most positions that one query sees, itself included; None for all."""
        return self.window if self.window is not None else self.chunk

    @property
    def token_elements(self) -> int:
        """Numbers kept per token: a key and a value."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers of one kind that share a block table."""

    spec: KVSpec
    block_size: int
    """Token positions per block; kinds that keep less per token have larger blocks, so that all pages are equal."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where each layer's KV lies: which block table names its blocks, and which array holds them.

    A block id names one page in every array. The i-th layer of each group uses the i-th array, so that one pool of
    block ids serves all groups.
    """

    groups: tuple[KVGroup, ...]
    layers: tuple[tuple[int, int], ...]
    """(group, array) of each layer."""

    @property
    def num_buffers(self) -> int:
        """Arrays in the cache."""
        return 1 + max(buffer for _, buffer in self.layers)

    @property
    def block_size(self) -> int:
        """Token positions of the smallest blocks: the grain of prefix caching."""
        return min(group.block_size for group in self.groups)
