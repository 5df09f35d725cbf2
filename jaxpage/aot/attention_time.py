"""How long one layer's attention should take on a card, from its launch: a model, not a measurement.

What goes in is what `ops.launch` chooses and `ops.attention_work` makes of a step: which programs there are, and how
many tiles of KV each walks. Registers and shared memory are those of the compiled kernels (tests/kernel/gpu_kernels.py
reads them: 3 programs to an SM in decode, 1 in prefill, a tile's keys and values on their way while one is multiplied).
"""

from collections.abc import Sequence

from jaxpage.aot.card import Card
from jaxpage.ops.attention.launch import AttentionLaunch, AttentionShape, next_power_of_two

_DECODE_PROGRAMS_PER_SM, _PREFILL_PROGRAMS_PER_SM = 3, 1
_EXPONENTS_PER_CLOCK = 16
"""Of an SM's special function units."""
_OTHERS_PER_SCORE = 5
"""Float operations of a score beside its exponent: scale and subtract, maximum, sum, conversion, decay."""
_FLOATS_PER_CLOCK = 128
_PRODUCTS_PER_CLOCK = 2048
"""Multiplications of bfloat16 by the tensor cores of a Hopper SM."""


def attention_seconds(
    rows: Sequence[tuple[int, int]], shape: AttentionShape, launch: AttentionLaunch, card: Card
) -> float:
    """Of the launch for all rows of a step and, where it splits the KV, of its reduction.

    rows: KV length, new tokens included, and number of new tokens, of each row that there is; shape: of its bucket.
    """
    programs = _programs(rows, shape, launch)
    kv_bytes = 2 * shape.head_dim * shape.kv_itemsize * launch.tile  # a tile of a KV head
    # The list's item, then block ids, then the first tile: three loads that wait for one another, once.
    begin = 3 * card.dram_latency
    if launch.spare_items == 0 and shape.max_query_len > launch.block_q:
        return begin + _compute_seconds(programs, shape, launch, card)
    seconds, left = begin, [tiles for tiles in programs for _ in range(shape.num_kv_heads)]
    branch_free = _DECODE_PROGRAMS_PER_SM * card.num_sms
    while left:
        wave, left = left[:branch_free], left[branch_free:]
        # One tile is multiplied while the next is on its way.
        rate = min(card.dram_bytes_per_second, len(wave) * kv_bytes / card.dram_latency)
        seconds += sum(wave) * kv_bytes / rate
    if launch.spare_items:
        partial_sums = len(programs) * launch.block_q * shape.num_heads
        moved = 2 * partial_sums * (shape.head_dim + 2) * 4
        seconds += card.kernel_seconds + 2 * card.dram_latency + moved / card.l2_bytes_per_second
    return seconds


def decode_share(kv_len: int, num_rows: int, shape: AttentionShape, launch: AttentionLaunch, card: Card) -> float:
    """Of what a copy reaches, in a decode step of rows of one length: bytes of their KV over the time for them."""
    num_bytes = 2 * num_rows * kv_len * shape.num_kv_heads * shape.head_dim * shape.kv_itemsize
    seconds = attention_seconds([(kv_len, 1)] * num_rows, shape, launch, card)
    return num_bytes / card.dram_bytes_per_second / seconds


def prefill_share(num_tokens: int, shape: AttentionShape, launch: AttentionLaunch, card: Card) -> float:
    """Of what the best matrix products reach, in a step that is one prompt: operations that it takes over the time."""
    pairs = num_tokens * (num_tokens + 1) // 2
    flops = 4 * pairs * shape.num_heads * shape.head_dim
    seconds = attention_seconds([(num_tokens, num_tokens)], shape, launch, card)
    return flops / card.best_flops_per_second / seconds


def _programs(rows: Sequence[tuple[int, int]], shape: AttentionShape, launch: AttentionLaunch) -> list[int]:
    """Tiles of each program that has any, per KV head: what `ops.attention_work.list_work` makes on the device."""
    span = shape.span or shape.max_kv_len
    blocks = []
    for kv_len, query_len in rows:
        for first in range(0, query_len, launch.block_q):
            seen = kv_len - query_len + min(first + launch.block_q, query_len)
            oldest = max(0, kv_len - query_len + first + 1 - span)
            blocks.append(-(-seen // launch.tile) - oldest // launch.tile)
    if not launch.spare_items:
        return sorted(blocks, reverse=True)
    one_block = shape.max_query_len <= launch.block_q
    most = shape.num_rows if one_block else shape.num_tokens // launch.block_q + shape.num_rows + 1
    size = 1
    while sum(-(-tiles // size) for tiles in blocks) > most + launch.spare_items:
        size *= 2
    programs = []
    for tiles in blocks:
        parts = -(-tiles // size)
        each = -(-tiles // parts)
        programs += [min(each, tiles - begin) for begin in range(0, tiles, each)]
    return programs


def _compute_seconds(programs: Sequence[int], shape: AttentionShape, launch: AttentionLaunch, card: Card) -> float:
    """Of long queries, where products and exponents take longer than their KV: nothing of a program overlaps."""
    dim = next_power_of_two(shape.head_dim)
    scores = launch.block_m * launch.tile
    wgmma = card.slow_flops_per_second < card.flops_per_second
    products = 2 * scores * dim / (_PRODUCTS_PER_CLOCK if wgmma else _PRODUCTS_PER_CLOCK / 2)
    clocks = products + scores / _EXPONENTS_PER_CLOCK + _OTHERS_PER_SCORE * scores / _FLOATS_PER_CLOCK
    # The longest begin first, and each SM takes the next one when it is done: near to equal shares.
    work = sum(programs) * shape.num_kv_heads
    per_sm = max(work / (_PREFILL_PROGRAMS_PER_SM * card.num_sms) + max(programs) / 2, max(programs))
    return per_sm * clocks / card.clocks_per_second
