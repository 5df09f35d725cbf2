"""How long a matrix product should take on a card, from its tiles: a model, not a measurement.

CTAs run in waves of as many as fit the SMs' shared memory, registers and threads. A wave takes the longest of

- its bytes from memory, at the speed that its loads in flight allow (Little's law): weights come once, and again only
  where the tiles that share them are further apart than the L2 reaches;
- its tiles' bytes from the L2, which reads both operands for every tile;
- the products of its busiest SM, at the rate of the instruction that its tile allows;

and the first one waits for its first loads.
"""

import dataclasses
import itertools
import math
from functools import cache

from jaxpage.aot.card import Card
from jaxpage.aot.gemms import Gemm
from jaxpage.ops.attention.launch import next_power_of_two

_OTHER_REGISTERS = 48
"""Of a thread, beside its part of the result: addresses, loop, fragments."""
_WGMMA_ROWS = 64
"""Least rows of a tile's first operand for `wgmma`, and it takes four warps."""


def gemm_seconds(gemm: Gemm, card: Card) -> float:
    """From its first load to its last store."""
    per_sm = ctas_per_sm(gemm, card)
    depth = gemm.depth // gemm.splits
    steps = -(-depth // gemm.tile_depth)
    tile_bytes = (gemm.tile_rows + gemm.tile_columns) * depth * gemm.item_bytes
    memory_bytes = dram_bytes(gemm, per_sm, card) / gemm.num_ctas
    in_flight = min(gemm.num_stages - 1, steps) * gemm.stage_bytes if gemm.num_stages > 1 else gemm.stage_bytes / 2
    in_flight *= min(1, memory_bytes / tile_bytes)  # the others come from the L2
    cta_flops = 2 * gemm.tile_rows * gemm.tile_columns * steps * gemm.tile_depth
    seconds, left = card.dram_latency, gemm.num_ctas
    while left > 0:
        running = min(left, per_sm * card.num_sms)
        rate = min(card.dram_bytes_per_second, running * in_flight / card.dram_latency)
        busiest = -(-running // card.num_sms)
        seconds += max(
            running * memory_bytes / rate,
            running * tile_bytes / card.l2_bytes_per_second,
            busiest * cta_flops * card.num_sms / _flops_per_second(gemm, card),
        )
        left -= running
    return seconds


@cache
def best_gemm_seconds(gemm: Gemm, card: Card) -> float:
    """With the tiles that this model likes best, of those that XLA would time on a card."""
    rows = next_power_of_two(max(gemm.rows, 16))
    tiles = itertools.product(
        *([size for size in (16, 32, 64, 128, 256) if size <= rows], (16, 32, 64, 128, 256), (32, 64, 128, 256)),
        *((2, 4, 8), (2, 3, 4, 5)),
    )
    found = (
        dataclasses.replace(gemm, tile_rows=m, tile_columns=n, tile_depth=k, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in tiles
    )
    return min(gemm_seconds(each, card) for each in found if ctas_per_sm(each, card) > 0)


def ctas_per_sm(gemm: Gemm, card: Card) -> int:
    """How many run on an SM at a time. 0 where not even one fits its shared memory."""
    threads = 32 * gemm.num_warps
    registers = min(255, gemm.tile_rows * gemm.tile_columns // threads + _OTHER_REGISTERS)
    shared = gemm.num_stages * gemm.stage_bytes + 1024
    return min(card.shared_bytes // shared, card.register_file // (registers * threads), card.max_threads // threads)


def dram_bytes(gemm: Gemm, per_sm: int, card: Card) -> float:
    """What comes from and goes to memory. Up to eight tiles of rows with the same weights run beside one another."""
    tiles = -(-gemm.rows // gemm.tile_rows)
    sharing = min(tiles, 8)
    # What a wave reads stays in the L2 for its neighbours; others find it gone.
    reads = math.ceil(tiles / sharing) if gemm.weight_bytes > card.l2_bytes else 1
    rows_bytes = gemm.operand_bytes - gemm.weight_bytes
    return reads * gemm.weight_bytes + rows_bytes + gemm.output_bytes


def _flops_per_second(gemm: Gemm, card: Card) -> float:
    """Of the whole card, by the instruction that multiplies this tile.

    `wgmma` reads both operands from shared memory: 64 rows and few columns leave it waiting for them. A tile's larger
    side is taken as its rows, as XLA swaps operands where a step has few tokens.
    """
    larger, smaller = max(gemm.tile_rows, gemm.tile_columns), min(gemm.tile_rows, gemm.tile_columns)
    if larger < _WGMMA_ROWS or gemm.num_warps < 4 or gemm.num_stages < 2:
        return card.slow_flops_per_second
    # 64 x n x 16 takes n / 2 clocks, and loading both operands at 128 bytes a clock (64 + n) / 4.
    multiply, load = smaller / 2, (64 + smaller) * 16 * gemm.item_bytes / 128
    return card.flops_per_second * min(1, multiply / load)
