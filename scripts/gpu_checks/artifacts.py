"""An artifact of `jaxpage compile` for this GPU, and how it serves beside what was compiled here."""

import json
import time
from collections.abc import Iterator

import jax

from gpu_checks.child import Context, Row
from gpu_checks.device import target_name
from gpu_checks.serving import engine_options, few_buckets, open_engine, rows_of, warm_up
from jaxpage.aot.gpu_compiler import find_gpu_compiler

MOST_OF_COMPILED_HERE = 1.15
"""Times a step of an engine that compiled here."""
FOLDER = "artifact"


def compile_artifact(context: Context) -> Iterator[Row]:
    """What a machine without a GPU compiles, for the kind of GPU that `machine` found."""
    target = "cpu" if context.is_dry else _target_found(context)
    if target is None:
        yield {"case": "", "skipped": "gpu_targets.py does not describe this GPU"}
        return
    if target != "cpu":
        find_gpu_compiler()
    from jaxpage.aot.compile import compile_programs
    from jaxpage.config import EngineConfig

    started = time.monotonic()
    with few_buckets(context.sizes.batches):
        compile_programs(EngineConfig(**engine_options(context)), target, context.work / FOLDER)
    yield {"case": f"for {target}", "compile_s": time.monotonic() - started}


def artifact(context: Context) -> Iterator[Row]:
    """Decode from the artifact, beside the same decode of the part `engine`."""
    folder = context.work / FOLDER
    if not folder.exists():
        yield {"case": "", "skipped": "there is no artifact"}
        return
    if target_name() is None and not context.is_dry:
        yield {"case": "", "skipped": f"gpu_targets.py does not describe {jax.devices()[0].device_kind}"}
        return
    started = time.monotonic()
    core = open_engine(context, programs=str(folder))
    yield {"case": "start", "ready_s": time.monotonic() - started, **core.runner.stats}
    warm_up(context, core)
    for rows in context.sizes.batches:
        row, prompts = rows_of(context, core, rows)
        yield row
        yield prompts
        if here := _found(context, "engine", f"decode of {rows}").get("seconds"):
            value = row["seconds"] / here
            unit = "of a step compiled here"
            yield {"case": f"beside {rows}", "value": value, "unit": unit, "at_most": MOST_OF_COMPILED_HERE}


def _target_found(context: Context) -> str | None:
    """This process has no GPU: the part `machine` had."""
    from jaxpage.aot.targets import TARGETS

    device = next((row["device"] for row in _rows(context, "machine") if "device" in row), None)
    return next((name for name, target in TARGETS.items() if target.name == device), None)


def _found(context: Context, part: str, case: str) -> Row:
    return next((row for row in _rows(context, part) if row.get("case") == case), {})


def _rows(context: Context, part: str) -> list[Row]:
    """What a part that has ended found, none if it was not run."""
    file = context.out / "results.json"
    parts = json.loads(file.read_text("utf-8"))["parts"] if file.exists() else {}
    rows: list[Row] = parts.get(part, {}).get("rows", [])
    return rows
