"""What `scripts/tune_kernels` runs: times launches of the attention kernel on this machine's GPU, keeps the fastest.

For each shape it begins with the launch that `choose_launch` computes and changes one number of it at a time, for as
long as that makes it faster. A launch that cannot run, or whose result is another than that of the computed one (which
`scripts/gpu_check` holds against float64), is none. What a file holds already, of the same device and versions, stays:
a later run goes on behind it.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_checks.timing import chained, time_program

from jaxpage.ops.attention.launch import (
    GPU,
    TUNED,
    AttentionLaunch,
    AttentionShape,
    choose_launch,
    next_power_of_two,
)
from jaxpage.ops.attention.paged_xla import paged_attention_xla

BLOCK_SIZE = 16
TOLERANCE = 1e-2
"""Norm of the difference to norm of the result: bfloat16 keeps 8 bits."""
LEAST_GAIN = 0.03
"""Share of its time that a launch must save to be taken: less may be noise."""
NUM_STAGES = (5, 7, 3, 4, 2, 1)
RUNS_INSIDE, SECONDS_PER_LAUNCH = 16, 0.05
"""Runs of the kernel within one program, and how long such programs are timed."""
POOL_BYTES, NUM_TABLES = 2**28, 8
"""Of KV, at least, and how many sets of block tables take turns: together more than an L2 cache holds."""
HEADS = {
    "Llama-3.1-8B": (32, 8, 128),
    "Qwen3-0.6B": (16, 8, 128),
    "an eighth of Llama-3.1-8B": (4, 1, 128),
    "an eighth of Llama-3.1-70B": (8, 1, 128),
    "Gemma-3-270m": (4, 1, 256),
    "SmolLM2-135M": (9, 3, 64),
}
"""Heads, KV heads and their size."""


def shapes() -> Iterator[AttentionShape]:
    """Steps that serve most: decodes of growing batches, drafts to be checked, prompts."""
    for heads, max_kv_len in itertools.product(HEADS.values(), (8192, 32768)):
        for num_rows in (1, 4, 8, 16, 32, 64, 128, 256):
            yield _shape(heads, max_kv_len, num_rows, num_rows, 1)
        for num_rows in (4, 32):
            yield _shape(heads, max_kv_len, 4 * num_rows, num_rows, 4)
        for num_tokens in (512, 2048):
            yield _shape(heads, max_kv_len, num_tokens, 32, num_tokens)


def _shape(
    heads: tuple[int, int, int], max_kv_len: int, num_tokens: int, num_rows: int, max_query_len: int
) -> AttentionShape:
    num_heads, num_kv_heads, head_dim = heads
    return AttentionShape(
        num_tokens=num_tokens,
        num_rows=num_rows,
        max_query_len=max_query_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_itemsize=2,
        max_kv_len=max_kv_len,
    )


TINY = _shape((4, 2, 16), 64, 4, 4, 1)


def neighbours(launch: AttentionLaunch, shape: AttentionShape) -> Iterator[AttentionLaunch]:
    """Launches that differ from one in one number."""
    group = shape.num_heads // shape.num_kv_heads
    least_rows = max(next_power_of_two(group), 16)
    for block_m in (launch.block_m * 2, launch.block_m // 2):
        # Rows that no query fills would be for nothing.
        if least_rows <= block_m <= max(least_rows, min(128, next_power_of_two(group * shape.max_query_len))):
            yield dataclasses.replace(launch, block_m=block_m, block_q=min(block_m // group, shape.max_query_len))
    ranges = {"tile": (16, 256), "spare_items": (1, 4096), "num_warps": (1, 8)}
    for name, (least, most) in ranges.items():
        number = getattr(launch, name)
        for other in (number * 2, number // 2):
            # Larger tiles that mask nothing hold whole numbers of the others.
            fits = name != "tile" or launch.full_tile % other == 0
            if least <= other <= most and fits:
                yield dataclasses.replace(launch, **{name: other})
    # From each number of stages to any other: 3 and 4 give the same code, and the next better one is 5.
    for num_stages in NUM_STAGES:
        if num_stages != launch.num_stages:
            yield dataclasses.replace(launch, num_stages=num_stages)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """The fastest launch that was found for a shape, and what there was before."""

    launch: AttentionLaunch
    seconds: float
    computed_seconds: float


def tune(
    shape: AttentionShape, gpu: GPU, seconds_of: Callable[[AttentionLaunch], float], ends: float = math.inf
) -> Tuned:
    """Go from the computed launch to faster ones until none is near, or `time.monotonic()` has reached `ends`.

    `seconds_of` a launch that cannot be used is infinite.
    """
    best = choose_launch(shape, gpu)
    known = {best: seconds_of(best)}
    computed = known[best]
    improves = True
    while improves:
        improves = False
        for launch in neighbours(best, shape):
            if launch in known or time.monotonic() > ends:
                continue
            known[launch] = seconds_of(launch)
            if known[launch] < (1 - LEAST_GAIN) * known[best]:
                best, improves = launch, True
                break
    return Tuned(best, known[best], computed)


class Case:
    """A step of a shape on a device, with fresh random numbers; rows hold a quarter to all of what they may."""

    def __init__(self, shape: AttentionShape, gpu: GPU | None, seed: int) -> None:
        """Without `gpu`, plain XLA runs in place of every launch."""
        self._gpu = gpu
        width = shape.max_kv_len // BLOCK_SIZE
        rng, key = np.random.default_rng(seed), jax.random.key(seed)
        query_len = shape.num_tokens // shape.num_rows
        lengths = rng.integers(max(shape.max_kv_len // 4, query_len), shape.max_kv_len + 1, shape.num_rows)
        block_shape = (2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        num_blocks = max(shape.num_rows * width, POOL_BYTES // (2 * math.prod(block_shape)) if gpu else 0)
        kv_shape = (num_blocks + 1, *block_shape)
        self._args = (
            jax.random.normal(key, (shape.num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16),
            jax.random.normal(key, kv_shape, jnp.bfloat16),
        )
        needed = shape.num_rows * width
        tables = [1 + rng.permutation(num_blocks)[:needed].astype(np.int32) for _ in range(NUM_TABLES)]
        self._tables = [jnp.asarray(each.reshape(shape.num_rows, width)) for each in tables]
        self._step = {
            "query_start": jnp.arange(shape.num_rows + 1, dtype=jnp.int32) * query_len,
            "query_lens": jnp.full(shape.num_rows, query_len, jnp.int32),
            "kv_lens": jnp.asarray(lengths, jnp.int32),
        }
        self._statics = {"max_query_len": shape.max_query_len, "scale": shape.head_dim**-0.5}
        self._expected: np.ndarray | None = None

    def seconds_of(self, launch: AttentionLaunch) -> float:
        """Of one run; infinite where it cannot run, or is wrong. The first launch says what is right."""
        try:
            attend = jax.jit(functools.partial(self._attention(launch), **self._statics))
            got = np.asarray(attend(*self._args, block_tables=self._tables[0], **self._step), np.float64)
        except Exception as error:  # too many registers, too much shared memory: Triton and XLA have many names for it
            print(f"    {launch} cannot run: {str(error).splitlines()[0][:100]}")
            return math.inf
        if self._expected is None:
            self._expected = got
        error = float(np.linalg.norm(got - self._expected) / np.linalg.norm(self._expected))
        if not error < TOLERANCE:  # NaN is not
            print(f"    {launch} is wrong by {error:.3g}")
            return math.inf
        runs = RUNS_INSIDE if self._gpu else 1

        def program(kv: jax.Array, step: Any, q: jax.Array, *tables: jax.Array) -> jax.Array:
            return chained(lambda q, table: attend(q, kv, block_tables=table, **step), runs)(q, *tables)

        q, kv = self._args
        return time_program(jax.jit(program), (kv, self._step, q, *self._tables), runs, SECONDS_PER_LAUNCH).seconds

    def _attention(self, launch: AttentionLaunch) -> Callable[..., jax.Array]:
        if self._gpu is None:
            return paged_attention_xla
        from jaxpage.ops.attention.paged_triton import paged_attention_triton

        return functools.partial(paged_attention_triton, gpu=self._gpu, launch=launch)


def row_of(shape: AttentionShape, tuned: Tuned) -> dict[str, Any]:
    """A line of the file: what `tuned_launches` reads, and what it rests on."""
    return {
        "shape": dataclasses.asdict(shape.rounded),
        "launch": dataclasses.asdict(tuned.launch),
        "us": round(1e6 * tuned.seconds, 2),
        "computed_us": round(1e6 * tuned.computed_seconds, 2),
    }


def head_of(device: str) -> dict[str, str]:
    """What a file's numbers hold for."""
    return {"device": device} | {name: version(name) for name in ("jax", "triton", "jax-triton")}


