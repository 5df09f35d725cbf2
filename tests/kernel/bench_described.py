"""What a step costs the host: `python tests/kernel/bench_described.py --rows 8 256` on devices that `described_driver/`
describes. They compute nothing, so what is left is the engine's loop, JAX's dispatch and what XLA asks of a driver.

All rows decode, greedily. Milliseconds are means per step. `thread` is the time that the engine's thread has a
processor, `best` the same of the fastest tenth of the steps, for a machine that others use as well; `process` that of
all threads, the stand-in devices' among them; phases are by the clock, and "fetch" waits.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MAX_MODEL_LEN, BLOCK_SIZE, NUM_WARM = 512, 16, 40
"""NUM_WARM: decode steps before those that are measured."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--engine-mode", default="resident")
    parser.add_argument("--profile", action="store_true", help="print where Python spends the time, and distort it")
    parser.add_argument("--keep", type=Path, help="folder for artifacts, taken from there the next time")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def prepare(folder: Path, args: argparse.Namespace, num_rows: int) -> dict[str, Any]:
    """Write a model of the shape and compile its artifact, unless they are there. Returns the engine's options."""
    import tiny
    from described import compile_artifact

    model = folder / f"model-{args.layers}"
    if not model.exists():
        config = tiny.TINY["llama"] | {
            "num_attention_heads": 8,
            "num_hidden_layers": args.layers,
            "max_position_embeddings": MAX_MODEL_LEN,
        }
        tiny.write_checkpoint(model, config, tiny.make_weights(config))
    options = {
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": max(32, num_rows),
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": num_rows * MAX_MODEL_LEN // BLOCK_SIZE + 1,
        "block_size": BLOCK_SIZE,
        "tensor_parallel_size": args.tensor_parallel_size,
    }
    programs = folder / f"programs-{args.layers}-{num_rows}-{args.tensor_parallel_size}"
    if not programs.exists():
        compile_artifact(programs, model, "h200", options)
    return options | {"model": str(model), "programs": str(programs), "engine_mode": args.engine_mode}


def measure(options: dict[str, Any], num_steps: int, profile: bool) -> dict[str, Any]:
    """In the process whose CUDA libraries are the stand-ins."""
    from described_engine import Driver, see_devices

    see_devices()
    from jaxpage.config import EngineConfig
    from jaxpage.engine.core import EngineCore
    from jaxpage.engine.loops import freeze_gc
    from jaxpage.sampling_params import SamplingParams
    from jaxpage.wire import AddRequest

    core, driver = EngineCore(EngineConfig(strict_shapes=True, **options)), Driver()
    freeze_gc()
    num_rows = options["max_num_seqs"]
    for index in range(num_rows):  # rows begin their blocks in different steps
        prompt = [5] * (3 + index % BLOCK_SIZE)
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - len(prompt), temperature=0.0, ignore_eos=True)
        core.add(AddRequest(str(index), prompt, params, index, params.max_tokens or 0))
    decoding = 0
    while decoding < NUM_WARM:
        core.step()
        decoding = decoding + 1 if core.loop.step_tokens[-1] == num_rows and not core.scheduler.waiting else 0
    profiler = cProfile.Profile()
    before, phases, cpu = driver.counts(), dict(core.loop.seconds), (time.thread_time(), time.process_time())
    started = time.perf_counter()
    if profile:
        profiler.enable()
    taken = []
    for _ in range(num_steps):
        at = time.thread_time()
        core.report(core.step())
        taken.append(time.thread_time() - at)
    profiler.disable()
    clock = time.perf_counter() - started
    thread, process = time.thread_time() - cpu[0], time.process_time() - cpu[1]
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    per_step = 1e3 / num_steps
    return {
        "rows": num_rows,
        "clock_ms": clock * per_step,
        "thread_ms": thread * per_step,
        "best_ms": 1e3 * statistics.mean(sorted(taken)[: max(num_steps // 10, 1)]),
        "process_ms": process * per_step,
        **{f"{name}_ms": (seconds - phases[name]) * per_step for name, seconds in core.loop.seconds.items()},
        **{name: (count - before[name]) / num_steps for name, count in driver.counts().items() if count > before[name]},
    }


def main() -> None:
    args = parse()
    sys.path[:0] = [str(HERE), str(HERE.parent / "golden")]
    if args.inside is not None:
        print(json.dumps(measure(json.loads(args.inside), args.steps, args.profile)))
        return
    from described import A_LITTLE_MEMORY
    from described_machine import build_libraries, environment_there, why_not

    from jaxpage.aot.targets import TARGETS

    if (why := why_not()) is not None:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        libraries = Path(temporary, "libraries")
        libraries.mkdir()
        build_libraries(TARGETS["h200"], libraries)
        for num_rows in args.rows:
            options = prepare(folder, args, num_rows)
            done = subprocess.run(
                [
                    *(sys.executable, __file__, "--inside", json.dumps(options), "--steps", str(args.steps)),
                    *(["--profile"] if args.profile else []),
                ],
                env=environment_there(libraries, args.tensor_parallel_size, **A_LITTLE_MEMORY),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout)
            print("  ".join(f"{name} {value:.3g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
