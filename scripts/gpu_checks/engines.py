"""A synthetic Llama-3.1-8B through the engine, as it compiles on this device."""

import re
import time
from collections.abc import Iterator

import jax

from gpu_checks.child import Context, Row
from gpu_checks.keeping import compress
from gpu_checks.products import products_of
from gpu_checks.serving import decoding, in_mode, measure, memory_gib, open_engine, rows_of, warm_up
from gpu_checks.tracing import read_trace
from jaxpage.config import LOOP_NAMES
from jaxpage.engine.core import EngineCore
from jaxpage.runner.programs.step import STEP

DRAWS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k, top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
MOST_OF_A_DRAW = 1.1
"""Of a greedy step's time, what a step with another draw may take."""
HOST_SHARE = 0.5
"""Of a step at the most: what the host does for it, or it will hold up faster devices."""
TRACED_STEPS = 10


def engine(context: Context) -> Iterator[Row]:
    """Start, then prefill and decode at growing batches in the mode that serves by default."""
    core = _core(context)
    yield {"case": "start", **context.shared["start"]}
    for rows in context.sizes.batches:
        yield from rows_of(context, core, rows)
    yield {"case": "memory", **memory_gib()}


def draws(context: Context) -> Iterator[Row]:
    """The same decode with other ways to draw."""
    core, rows = _core(context), _middle(context)
    greedy = None
    for name, params in DRAWS.items():
        seconds = measure(context, core, rows, params)["seconds"]
        greedy = greedy or seconds
        yield {
            "case": f"{name} at {rows}",
            "value": seconds / greedy,
            "unit": "of a greedy step",
            "at_most": MOST_OF_A_DRAW,
            "step_ms": 1e3 * seconds,
        }


def modes(context: Context) -> Iterator[Row]:
    """The three loops beside one another."""
    core, rows = _core(context), _middle(context)
    for mode in LOOP_NAMES:
        with in_mode(core, mode):
            row = measure(context, core, rows)
        yield {"case": f"{mode} at {rows}", "step_ms": 1e3 * row["seconds"], **_host(row)}
        if mode == "resident":
            host = sum(row[f"host_us_{name}"] for name in ("schedule", "dispatch", "update"))
            value = 1e-6 * host / row["seconds"]
            yield {"case": "host per step", "value": value, "unit": "of the step", "at_most": HOST_SHARE}


def programs(context: Context) -> Iterator[Row]:
    """Which kernels XLA made of the products of each decode step; the programs' texts are kept."""
    core = _core(context)
    table = core.runner._programs
    folder = context.out / "programs"
    folder.mkdir(exist_ok=True)
    for bucket in sorted(table.ready(STEP)):
        text = table.get(STEP.name, bucket).as_text() or ""
        name = f"step-{bucket.num_tokens}-{bucket.num_rows}-{bucket.max_query_len}"
        compress(text, folder / f"{name}.hlo.gz")
        found = products_of(text)
        kinds = {f"{it.shape}: {it.config}" for it in found}
        yield {"case": name, "num_products": len(found), "configs": sorted(kinds)}


def trace(context: Context) -> Iterator[Row]:
    """Ten decode steps under the profiler: how busy the device is, and what its host spends on graphs."""
    core, rows = _core(context), _middle(context)
    folder = context.out / "trace"
    steps = decoding(core, rows, 4 + 2 * TRACED_STEPS)
    for _ in range(6):
        next(steps)
    jax.profiler.start_trace(str(folder))
    started = time.perf_counter()
    try:
        for _ in range(TRACED_STEPS):
            next(steps)
    finally:
        seconds = time.perf_counter() - started
        jax.profiler.stop_trace()
        for _ in steps:
            pass
    found = read_trace(folder)
    yield {"case": f"{TRACED_STEPS} steps of {rows}", "step_ms": 1e3 * seconds / TRACED_STEPS, **vars(found)}
    if found.num_device_events:
        busy = found.busy_seconds / max(found.span_seconds, 1e-9)
        yield {"case": "device busy", "value": busy, "unit": "of the time", "at_least": 0.9}
        updates = found.num_graph_updates / TRACED_STEPS
        yield {"case": "graph updates", "value": updates, "unit": "a step", "at_most": 2.0}


def tensor_parallel(context: Context) -> Iterator[Row]:
    """The same model divided among all devices."""
    num_devices = len(jax.devices())
    heads = context.sizes.model["num_attention_heads"]
    while num_devices > 1 and heads % num_devices:
        num_devices -= 1
    if num_devices < 2:
        yield {"case": "", "skipped": "there is one device"}
        return
    core = open_engine(context, tensor_parallel_size=num_devices)
    warm_up(context, core)
    for rows in context.sizes.batches:
        yield {"case": f"decode of {rows} on {num_devices}", **measure(context, core, rows)}


def _core(context: Context) -> EngineCore:
    """The engine that parts of this process share; started by the first of them."""
    if "core" not in context.shared:
        started = time.monotonic()
        core = open_engine(context)
        ready = time.monotonic() - started
        warm_up(context, core)
        stats = core.stats()
        names = ("num_programs", "num_programs_loaded", "compile_seconds")
        context.shared["start"] = {"ready_s": ready, **{name: stats[name] for name in names}}
        context.shared["core"] = core
    found: EngineCore = context.shared["core"]
    return found


def _middle(context: Context) -> int:
    rows = sorted(context.sizes.batches)
    return rows[len(rows) // 2]


def _host(row: Row) -> Row:
    return {name: value for name, value in row.items() if re.match("host_us_|waits_share", name)}
