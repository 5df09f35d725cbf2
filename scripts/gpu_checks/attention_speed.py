"""How fast the attention kernel is, in the launches that an engine for Llama-3.1-8B chooses."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_checks.child import Context, Row
from gpu_checks.device import attention_of, bytes_per_second, flops_per_second, gpu_of, l2_bytes
from gpu_checks.sizes import Sizes
from gpu_checks.timing import Timing, chained, num_inside, num_sets, time_program
from jaxpage.ops.attention.launch import GPU, AttentionLaunch
from jaxpage.runner.buckets import choose_bucket, make_buckets

BLOCK_SIZE = 16
LAUNCH_SECONDS = 6e-6
"""Of a kernel that splits a row and another that adds its parts up, with nothing to do."""
DECODE_SHARES = ((2**13, 0.3), (2**15, 0.6), (2**17, 0.7), (2**19, 0.85))
"""Least positions in all rows, and the share of a copy's speed that reading their KV should reach."""
PREFILL_SHARE = 0.45
"""Of a large product's speed."""


@dataclass(frozen=True)
class Rows:
    """What a step attends to: (kv_len, query_len) of each row."""

    name: str
    rows: Sequence[tuple[int, int]]

    @property
    def num_tokens(self) -> int:
        return sum(query_len for _, query_len in self.rows)

    @property
    def positions(self) -> int:
        """Whose KV is read."""
        return sum(kv_len for kv_len, _ in self.rows)

    @property
    def pairs(self) -> int:
        """Of a query and a position that it sees."""
        return sum(n * kv_len - n * (n - 1) // 2 for kv_len, n in self.rows)


@dataclass(frozen=True)
class Pool:
    """KV of random numbers, and which of its blocks rows have."""

    kv: jax.Array  # [num_blocks, 2, BLOCK_SIZE, kv_heads, head_dim] bfloat16
    order: np.ndarray = field(repr=False)  # [num_blocks - 1] int32, scattered ids


def make_pool(num_blocks: int, kv_heads: int, head_dim: int) -> Pool:
    """Its numbers repeat from some point on, which spares the memory that drawing all of them would take."""
    shape = (2, BLOCK_SIZE, kv_heads, head_dim)
    few = jax.random.normal(jax.random.key(1), (min(num_blocks, 4096), *shape), jnp.bfloat16)
    kv = jax.jit(lambda few: few[jnp.arange(num_blocks) % len(few)])(few)
    return Pool(kv, np.random.default_rng(2).permutation(np.arange(1, num_blocks)).astype(np.int32))


def time_attention(
    pool: Pool,
    rows: Rows,
    bucket: tuple[int, int, int],
    max_model_len: int,
    *,
    num_heads: int,
    gpu: GPU | None,
    launch: AttentionLaunch | None = None,
    most_inside: int = 64,
    seconds: float = 0.2,
) -> tuple[Timing, jax.Array]:
    """Of one layer's attention in a step of a bucket, and what it gave with the first tables. See `timing`.

    bucket: tokens, rows, and the longest query, padding counted; launch: by default the engine's.
    """
    num_tokens, num_rows, max_query_len = bucket
    num_blocks, _, _, _, head_dim = pool.kv.shape
    attend = functools.partial(attention_of(gpu, launch), max_query_len=max_query_len, scale=head_dim**-0.5)
    kv_bytes = rows.positions * pool.kv.nbytes // (num_blocks * BLOCK_SIZE)
    kv_lens, query_lens = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    kv_lens[: len(rows.rows)], query_lens[: len(rows.rows)] = zip(*rows.rows, strict=True)
    starts = np.arange(num_rows + 1) if max_query_len == 1 else np.concatenate([[0], np.cumsum(query_lens)])
    step = {
        "query_start": jnp.asarray(starts, jnp.int32),
        "query_lens": jnp.asarray(query_lens),
        "kv_lens": jnp.asarray(kv_lens),
    }
    expected = max(kv_bytes / bytes_per_second(), 4 * num_heads * head_dim * rows.pairs / flops_per_second())
    inside = num_inside(expected + LAUNCH_SECONDS, most_inside)
    sets = num_sets(kv_bytes, l2_bytes(), inside)
    tables = [jnp.asarray(_tables(pool, rows, num_rows, max_model_len // BLOCK_SIZE, index)) for index in range(sets)]
    q = jax.random.normal(jax.random.key(3), (num_tokens, num_heads, head_dim), jnp.bfloat16)

    def run(step: Any, kv: jax.Array, q: jax.Array, *tables: jax.Array) -> jax.Array:
        return chained(lambda q, table: attend(q, kv, block_tables=table, **step), inside)(q, *tables)

    first = jax.jit(lambda q, kv, table, step: attend(q, kv, block_tables=table, **step))(q, pool.kv, tables[0], step)
    return time_program(jax.jit(run), (step, pool.kv, q, *tables), inside, seconds), first


def _tables(pool: Pool, rows: Rows, num_rows: int, width: int, index: int) -> np.ndarray:
    """Block tables [num_rows, width] of one set: each set has other blocks, as far as there are any."""
    tables = np.zeros((num_rows, width), np.int32)
    needed = [-(-kv_len // BLOCK_SIZE) for kv_len, _ in rows.rows]
    first = index * sum(needed)
    for row, count in enumerate(needed):
        tables[row, :count] = pool.order[(first + np.arange(count)) % len(pool.order)]
        first += count
    return tables


def decode(context: Context) -> Iterator[Row]:
    """Steps of one token per row, all of a length and of very different ones."""
    sizes, pool = context.sizes, _pool(context)
    cases = [
        Rows(f"{num_rows} x {length}", [(length, 1)] * num_rows)
        for length in sizes.contexts
        for num_rows in sizes.decode_rows
    ]
    long, short, most = max(sizes.contexts), min(sizes.contexts), max(sizes.decode_rows)
    cases.append(Rows(f"{long} and {min(most, 32) - 1} x {short}", [(long, 1)] + [(short, 1)] * (min(most, 32) - 1)))
    growing = np.geomspace(short // 8, min(8 * short, long), most).astype(int)
    cases.append(Rows(f"{most} from {growing[0]} to {growing[-1]}", [(int(length), 1) for length in growing]))
    table = make_buckets(most, max(sizes.token_budget, most))
    for rows in (case for case in cases if case.positions <= sizes.pool_blocks * BLOCK_SIZE):
        bucket = choose_bucket([it for it in table if it.max_query_len == 1], len(rows.rows), len(rows.rows), 1)
        yield _row(context, pool, rows, (bucket.num_tokens, bucket.num_rows, 1), _decode_share(rows.positions))
        if not context.has_time:
            raise TimeoutError("there was no time for the other cases")


def prefill(context: Context) -> Iterator[Row]:
    """A step full of one prompt: its begin, and later pieces of it; and decode rows beside one."""
    sizes, pool = context.sizes, _pool(context)
    budget, most = sizes.token_budget, max(sizes.decode_rows)
    (bucket,) = [it for it in make_buckets(most, max(budget, most)) if it.num_tokens == budget and it.takes_any_query]
    shape = (bucket.num_tokens, bucket.num_rows, bucket.max_query_len)
    lengths = [budget, *(length for length in sizes.contexts if length > budget)][:3]
    for length in lengths:
        yield _row(context, pool, Rows(f"{budget} tokens at {length}", [(length, budget)]), shape, PREFILL_SHARE)
    beside = min(budget // 32, bucket.num_rows - 1)
    rest = budget - beside
    length = sorted(sizes.contexts)[len(sizes.contexts) // 2]
    for count, long in ((1, max(sizes.contexts)), (beside, length)):
        rows = Rows(f"{count} rows of {long} beside {rest} tokens", [(long, 1)] * count + [(rest, rest)])
        if count and rows.positions <= sizes.pool_blocks * BLOCK_SIZE:
            yield _row(context, pool, rows, shape, PREFILL_SHARE)


def _row(context: Context, pool: Pool, rows: Rows, bucket: tuple[int, int, int], share: float) -> Row:
    sizes = context.sizes
    num_heads, kv_heads, head_dim = sizes.heads
    timing, _ = time_attention(
        *(pool, rows, bucket, sizes.max_model_len),
        num_heads=num_heads,
        gpu=gpu_of(context),
        most_inside=sizes.most_inside,
        seconds=sizes.seconds_per_case,
    )
    flops = 4 * num_heads * head_dim * rows.pairs
    moved = 2 * 2 * kv_heads * head_dim * rows.positions + 2 * 2 * num_heads * head_dim * bucket[0]
    row = {"case": rows.name, "seconds": timing.seconds, "bytes": moved, "flops": flops, "share": share}
    return row | {"fixed": LAUNCH_SECONDS, "spread": timing.spread, "tflop_per_s": flops / timing.seconds / 1e12}


def _decode_share(positions: int) -> float:
    return next((share for most, share in DECODE_SHARES if positions <= most), DECODE_SHARES[-1][1])


def _pool(context: Context) -> Pool:
    """Both parts read the same."""
    sizes: Sizes = context.sizes
    if "pool" not in context.shared:
        context.shared["pool"] = make_pool(sizes.pool_blocks, sizes.heads[1], sizes.heads[2])
    pool: Pool = context.shared["pool"]
    return pool