def read(file: Path, head: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of a file that was written for the same, else none."""
    found = json.loads(file.read_text("utf-8")) if file.exists() else {}
    rows: list[dict[str, Any]] = found.pop("launches", [])
    return rows if found == head else []


def write(file: Path, head: dict[str, str], rows: list[dict[str, Any]]) -> None:
    """All rows, a line each."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{json.dumps(head)[:-1]}, "launches": [\n{lines}\n]}}\n', "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tune_kernels", description="Tune jaxpage's attention on this machine's GPU.")
    parser.add_argument("--seconds", type=float, default=540, metavar="N", help="end after (%(default)s)")
    parser.add_argument("--out", type=Path, default=TUNED, metavar="FOLDER", help="where to (default: ops/tuned)")
    parser.add_argument(
        "--dry-run", action="store_true", help="a tiny shape on a CPU, without Triton: the numbers mean nothing"
    )
    args = parser.parse_args()
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry_run:
        print(f"tune_kernels: JAX finds {device.device_kind} and no GPU; try --dry-run", file=sys.stderr)
        return 2
    if args.dry_run:
        gpu = GPU(num_sms=1, compute_capability=0)
    else:
        gpu = GPU(device.core_count, int(device.compute_capability.replace(".", "")))
    ends = time.monotonic() + args.seconds
    file, head = args.out / gpu.tuned_file, head_of(device.device_kind)
    rows = read(file, head)
    known = [row["shape"] for row in rows]
    for seed, shape in enumerate([TINY] if args.dry_run else shapes()):
        if dataclasses.asdict(shape.rounded) in known:
            continue
        if time.monotonic() > ends:
            print("no time is left: other shapes keep their computed launches")
            break
        case = Case(shape, None if args.dry_run else gpu, seed)
        tuned = tune(shape, gpu, case.seconds_of, ends)
        print(
            f"{shape.num_rows} rows, {shape.num_tokens} tokens, {shape.num_heads}/{shape.num_kv_heads} heads of "
            f"{shape.head_dim}, {shape.max_kv_len}: {1e6 * tuned.computed_seconds:.1f} -> {1e6 * tuned.seconds:.1f} us "
            f"{tuned.launch}"
        )
        sys.stdout.flush()
        if math.isfinite(tuned.seconds):
            rows.append(row_of(shape, tuned))
            write(file, head, rows)
    print(f"{len(rows)} shapes in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
