"""Synthetic engines, and what their steps take."""

import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from gpu_checks.child import Context, Row
from jaxpage.bench.roofline import floor_of
from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore
from jaxpage.engine.loops import LOOPS
from jaxpage.runner.buckets import Bucket, choose_bucket, make_buckets
from jaxpage.sampling_params import SamplingParams
from jaxpage.wire import AddRequest, TokenOutput

STEP_SHARES = {1: 1 / 1.25, 32: 1 / 1.3, 256: 1 / 1.4}
"""Of a step's floor to its time, at so many rows or up to the next."""
PREFILL_SHARE = 0.35
"""Of a large product's speed, what prompts should reach, sent in and scheduled."""
PATIENCE_SECONDS = 30.0
"""After so long without a token, an engine hangs."""
GREEDY: dict[str, Any] = {"temperature": 0.0}


def engine_options(context: Context, **options: Any) -> dict[str, Any]:
    """Of an engine for all batches of these sizes: the same for one that compiles and for an artifact."""
    sizes = context.sizes
    folder = context.work / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(sizes.model), "utf-8")
    longest = sizes.context + 2 * sizes.num_steps + 16
    blocks = max(rows * (-(-(prompt + 2 * sizes.num_steps + 16) // 16)) for rows, prompt in sizes.batches.items())
    return {
        "model": str(folder),
        "load_format": "dummy",
        "background_compile": False,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_seqs": max(sizes.batches),
        "max_num_batched_tokens": max(sizes.token_budget, max(sizes.batches)),
        "num_blocks": blocks + 1,
        **options,
    }


@contextlib.contextmanager
def few_buckets(batches: dict[int, int]) -> Iterator[None]:
    """While it lasts, engines have the buckets that these batches run in, and no others, which take time to compile."""

    def needed(*args: Any, **kwargs: Any) -> list[Bucket]:
        table = make_buckets(*args, **kwargs)
        decode = [choose_bucket(table, rows, rows, 1) for rows in batches]
        prompts = max(bucket for bucket in table if bucket.takes_any_query)
        return sorted({*decode, prompts})

    with patch("jaxpage.runner.engine_plan.make_buckets", needed):
        yield


def open_engine(context: Context, **options: Any) -> EngineCore:
    """An engine that is closed when the process has done its parts."""
    with few_buckets(context.sizes.batches):
        core = EngineCore(EngineConfig(**engine_options(context, **options)))
    context.stack.callback(core.close)
    return core


def measure(context: Context, core: EngineCore, rows: int, params: dict[str, Any] = GREEDY) -> Row:
    """Seconds of a decode step, tokens per second of the prompts before, and where the host spends its time.

    Raises `RuntimeError` if the engine gives nothing for too long.
    """
    sizes, prompt_len = context.sizes, context.sizes.batches[rows]
    num_tokens = 2 * sizes.num_steps
    started = time.perf_counter()
    _add(core, rows, prompt_len, num_tokens, params)
    seen: set[str] = set()
    for outputs in steps_of(core):
        seen |= {output.sequence_id for output in outputs}
        if len(seen) == rows:  # each has its first token
            break
    prefilled = time.perf_counter()
    seconds_before, steps_before = dict(core.loop.seconds), core.loop.num_steps
    counts, times = [], [time.perf_counter()]
    for outputs in steps_of(core):
        if outputs:
            counts.append(sum(len(output.token_ids) for output in outputs))
            times.append(time.perf_counter())
    full = [gap for gap, count in zip(np.diff(times).tolist(), counts, strict=True) if count == rows]
    if not full:
        raise RuntimeError(f"no step gave {rows} rows a token each: {sorted(set(counts))}")
    seconds = statistics.median(full)
    num_steps = max(core.loop.num_steps - steps_before, 1)
    host = {name: (spent - seconds_before[name]) / num_steps for name, spent in core.loop.seconds.items()}
    floor = floor_of(core.runner.plan, rows, prompt_len + sizes.num_steps)
    return {
        "seconds": seconds,
        "bytes": floor.num_bytes,
        "flops": floor.flops,
        "share": STEP_SHARES[max((most for most in STEP_SHARES if most <= rows), default=1)],
        "tokens_per_s": rows / seconds,
        "slowest_ms": 1e3 * max(full),
        "prefill_s": prefilled - started,
        "prefill_tokens_per_s": rows * prompt_len / (prefilled - started),
        **{f"host_us_{name}": 1e6 * spent for name, spent in host.items()},
        # While it waits for a result, the device works; what the host does meanwhile is free.
        "waits_share": host["fetch"] / seconds,
    }


def rows_of(context: Context, core: EngineCore, rows: int) -> Iterator[Row]:
    """A decode, and the prompts before it."""
    row = measure(context, core, rows)
    yield {"case": f"decode of {rows}", **row}
    num_tokens = rows * context.sizes.batches[rows]
    flops = num_tokens * row["flops"] / rows
    yield {"case": f"{num_tokens} prompt tokens", "seconds": row["prefill_s"], "flops": flops, "share": PREFILL_SHARE}


def warm_up(context: Context, core: EngineCore) -> None:
    """Let a request through: the first step of each program makes its graph."""
    for rows, prompt_len in context.sizes.batches.items():
        _add(core, rows, min(prompt_len, 16), 4, GREEDY)
        for _ in steps_of(core):
            pass


def decoding(core: EngineCore, rows: int, num_tokens: int) -> Iterator[Sequence[Any]]:
    """What the steps of so many short requests give, one after the other; all must be taken."""
    _add(core, rows, 8, num_tokens, GREEDY)
    return steps_of(core)


@contextlib.contextmanager
def in_mode(core: EngineCore, mode: str) -> Iterator[None]:
    """While it lasts, an idle engine runs in another mode."""
    loop = core.loop
    core.loop = LOOPS[mode](loop.scheduler, core.runner)
    try:
        yield
    finally:
        core.loop = loop


def memory_gib() -> dict[str, float]:
    """Of the first device: what is in use, and the most that was."""
    stats = jax.devices()[0].memory_stats() or {}
    return {f"{name}_gib": stats.get(name, 0) / 2**30 for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")}


def _add(core: EngineCore, rows: int, prompt_len: int, num_tokens: int, params: dict[str, Any]) -> None:
    rng = np.random.default_rng(rows)
    options = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    for index in range(rows):
        prompt = rng.integers(0, core.ready.vocab_size, prompt_len).tolist()
        core.add(AddRequest(f"{time.monotonic_ns()}-{index}", prompt, options, 0, num_tokens))


def steps_of(core: EngineCore) -> Iterator[list[TokenOutput]]:
    """What each step gives, until nothing is left to do."""
    waited_since = time.monotonic()
    while core.has_work:
        outputs = [output for output in core.step() if isinstance(output, TokenOutput)]
        now = time.monotonic()
        if outputs:
            waited_since = now
        elif now - waited_since > PATIENCE_SECONDS:
            raise RuntimeError(f"the engine gave nothing for {PATIENCE_SECONDS:.0f} s")
        yield outputs
