"""Kernels against references, on fresh random numbers."""

import functools
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ragged import Attention, Batch, make_batch

from gpu_checks.child import Context, Row
from gpu_checks.device import attention_of, gpu_of, kv_write_of
from gpu_checks.sizes import Sizes
from jaxpage.ops.attention.kv_write import rotate_and_write_kv

TOLERANCE = 1e-2
"""Norm of the error to norm of the result: bfloat16 keeps 8 bits."""


@dataclass(frozen=True)
class Case:
    """A batch, what attention it is, and the program that is to compute it."""

    name: str
    seed: int
    batch: Batch
    arrays: dict[str, Any]
    program: Any


def attention(context: Context) -> Iterator[Row]:
    """Ragged batches against float64; whatever no query may read is NaN."""
    sizes, gpu = context.sizes, gpu_of(context)
    kinds: list[Row] = [{"window": 40}, {"chunk": 64}, {"softcap": 30.0, "has_sinks": True}]
    shapes = list(itertools.product(sizes.head_dims, sizes.groups))
    middle = shapes[len(shapes) // 2]
    attend = attention_of(gpu)
    asked: list[tuple[str, tuple[int, int], Row]] = [
        *((name, shape, {}) for shape, name in itertools.product(shapes, _batches(sizes))),
        *((name, middle, kind) for kind, name in itertools.product(kinds, ("decode", "mixed"))),
    ]
    # Each is traced and compiled in a thread of its own: most of the time is Triton's and the assembler's.
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        for made in pool.map(lambda each: _case(sizes, attend, *each), asked):
            got = np.asarray(made.program(*map(jnp.asarray, made.batch.args), **made.arrays), np.float64)
            error = float(np.linalg.norm(got - made.batch.expected) / np.linalg.norm(made.batch.expected))
            yield {"case": made.name, "seed": made.seed, "error": error, "ok": error < TOLERANCE}  # NaN is not
            if not context.has_time:
                pool.shutdown(wait=False, cancel_futures=True)
                raise TimeoutError("there was no time for the other cases")


def _batches(sizes: Sizes) -> dict[str, tuple[list[tuple[int, int]], bool]]:
    """(kv_len, query_len) of each row, and whether all queries are one token."""
    long = sizes.long_context
    return {
        "decode of one row in four": ([(long, 1), (0, 0), (0, 0), (0, 0)], True),
        "decode": ([(1, 1), (17, 1), (0, 0), (long, 1), (64, 1)], True),
        "mixed": ([(5, 5), (100, 64), (long, 1), (0, 0), (33, 2)], False),
        "prefill": ([(long // 4, long // 4), (long // 2, long // 8)], False),
    }


def _case(sizes: Sizes, attend: Any, name: str, shape: tuple[int, int], kind: Row) -> Case:
    (head_dim, group), (rows, decode) = shape, _batches(sizes)[name]
    seed = int.from_bytes(os.urandom(4))
    what = Attention(num_kv_heads=2, group=group, head_dim=head_dim, scale=head_dim**-0.5, **kind)
    batch = make_batch(what, rows, dtype=jnp.bfloat16, decode=decode, seed=seed)
    statics = {key: value for key, value in batch.options.items() if not isinstance(value, np.ndarray)}
    arrays = {key: jnp.asarray(value) for key, value in batch.options.items() if key not in statics}
    program = jax.jit(functools.partial(attend, **statics))
    compiled = program.lower(*map(jnp.asarray, batch.args), **arrays).compile()
    options = "".join(f", {key} {value}" for key, value in kind.items())
    return Case(f"{name}, {group} x {head_dim}{options}", seed, batch, arrays, compiled)


def kv_writes(context: Context) -> Iterator[Row]:
    """Rotation and writing of new keys and values into scattered slots; whatever is not written keeps its NaN."""
    for head_dim, group in itertools.product(context.sizes.head_dims, context.sizes.groups):
        seed = int.from_bytes(os.urandom(4))
        rng = np.random.default_rng(seed)
        num_tokens, num_blocks, block, kv_heads = 37, 8, 16, 2
        q, k, v = (
            jnp.asarray(rng.normal(size=(num_tokens, heads, head_dim)), jnp.bfloat16)
            for heads in (kv_heads * group, kv_heads, kv_heads)
        )
        angle = rng.normal(size=(num_tokens, head_dim // 2))
        rope = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
        cache = jnp.full((num_blocks, 2, block, kv_heads, head_dim), jnp.nan, jnp.bfloat16)
        slots = rng.permutation(num_blocks * block)[:num_tokens].astype(np.int32)
        slots[-3:] = num_blocks * block  # padding
        args = (q, k, v, rope, cache, jnp.asarray(slots))
        expected = jax.jit(rotate_and_write_kv)(*args)
        written = jax.jit(kv_write_of(gpu_of(context)))(*args)
        error = max(map(_error, written, expected))
        untouched = bool(jnp.all(jnp.isnan(written[1]) == jnp.isnan(expected[1])))
        ok = error < TOLERANCE and untouched
        yield {"case": f"{group} x {head_dim}", "seed": seed, "error": error, "untouched": untouched, "ok": ok}


def _error(got: jax.Array, wanted: jax.Array) -> float:
    """Norm of the difference to norm of what is wanted, of all that is wanted to be a number."""
    numbers = np.asarray(wanted, np.float64)
    is_number = ~np.isnan(numbers)
    difference = np.asarray(got, np.float64)[is_number] - numbers[is_number]
    return float(np.linalg.norm(difference) / np.linalg.norm(numbers[is_number]))
