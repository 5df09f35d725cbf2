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

TUNED = Path(__file__).parents[1] / "tuned"
"""Holds a JSON file for each kind of GPU that kernels were tuned on."""
PROGRAMS_PER_SM = 3
"""Programs that split the KV on a multiprocessor at once: as many as fit, with two tiles each in flight."""

_MAX_BLOCK_M = 128
"""Most query heads in a block: two warp groups of Hopper, each with a product's 64 rows of its own."""
MAX_SPLIT_BLOCK_M = 64
"""The same where the KV is split. Short rows fill a few of these: larger blocks would waste more."""
_TILE_BYTES = 16 * 1024
"""Of a tile of keys. With the values, and twice in flight, three programs fit an H200's multiprocessor, two an A100's.
"""


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
    """One program takes a block of queries of one row with the heads of one KV group, and a stretch of the KV."""

    block_q: int
    """Queries in a block; each brings all of its group's heads."""
    block_m: int
    """Query heads in a block, padded to a power of two: rows of the products."""
    tile: int
    """KV positions read at a time."""
    full_tile: int
    """The same where all queries of a block see all of them, a multiple of `tile`; 0 where no difference is made."""
    spare_items: int
    """Stretches of KV that blocks may be split into, beyond one for each; 0 splits none, and needs no reduction."""
    num_warps: int
    num_stages: int
    """One more than the tiles that are on their way or multiplied at a time."""


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
    """The launch for all rows of a step of this shape: the tuned one of shapes like it, else the computed one."""
    launch = (tuned or {}).get(shape.rounded)
    if launch is None:
        return _compute_launch(shape, gpu)
    return dataclasses.replace(launch, block_q=min(launch.block_q, shape.max_query_len))


def choose_launches(
    shape: AttentionShape, gpu: GPU, tuned: Launches | None = None
) -> tuple[AttentionLaunch | None, AttentionLaunch]:
    """The launch for rows of a step with a few queries, None if all are alike, and the one for the others.

    A long prompt fills the GPU without splitting its KV; what decodes beside it would not, and has a launch of its own
    for rows that fit in one of its blocks.
    """
    launch = choose_launch(shape, gpu, tuned)
    if launch.spare_items or shape.max_query_len <= launch.block_q:
        return None, launch
    max_query_len = max(16 // (shape.num_heads // shape.num_kv_heads), 1)
    few = dataclasses.replace(
        shape, num_tokens=min(shape.num_rows * max_query_len, shape.num_tokens), max_query_len=max_query_len
    )
    for_few = choose_launch(few, gpu, tuned)
    return (for_few if for_few.spare_items else None), launch


def _compute_launch(shape: AttentionShape, gpu: GPU) -> AttentionLaunch:
    """Long queries in large blocks, where these fill the GPU; else smaller blocks, whose KV is split until they do."""
    group = shape.num_heads // shape.num_kv_heads
    padded_dim = max(next_power_of_two(shape.head_dim), 16)
    # Tensor cores have no float32: their products would not fit the registers.
    fits = shape.kv_itemsize <= 2 and group <= _MAX_BLOCK_M and (padded_dim <= 128 or gpu.compute_capability >= 90)
    if fits and group * shape.max_query_len > MAX_SPLIT_BLOCK_M:
        block_q = _MAX_BLOCK_M // group
        # Half of the multiprocessors with a block each do as much as all of them with splits and reductions.
        if shape.num_tokens // block_q * shape.num_kv_heads * 4 >= gpu.num_sms:
            block_q = min(block_q, shape.max_query_len)
            return AttentionLaunch(block_q, _MAX_BLOCK_M, *_prefill_tiles(padded_dim, gpu), 0, 8, num_stages=3)

    block_m = max(next_power_of_two(group), 16)  # a product has 16 rows at least
    most = MAX_SPLIT_BLOCK_M if shape.kv_itemsize <= 2 else 16
    while block_m < min(group * shape.max_query_len, most):
        block_m *= 2
    block_q = min(block_m // group, shape.max_query_len)
    # Where keys are converted, or many queries take the registers, a tile is smaller.
    itemsize = max(shape.kv_itemsize, 2)
    tile = max(16, min(64, _TILE_BYTES // (padded_dim * itemsize)))
    if block_m * padded_dim >= 64 * 128 and gpu.compute_capability < 90:
        tile = max(16, tile // 2)

    kv_len = shape.max_kv_len if shape.span is None else min(shape.max_kv_len, shape.span + block_q - 1)
    most_tiles = -(-kv_len // tile)
    num_programs = max(-(-shape.num_tokens // block_q), 1) * shape.num_kv_heads
    spare_items = -(-PROGRAMS_PER_SM * gpu.num_sms // shape.num_kv_heads)
    # Short rows differ by little: as soon as they fill the GPU, a split gains nothing.
    if most_tiles <= 2 or (most_tiles <= 16 and num_programs >= 2 * gpu.num_sms):
        spare_items = 0
    num_warps = 8 if block_m * padded_dim > 64 * 128 else 4
    return AttentionLaunch(block_q, block_m, tile, 0, spare_items, num_warps, num_stages=3)


def _prefill_tiles(padded_dim: int, gpu: GPU) -> tuple[int, int]:
    """`tile` and `full_tile` that keep 128 rows of queries, their scores and their results in registers.

    Read from compiled code: 252 registers at a head_dim of 128 on Hopper, 216 on Ampere, whose products take queries
    and keys from registers as well.
    """
    if gpu.compute_capability >= 90:
        tile = max(16, min(64, 64 * 128 // padded_dim))
        return tile, (2 * tile if padded_dim <= 128 else tile)
    return 32, 64


def next_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
