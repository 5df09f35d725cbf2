"""What `scripts/gpu_check` runs: prints a line per measurement, and writes all as JSON. Exits with 1 if one is wrong.

Speeds are given as shares of what this card itself reaches: bytes per second of a large copy, and operations per second
of a large product, both measured first. An engine's step is held against the least that it must move at that speed.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ragged import Attention, make_batch

from jaxpage.bench_roofline import floor_of
from jaxpage.config import LOOP_NAMES, EngineConfig
from jaxpage.engine_core import EngineCore
from jaxpage.ops.attention_xla import paged_attention_xla
from jaxpage.ops.kv_write import rotate_and_write_kv
from jaxpage.ops.launch import GPU
from jaxpage.sampling_params import SamplingParams
from jaxpage.wire import AddRequest

Row = dict[str, Any]
TOLERANCE = 1e-2
"""Norm of the error to norm of the result: bfloat16 keeps 8 bits."""
LLAMA_8B: Row = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN_06B: Row = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    copy_bytes: int
    product: int
    """Rows and columns of the matrices."""
    repeats: int
    head_dims: tuple[int, ...]
    kernel_batches: tuple[int, ...]
    kernel_contexts: tuple[int, ...]
    models: dict[str, Row]
    batches: tuple[int, ...]
    context: int
    """Prompt tokens of each request."""
    num_steps: int
    """Decode steps that are timed."""
    token_budget: int


CARD = Sizes(
    copy_bytes=2**31,
    product=8192,
    repeats=20,
    head_dims=(64, 128, 256),
    kernel_batches=(1, 32, 256),
    kernel_contexts=(1024, 8192),
    models={"Qwen3-0.6B": QWEN_06B, "Llama-3.1-8B": LLAMA_8B},
    batches=(1, 8, 32, 128, 256),
    context=1024,
    num_steps=64,
    token_budget=2048,
)
DRY = Sizes(
    copy_bytes=2**20,
    product=128,
    repeats=2,
    head_dims=(16,),
    kernel_batches=(2,),
    kernel_contexts=(32,),
    models={"Qwen3-0.6B": QWEN_06B | TINY},
    batches=(1, 4),
    context=24,
    num_steps=4,
    token_budget=32,
)


class Check:
    """Runs the parts one after the other as long as there is time, and keeps what they find."""

    def __init__(self, sizes: Sizes, gpu: GPU | None, seconds: float) -> None:
        self.sizes = sizes
        self.gpu = gpu
        self.ends = time.monotonic() + seconds
        self.rows: list[Row] = []
        self.peak_bytes = self.peak_flops = 0.0
        """Per second, as measured here."""
        self.model = next(iter(sizes.models))
        """That engines serve."""

    def run(self, parts: list[Callable[["Check"], Iterator[Row]]]) -> None:
        for part in parts:
            started = time.monotonic()
            if started > self.ends:
                self._skip(part.__name__)
                continue
            for row in part(self):
                self.rows.append({"part": part.__name__, **row})
                print(f"{part.__name__:14} " + "  ".join(f"{name} {_shown(value)}" for name, value in row.items()))
                sys.stdout.flush()
                if time.monotonic() > self.ends:
                    self._skip(part.__name__)
                    break
            print(f"{part.__name__:14} took {time.monotonic() - started:.1f} s")

    def _skip(self, part: str) -> None:
        self.rows.append({"part": part, "skipped": "no time is left", "ok": False})
        print(f"{part:14} no time is left: the rest of it is skipped")

    @property
    def is_right(self) -> bool:
        return all(row.get("ok", True) for row in self.rows)


def peaks(check: Check) -> Iterator[Row]:
    """What this card reaches: a copy of a large array, and a product of large bfloat16 matrices."""
    numbers = jnp.zeros(check.sizes.copy_bytes // 2, jnp.bfloat16)
    seconds = _seconds(jax.jit(lambda x: x + 1), numbers, repeats=check.sizes.repeats)
    check.peak_bytes = 2 * numbers.nbytes / seconds
    n = check.sizes.product
    matrix = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    seconds = _seconds(jax.jit(jnp.matmul), matrix, matrix, repeats=check.sizes.repeats)
    check.peak_flops = 2 * n**3 / seconds
    yield {"tb_per_s": check.peak_bytes / 1e12, "tflop_per_s": check.peak_flops / 1e12}


def kernels(check: Check) -> Iterator[Row]:
    """Attention over ragged batches of fresh random numbers against float64; what no query may read is NaN."""
    seed = int.from_bytes(os.urandom(4))
    batches = {
        "decode": ([(1, 1), (17, 1), (0, 0), (300, 1), (64, 1)], True),
        "mixed": ([(5, 5), (100, 64), (257, 1), (0, 0), (33, 2)], False),
    }
    shapes = list(itertools.product(check.sizes.head_dims, (1, 4, 7)))
    kinds: list[Row] = [{"window": 40}, {"chunk": 64}, {"softcap": 30.0, "has_sinks": True}]
    cases = [(shape, {}) for shape in shapes] + [(shapes[1], kind) for kind in kinds]
    for ((head_dim, group), kind), (name, (rows, decode)) in itertools.product(cases, batches.items()):
        seed += 1
        attention = Attention(num_kv_heads=2, group=group, head_dim=head_dim, scale=head_dim**-0.5, **kind)
        batch = make_batch(attention, rows, dtype=jnp.bfloat16, decode=decode, seed=seed)
        statics = {key: value for key, value in batch.options.items() if not isinstance(value, np.ndarray)}
        arrays = {key: jnp.asarray(value) for key, value in batch.options.items() if key not in statics}
        attend = jax.jit(functools.partial(_attention(check), **statics))
        got = np.asarray(attend(*map(jnp.asarray, batch.args), **arrays), np.float64)
        error = float(np.linalg.norm(got - batch.expected) / np.linalg.norm(batch.expected))
        ok = error < TOLERANCE  # NaN is not
        yield {"batch": name, "head_dim": head_dim, "group": group, **kind, "seed": seed, "error": error, "ok": ok}


def kv_writes(check: Check) -> Iterator[Row]:
    """Rotation and writing of new keys and values into scattered slots; whatever is not written keeps its NaN."""
    for head_dim, group in itertools.product(check.sizes.head_dims, (1, 4, 7)):
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
        written = jax.jit(_kv_write(check))(*args)
        error = max(_error(got, wanted) for got, wanted in zip(written, expected, strict=True))
        untouched = bool(jnp.all(jnp.isnan(written[1]) == jnp.isnan(expected[1])))
        yield {
            "head_dim": head_dim,
            "group": group,
            "seed": seed,
            "error": error,
            "untouched": untouched,
            "ok": error < TOLERANCE and untouched,
        }


def kernel_speed(check: Check) -> Iterator[Row]:
    """Attention of one layer of Llama-3.1-8B, at decode: its KV at the speed of a copy is the floor."""
    heads, kv_heads, head_dim, block = 32, 8, 128, 16
    for batch, context in itertools.product(check.sizes.kernel_batches, check.sizes.kernel_contexts):
        width = context // block
        key = jax.random.key(batch)
        kv = jax.random.normal(key, (batch * width + 1, 2, block, kv_heads, head_dim), jnp.bfloat16)
        q = jax.random.normal(key, (batch, heads, head_dim), jnp.bfloat16)
        step = {
            "block_tables": 1 + jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width),
            "query_start": jnp.arange(batch + 1, dtype=jnp.int32),
            "query_lens": jnp.ones(batch, jnp.int32),
            "kv_lens": jnp.full(batch, context, jnp.int32),
        }
        attend = functools.partial(_attention(check), max_query_len=1, scale=head_dim**-0.5)
        seconds = _seconds(jax.jit(lambda q, kv, step, attend=attend: attend(q, kv, **step)), q, kv, step)
        floor = (kv.nbytes + 2 * q.nbytes) / check.peak_bytes
        yield {
            "batch": batch,
            "context": context,
            "us": 1e6 * seconds,
            "floor_us": 1e6 * floor,
            "share": floor / seconds,
        }


def start_up(check: Check) -> Iterator[Row]:
    """Seconds until an engine serves, with an empty folder of programs and with a full one."""
    for programs in ("compiled", "from disk"):
        started = time.monotonic()
        with _engine(check) as core:
            stats = core.runner.stats
        yield {
            "model": check.model,
            "programs": programs,
            "seconds": time.monotonic() - started,
            "num_programs": stats["num_programs"],
            "num_loaded": stats["num_programs_loaded"],
            "ok": programs == "compiled" or stats["num_programs_loaded"] == stats["num_programs"],
        }


def engine(check: Check) -> Iterator[Row]:
    """Prefill and decode of synthetic models at growing batches, in the mode that serves by default."""
    with _engine(check) as core:
        for batch in check.sizes.batches:
            yield {"model": check.model, "batch": batch, **_measure(check, core, batch)}


def modes(check: Check) -> Iterator[Row]:
    """The three loops beside one another."""
    for mode in LOOP_NAMES:
        with _engine(check, engine_mode=mode) as core:
            batch = check.sizes.batches[len(check.sizes.batches) // 2]
            yield {"mode": mode, "batch": batch, **_measure(check, core, batch)}


@contextlib.contextmanager
def _engine(check: Check, **options: Any) -> Iterator[EngineCore]:
    """An engine, whose memory is free for the next one when it is done with."""
    folder = _folder() / check.model
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(check.sizes.models[check.model]))
    sizes = check.sizes
    most = max(sizes.batches)
    core = EngineCore(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            compile_cache_dir=str(_folder() / "programs"),
            background_compile=False,
            enable_prefix_caching=False,
            max_model_len=sizes.context + 2 * sizes.num_steps + 16,
            max_num_seqs=most,
            max_num_batched_tokens=max(sizes.token_budget, most),
            kv_memory_fraction=0.9,
            **options,
        )
    )
    try:
        yield core
    finally:
        core.close()
        for array in jax.live_arrays():
            array.delete()


def _measure(check: Check, core: EngineCore, batch: int) -> Row:
    """Milliseconds of a decode step, and tokens per second of the prompts before."""
    sizes = check.sizes
    rng = np.random.default_rng(batch)
    vocab_size, num_tokens = core.ready.vocab_size, 2 * sizes.num_steps
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    for index in range(batch):
        prompt = rng.integers(0, vocab_size, sizes.context).tolist()
        core.add(AddRequest(f"{batch}-{index}", prompt, params, 0, num_tokens))
    seen: set[str] = set()
    while len(seen) < batch:  # until each has its first token
        seen |= {output.sequence_id for output in core.step()}
    prefilled = time.perf_counter()
    counts = []
    times = [time.perf_counter()]
    while core.has_requests or core.loop.has_steps_in_flight:
        outputs = core.step()
        if outputs:
            counts.append(sum(len(output.token_ids) for output in outputs))
            times.append(time.perf_counter())
    gaps = np.diff(times)[[count == batch for count in counts]]
    step_seconds = statistics.median(gaps.tolist()) if len(gaps) else float("nan")
    floor = floor_of(core.runner.blueprint, batch, sizes.context + sizes.num_steps)
    floor_seconds = max(floor.num_bytes / check.peak_bytes, floor.flops / check.peak_flops)
    return {
        "prefill_tokens_per_s": batch * sizes.context / (prefilled - started),
        "step_ms": 1e3 * step_seconds,
        "floor_ms": 1e3 * floor_seconds,
        "share": floor_seconds / step_seconds,
        "tokens_per_s": batch / step_seconds,
        "ok": bool(len(gaps)),
    }


def _attention(check: Check) -> Callable[..., jax.Array]:
    if check.gpu is None:
        return paged_attention_xla
    from jaxpage.ops.attention_triton import paged_attention_triton

    return functools.partial(paged_attention_triton, gpu=check.gpu)


def _kv_write(check: Check) -> Callable[..., Any]:
    if check.gpu is None:
        return rotate_and_write_kv
    from jaxpage.ops.kv_write_triton import rotate_and_write_kv_triton

    return functools.partial(rotate_and_write_kv_triton, gpu=check.gpu)


def _error(got: jax.Array, wanted: jax.Array) -> float:
    """Norm of the difference to norm of what is wanted, of all that is wanted to be a number."""
    numbers = np.asarray(wanted, np.float64)
    is_number = ~np.isnan(numbers)
    difference = np.asarray(got, np.float64)[is_number] - numbers[is_number]
    return float(np.linalg.norm(difference) / np.linalg.norm(numbers[is_number]))


def _seconds(function: Callable[..., Any], *args: Any, repeats: int = 20) -> float:
    """Of one run in a row of them, after a first that compiles."""
    jax.block_until_ready(function(*args))
    started = time.perf_counter()
    for _ in range(repeats):
        result = function(*args)
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / repeats


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="jaxpage-gpu-check-"))


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check jaxpage on this machine's GPU.")
    parser.add_argument("--json", metavar="FILE", help="write what is found there, too")
    parser.add_argument("--seconds", type=float, default=520, metavar="N", help="begin nothing after (%(default)s)")
    parser.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU, without Triton: numbers mean nothing"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if args.dry_run:
        jax.config.update("jax_platforms", "cpu")
    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry_run:
        print(f"gpu_check: JAX finds {device.device_kind} and no GPU; try --dry-run", file=sys.stderr)
        return 2
    gpu = None
    if not args.dry_run:
        gpu = GPU(device.core_count, int(device.compute_capability.replace(".", "")))
    print(f"{device.device_kind}, JAX {jax.__version__}" + (", dry run: the numbers mean nothing" * args.dry_run))
    check = Check(DRY if args.dry_run else CARD, gpu, args.seconds)
    check.run([peaks, kernels, kv_writes, kernel_speed])
    for index, name in enumerate(check.sizes.models):
        check.model = name
        # Host and device are closest on the smallest model: there the modes differ most.
        check.run([start_up, engine, *([modes] if index == 0 else [])])
    if args.json:
        found = {"device": device.device_kind, "jax": jax.__version__, "dry_run": args.dry_run, "rows": check.rows}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print("all right" if check.is_right else "something is wrong: see the lines with ok False")
    return 0 if check.is_right else 1


if __name__ == "__main__":
    sys.exit(main())
