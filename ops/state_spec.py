"""What a layer keeps of a sequence, and where it lies. No JAX: the host's bookkeeping reads it, too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import ml_dtypes  # noqa: F401 - lets numpy know the names of small floats
import numpy as np


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of one attention layer, in blocks. Full attention unless `window` or `chunk` says otherwise.

    Paged kinds differ in `first_visible` alone: what a query needs is what must stay, and what a prefix hit must find.
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
class RecurrentSpec:
    """What one sequence keeps in one layer, whatever its length: the state behind its newest token."""

    shape: tuple[int, ...]
    dtype: str
    """A name that numpy knows, "bfloat16" included."""
    axes: tuple[str | None, ...]
    """The mesh axis that divides each dimension; None where it is whole on each device."""

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"a recurrent state of shape {self.shape} has {len(self.axes)} axes: name one for each")

    def num_bytes(self, axis_sizes: Mapping[str, int]) -> int:
        """What a sequence takes of each device of a mesh. Raises `ValueError` where an axis does not divide it."""
        parts = 1
        for size, axis in zip(self.shape, self.axes, strict=True):
            devices = 1 if axis is None else axis_sizes[axis]
            if size % devices:
                raise ValueError(
                    f"a recurrent state of shape {self.shape} is not divided by {devices} devices ({axis})"
                )
            parts *= devices
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize // parts


StateSpec = KVSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class KVGroup:
    """States of one paged kind that share a block table."""

    spec: KVSpec
    block_size: int
    """Token positions per block; kinds that keep less per token have larger blocks, so that all pages are equal."""


class PagedPlace(NamedTuple):
    """Where a paged state lies."""

    group: int
    """The KV group whose block table names its blocks."""
    buffer: int
    """The array that holds them."""


class RecurrentPlace(NamedTuple):
    """Where a recurrent state lies."""

    array: int
    """Which of the recurrent arrays holds it, each `[rows, ring, *shape]`."""


StatePlace = PagedPlace | RecurrentPlace


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """How the recurrent states of a sequence are kept at a position, for others to go on from: as bytes, in blocks."""

    num_bytes: int
    """Of all recurrent states of a sequence, on each device."""
    num_blocks: int
    """Blocks that they take."""
    block_bytes: int
    """Bytes that a block has for them on each device, in all arrays together."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where each layer's states lie: which block table names its blocks, and which array holds them.

    A block id names one page in every array of paged KV. The i-th state of each group uses the i-th array, so that one
    pool of block ids serves all groups. Recurrent states have an array each, by row of the batch, and checkpoints of
    them lie in blocks of the same pool. A model without paged KV has an array for checkpoints alone.
    """

    groups: tuple[KVGroup, ...]
    layers: tuple[tuple[StatePlace, ...], ...]
    """Per layer, the places of its states, in the order of its specs."""
    block_size: int
    """Token positions of the smallest blocks."""
    recurrent: tuple[RecurrentSpec, ...] = ()
    """What each recurrent array keeps."""
    checkpoint: CheckpointLayout | None = None
    """None in a model without recurrent states."""

    @property
    def grain(self) -> int:
        """Token positions of the largest blocks: prefix hits are multiples of it."""
        return max((group.block_size for group in self.groups), default=self.block_size)

    @property
    def paged_places(self) -> list[PagedPlace]:
        """Of all paged states, in order of their layers."""
        return [place for layer in self.layers for place in layer if isinstance(place, PagedPlace)]

    @property
    def num_buffers(self) -> int:
        """Arrays of paged KV."""
        return 1 + max((place.buffer for place in self.paged_places), default=-1)
