"""How a Triton kernel is cut into programs for a GPU: by what was measured on such a one, else by arithmetic over a
step's shape.

What the arithmetic rests on is stated beside it; none of it has been measured on a card. `scripts/tune_kernels` does,
and writes what is faster to a file of `TUNED`.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TUNED = Path(__file__).parent / "tuned"
"""Holds a JSON file for each kind of GPU that kernels were tuned on."""
MAX_SEGMENTS = 32
"""Most parts that one row's KV is split into: their partial results are written and read once more."""

_MIN_SEGMENT_TILES = 4
"""A segment of fewer tiles would cost more to reduce than it saves."""
_MAX_BLOCK_M = 64
"""Most query heads in a block. Decode rows of a mixed step fill a few of these rows: larger ones would waste more."""
_TILE_BYTES = 16 * 1024
"""Of a tile of keys. With the values, twice and three times in flight, it fits the shared memory of an A100."""


@dataclass(frozen=True)
class GPU:
    """What a launch depends on, and what the kernel is compiled for."""

    num_sms: int
    compute_capability: int
    """Major and minor version in one number: 80 for an A100, 90 for an H100 or H200."""

    @property
    def tuned_file(self) -> str:
        """The name of its file in `TUNED`."""
        return f"sm_{self.compute_capability}_{self.num_sms}.json"


@dataclass(frozen=True)
class AttentionShape:
    """What a step's padded shape says about one layer's attention on one device."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_itemsize: int
    """Bytes of a number in the KV cache."""
    max_kv_len: int
    """Most positions that a row may hold."""
    span: int | None = None
    """Most positions that one query sees, itself included (window or chunk); None for all."""

    @property
    def rounded(self) -> "AttentionShape":
        """What stands for it in a file of tuned launches: sizes of a step are rounded up to powers of two."""
        names = ("num_tokens", "num_rows", "max_query_len", "max_kv_len", *(["span"] if self.span else []))
        return dataclasses.replace(self, **{name: next_power_of_two(getattr(self, name)) for name in names})


@dataclass(frozen=True)
class AttentionLaunch:
    """One program takes a block of queries of one row with the heads of one KV group, and a segment of the KV."""

    block_q: int
    """Queries in a block; each brings all of its group's heads."""
    block_m: int
    """Query heads in a block, padded to a power of two: rows of the products."""
    tile: int
    """KV positions read at a time."""
    num_segments: int
    """Parts that the KV of a block is split into; 1 needs no reduction."""
    num_warps: int
    num_stages: int


Launches = Mapping[AttentionShape, AttentionLaunch]


@cache
def tuned_launches(gpu: GPU, folder: Path = TUNED) -> Launches:
    """What was measured to be fastest on such a GPU, by rounded shapes; nothing where none was ever tuned."""
    file = folder / gpu.tuned_file
    if not file.exists():
        return {}
    rows = json.loads(file.read_text("utf-8"))["launches"]
    return {AttentionShape(**row["shape"]): AttentionLaunch(**row["launch"]) for row in rows}


def choose_launch(shape: AttentionShape, gpu: GPU, tuned: Launches | None = None) -> AttentionLaunch:
    """The launch for a step of this shape: the tuned one of shapes like it, else the computed one."""
    launch = (tuned or {}).get(shape.rounded)
    if launch is None:
        return _compute_launch(shape, gpu)
    return dataclasses.replace(launch, block_q=min(launch.block_q, shape.max_query_len))


def _compute_launch(shape: AttentionShape, gpu: GPU) -> AttentionLaunch:
    """Enough programs to fill the GPU, as far as there is KV to split."""
    group = shape.num_heads // shape.num_kv_heads
    block_m = max(next_power_of_two(group), 16)  # a product has 16 rows at least
    # Tensor cores have no float32: their products would not fit the registers.
    most = _MAX_BLOCK_M if shape.kv_itemsize <= 2 else 16
    while block_m < min(group * shape.max_query_len, most):
        block_m *= 2
    block_q = min(block_m // group, shape.max_query_len)
    padded_dim = next_power_of_two(shape.head_dim)
    tile = max(16, min(64, _TILE_BYTES // (padded_dim * shape.kv_itemsize)))

    # At least so many programs have work in a full step; rows shorter than a block only add to them.
    num_programs = max(-(-shape.num_tokens // block_q), 1) * shape.num_kv_heads
    kv_len = shape.max_kv_len if shape.span is None else min(shape.max_kv_len, shape.span + block_q - 1)
    most_segments = min(MAX_SEGMENTS, kv_len // (tile * _MIN_SEGMENT_TILES))
    num_segments = 1
    while num_segments * 2 <= most_segments and num_programs * num_segments < gpu.num_sms:
        num_segments *= 2
    # The accumulator, in registers: 64 x 128 of a block take half of what four warps have.
    num_warps = 8 if block_m * padded_dim >= 64 * 128 else 4
    return AttentionLaunch(block_q, block_m, tile, num_segments, num_warps, num_stages=3)


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
