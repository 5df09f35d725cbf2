"""What `scripts/tune_gemms` runs: compiles steps on this machine's GPU, where XLA times tiles, and keeps its choice."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax

from jaxpage.aot.gemms import gemms_of, main_launch, num_library_products
from jaxpage.config import EngineConfig
from jaxpage.ops.attention.launch import GPU, TUNED, next_power_of_two
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.devices import free_bytes, make_mesh
from jaxpage.runner.engine_plan import EnginePlan, plan_engine
from jaxpage.runner.model import model_to_compile
from jaxpage.runner.programs.program import compile_program
from jaxpage.runner.programs.step import STEP

TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 2048]


def tune(it: EnginePlan, num_tokens: int) -> dict[str, object] | None:
    """A row of the file; None where libraries do all of a step's products, which have no tiles to keep."""
    bucket = Bucket(num_tokens, min(num_tokens, it.config.max_num_seqs), num_tokens if num_tokens > 256 else 1)
    program = compile_program(STEP, it, bucket)
    text = program.as_text() or ""
    gemms = gemms_of(text)
    launch = main_launch(gemms)
    print(
        f"{num_tokens:6} tokens: {len(gemms)} products of Triton's, {num_library_products(text)} of libraries; {launch}"
    )
    if launch is None:
        return None
    return {"num_tokens": next_power_of_two(num_tokens), "launch": dataclasses.asdict(launch)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="tune_gemms", description="Keep the tiles that XLA takes on this GPU.")
    parser.add_argument("--model", required=True, metavar="DIR", help="a model's config.json is enough")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="of steps (%(default)s)")
    parser.add_argument("--out", type=Path, default=TUNED, metavar="FOLDER", help="%(default)s")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        print(f"tune_gemms: JAX finds {device.device_kind} and no GPU", file=sys.stderr)
        return 2
    most = max(*args.tokens, 256)
    config = EngineConfig(model=args.model, max_num_seqs=256, max_num_batched_tokens=most, num_blocks=1024)
    it = plan_engine(config, model_to_compile(config, make_mesh(config)), free_bytes)
    launches = [row for num_tokens in args.tokens if (row := tune(it, num_tokens)) is not None]
    gpu = GPU(device.core_count, int(device.compute_capability.replace(".", "")))
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"gemms_{gpu.tuned_file}"
    found = {"device": device.device_kind, "jax": jax.__version__, "launches": launches}
    file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(f"{len(launches)} launches in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
