"""How XLA cuts a program's matrix products into tiles where it cannot time them: by arithmetic over the step's tokens.

XLA times every product's tiles on the device that it compiles for, and where there is none takes the first of its list,
which is the worst. So a program that is compiled elsewhere is told which tiles to take: one choice for all products, as
nearly all of them have the step's tokens as rows. What the numbers rest on is stated beside them, and `jaxpage bench
roofline` says what a model makes of them; none of it has been measured on a card. `scripts/tune_gemms` asks XLA on one,
and what it answers goes first.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxpage.ops.attention.launch import GPU, TUNED, next_power_of_two

_SWAPPED_BELOW = 64
"""With fewer rows XLA swaps the operands, so that weights are the rows of the product (JAX 0.11.2)."""
_BUSY_SHARE = 0.75
"""Of the SMs that have a CTA: a sum that is split keeps more of them busy, and costs another kernel that adds it up."""


@dataclass(frozen=True)
class GemmLaunch:
    """Tiles of a product [tokens, depth] x [depth, weights]."""

    tokens: int
    weights: int
    depth: int
    """Of both operands, in shared memory at a time."""
    num_stages: int
    """Steps along the depth that are in shared memory: all but one are on their way."""
    num_warps: int
    uses_tma: bool
    splits_sums: bool = True
    """Whether XLA may cut a sum into parts, which another kernel adds."""

    def override(self, num_tokens: int) -> str:
        """In XLA's words, for products with so many rows (`AutotuneResult.TritonGemmKey`, as text)."""
        swapped = num_tokens < _SWAPPED_BELOW
        block_m, block_n = (self.weights, self.tokens) if swapped else (self.tokens, self.weights)
        return (
            f"block_m: {block_m} block_n: {block_n} block_k: {self.depth} num_stages: {self.num_stages} "
            f"num_warps: {self.num_warps} num_ctas: 1 is_tma_allowed: {str(self.uses_tma).lower()}"
        )


TunedGemms = Mapping[int, GemmLaunch]
"""By the tokens of a step, rounded up to a power of two."""


@cache
def tuned_gemms(gpu: GPU, folder: Path = TUNED) -> TunedGemms:
    """What XLA found to be fastest on such a GPU (`scripts/tune_gemms`); nothing where it was never asked."""
    file = folder / f"gemms_{gpu.tuned_file}"
    if not file.exists():
        return {}
    rows = json.loads(file.read_text("utf-8"))["launches"]
    return {row["num_tokens"]: GemmLaunch(**row["launch"]) for row in rows}


def choose_gemms(
    num_tokens: int, columns: int, item_bytes: int, gpu: GPU, tuned: TunedGemms | None = None
) -> list[GemmLaunch]:
    """The tiles of products with so many rows, best first: XLA takes the first that it can compile.

    columns: least outputs of a layer's products on one device; item_bytes: of a weight; tuned: goes first. Few tokens:
    the weights' bytes are all that counts, so many small CTAs with several tiles each on their way. Many: each tile's
    operands are read from the L2, so tiles are as large as registers hold. A sum is split where its tiles alone would
    leave SMs idle.
    """
    if item_bytes > 2:
        # Tensor cores have no float32: each product is several of narrower numbers, which take registers.
        side = min(max(next_power_of_two(num_tokens), 16), 64)
        return [GemmLaunch(min(side, size), size, 32, num_stages=3, num_warps=4, uses_tma=False) for size in (64, 32)]
    tma = gpu.compute_capability >= 90  # 80 has none
    if num_tokens <= 16:
        sizes = [(16, 32, 128, 4, 4, False)]
    elif num_tokens <= 32:
        sizes = [(32, 32, 128, 4, 4, False)]
    elif num_tokens <= 64:
        sizes = [(64, 64, 64, 5, 4, tma)]
    elif num_tokens <= 512:
        sizes = [(128, 128, 64, 3, 8, tma), (128, 64, 64, 3, 4, tma)]
    else:
        sizes = [(128, 256, 64, 3, 8, tma), (128, 128, 64, 3, 8, tma)]
    tokens, weights, *_ = sizes[0]
    num_ctas = -(-num_tokens // tokens) * -(-columns // weights)
    splits = num_ctas < _BUSY_SHARE * gpu.num_sms
    launches = [GemmLaunch(*each, splits_sums=splits) for each in sizes]
    plain = [dataclasses.replace(each, uses_tma=False) for each in launches if each.uses_tma]
    # Results of float32 need more shared memory, and some products are not laid out as TMA wants them.
    measured = (tuned or {}).get(next_power_of_two(num_tokens))
    first = [] if measured is None else [dataclasses.replace(measured, splits_sums=splits)]
    last = GemmLaunch(64, 64, 32, 3, 4, False, splits_sums=splits)
    return [*first, *launches[:1], *plain[:1], *launches[1:], *plain[1:], last]
