"""Compiles step programs for GPUs that are described, not there, and prints what is in them, as JSON.

A process of its own: Triton compiles or interprets, as it was imported, and JAX finds GPUs or not.

Every bucket of every engine is compiled until its facts are settled: XLA's passes run as they are, and what they leave
is not made into good machine code. So are forks, and the draws behind the largest decode.
"""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from jaxpage.aot.facts import entry_of, facts_of
from jaxpage.aot.gemms import gemms_of
from jaxpage.aot.targets import TARGETS, compiler_options, described_mesh
from jaxpage.config import EngineConfig
from jaxpage.models.checkpoints.weightless import ConfigOnly
from jaxpage.ops.attention import kv_write_triton, paged_triton
from jaxpage.ops.sampling.sampling import SamplingState, draw
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.engine_plan import EnginePlan, plan_engine
from jaxpage.runner.model import model_of_checkpoint
from jaxpage.runner.programs import program as program_module
from jaxpage.runner.programs.fork import FORK
from jaxpage.runner.programs.pool import POOL
from jaxpage.runner.programs.program import compile_program, jit_to_measure
from jaxpage.runner.programs.sample import SAMPLE, Draws
from jaxpage.runner.programs.score import SCORE, SCORE_ROWS
from jaxpage.runner.programs.step import STEP

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 2048, 16
FULL_BLOCKS = 950_000
"""124 GB: what an H200 has beside a few layers of an 8B model."""
KV_SHAPE = rf"bf16\[{NUM_BLOCKS},2,{BLOCK_SIZE},\d+,\d+\]"
LARGE = {  # Llama 3.1 8B, but for the number of its layers
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
SMALL = LARGE | {  # its 2 KV heads are copied for 8 GPUs
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LARGE_OPTIONS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
SMALL_OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5}


class Config(ConfigOnly):
    """A `config.json` that is in no file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.path, self.config, self.generation_config = Path("config"), config, {}


def plan_of(
    hf: dict[str, Any], options: dict[str, Any], target: str, num_gpus: int, num_blocks: int = NUM_BLOCKS
) -> EnginePlan:
    config = EngineConfig(
        tensor_parallel_size=num_gpus, num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=4096, **options
    )
    model = model_of_checkpoint(config, Config(hf), described_mesh(TARGETS[target], num_gpus))
    return plan_engine(config, model, lambda _: TARGETS[target].pool_bytes)


def describe_step(it: EnginePlan, bucket: Bucket) -> dict[str, Any]:
    """Compile a step, and say what it is made of."""
    program = compile_program(STEP, it, bucket)
    text = program.as_text()
    launches = [line for line in entry_of(text).splitlines() if re.search(r" (?:fusion|custom-call|copy)\(", line)]
    described = describe_with_cache(it, program)
    logits = it.shapes["logits", it.program_config.num_logits(bucket)]
    shape = rf"f32\[{logits.shape[0]},{logits.sharding.shard_shape(logits.shape)[1]}\]"
    return described | {
        "num_donated": described["num_donated"] + 2,  # with hidden states and logits
        "logits_copies": len(re.findall(rf"= {shape}\S* copy(?:-start)?\(", text)),
        "launches_per_layer": sum("jit(layer)" in line for line in launches) / NUM_LAYERS,
        "makers_of_kv": sorted(set(re.findall(rf"= {KV_SHAPE}\S* ([a-z\-]+)\(", text))),
    }


def describe_fork(it: EnginePlan) -> dict[str, Any]:
    """The same of what copies rows and blocks."""
    return describe_with_cache(it, compile_program(FORK, it, None))


def describe_with_cache(it: EnginePlan, program: jax.stages.Compiled) -> dict[str, Any]:
    return describe(program) | {
        "kv_copies": len(re.findall(rf"{KV_SHAPE}[^\n]* copy(?:-start)?\(", program.as_text() or "")),
        "num_donated": len(jax.tree.leaves((it.shapes["kv_cache"], it.shapes["state"]))),
    }


def describe_draw(it: EnginePlan, kind: SamplerKind) -> dict[str, Any]:
    """The same of a draw behind the largest decode, which checks drafts if there are any."""
    num_rows, num_draws = it.config.max_num_seqs, 1 + it.config.max_drafts
    program = compile_program(SAMPLE, it, Draws(kind, num_rows, num_draws))
    return describe(program) | {"num_rows": num_rows, "num_donated": len(jax.tree.leaves(it.shapes["state"]))}


def describe_small(it: EnginePlan) -> dict[str, Any]:
    """The same of the programs that look at hidden states, by their names."""
    return {each.name: describe(compile_program(each, it, None)) for each in (SCORE, SCORE_ROWS, POOL)}


def describe_sampler(it: EnginePlan) -> dict[str, Any]:
    """The same of the draw that `jaxpage bench sampler` measures by itself."""
    num_rows = it.config.max_num_seqs
    logits = it.shapes["logits", num_rows]
    floats, ints = (jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (np.float32, np.int32))
    seed = jax.ShapeDtypeStruct((num_rows, 2), np.uint32)
    sampling: Any = SamplingState(floats, ints, floats, floats, seed, ints)
    return describe(jit_to_measure(partial(draw, branch_free=True), logits, sampling))


def describe(program: jax.stages.Compiled) -> dict[str, Any]:
    serialized, _, _ = serialize_executable.serialize(program)
    gemms = [dataclasses.asdict(gemm) for gemm in gemms_of(program.as_text() or "")]
    return dataclasses.asdict(facts_of(program)) | {"serialized_bytes": len(serialized), "gemms": gemms}


KERNELS = (paged_triton._attention_kernel, paged_triton._reduce_kernel, kv_write_triton._kernel)


class Structure:
    """While it lasts, XLA does all that settles a program's facts, and writes no machine code worth the time.

    Triton's kernels are called as they are and do nothing: `gpu_kernels.py` compiles them.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._compiler_options = program_module.compiler_options
        self._sources = [kernel.src for kernel in KERNELS]

    def __enter__(self) -> None:
        (device,) = described_mesh(TARGETS["h200"], 1).devices.flat
        toolkit, here = Path(compiler_options(device)["xla_gpu_cuda_data_dir"]), Path(self._folder.name)
        (here / "nvvm").symlink_to(toolkit / "nvvm")
        assembler = here / "bin/ptxas"
        assembler.parent.mkdir()
        assembler.write_text(ASSEMBLER.format(real=toolkit / "bin/ptxas"), "utf-8")
        assembler.chmod(0o700)
        changes = {"xla_gpu_cuda_data_dir": str(here), "xla_backend_optimization_level": 0}
        program_module.compiler_options = lambda *arguments: compiler_options(*arguments) | changes
        for kernel in KERNELS:
            kernel._unsafe_update_src(kernel.src[: kernel.src.index("):\n")] + "):\n    pass\n")

    def __exit__(self, *_: object) -> None:
        program_module.compiler_options = self._compiler_options
        for kernel, source in zip(KERNELS, self._sources, strict=True):
            kernel._unsafe_update_src(source)
        self._folder.cleanup()


ASSEMBLER = """#!/bin/sh
case "$*" in *--version*) exec {real} --version ;; esac
while [ $# -gt 1 ]; do
    [ "$1" = -o ] && echo nothing >"$2"
    shift
done
"""


def engines() -> Iterator[tuple[str, EnginePlan]]:
    for target, num_gpus in (("h200", 1), ("h200", 8), ("a100", 1)):
        yield f"large {target} x {num_gpus}", plan_of(LARGE, LARGE_OPTIONS, target, num_gpus)
        yield f"small {target} x {num_gpus}", plan_of(SMALL, SMALL_OPTIONS, target, num_gpus)


def name_of(bucket: Bucket) -> str:
    return f"{'decode' if bucket.max_query_len == 1 else 'mixed'} {bucket.num_tokens}"


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        its = dict(engines())
        largest = Bucket(32, 32, 1)
        in_earnest = pool.submit(describe_step, its["large h200 x 8"], largest).result()
        with Structure():
            steps = {
                f"{name} {name_of(bucket)}": pool.submit(describe_step, it, bucket)
                for name, it in its.items()
                for bucket in it.buckets
            }
            draws = {
                kind.name: {name: pool.submit(describe_draw, it, kind) for name, it in its.items()}
                for kind in SamplerKind
            }
            speculating = plan_of(SMALL, SMALL_OPTIONS | {"speculative_config": SPECULATIVE}, "h200", 1)
            draft = pool.submit(describe_draw, speculating, SamplerKind.GREEDY)
            full = plan_of(LARGE, LARGE_OPTIONS, "h200", 1, num_blocks=FULL_BLOCKS)
            full_step = pool.submit(describe_step, full, largest)
            sampler = pool.submit(describe_sampler, its["small h200 x 1"])
            small = {name: pool.submit(describe_small, it) for name, it in its.items()}
            forks = {name: pool.submit(describe_fork, it) for name, it in its.items()}
            found = {
                "in earnest": {f"large h200 x 8 {name_of(largest)}": in_earnest},
                "steps": {name: program.result() for name, program in steps.items()},
                "forks": {name: program.result() for name, program in forks.items()},
                "small": {name: programs.result() for name, programs in small.items()},
                "drafts": {"small h200 x 1": draft.result()},
                "full": {"large h200 x 1": full_step.result()},
                "sampler": {"small h200 x 1": sampler.result()},
            }
            for kind, programs in draws.items():
                found[kind] = {name: program.result() for name, program in programs.items()}
    print(json.dumps(found))
