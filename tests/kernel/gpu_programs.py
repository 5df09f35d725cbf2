"""Compiles step programs for GPUs that are described, not there, and prints what is in them, as JSON.

A process of its own: Triton compiles or interprets, as it was imported, and JAX finds GPUs or not.
"""

import dataclasses
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from jaxpage.config import EngineConfig
from jaxpage.models.config_only import ConfigOnly
from jaxpage.runner.blueprint import Blueprint, draw_blueprint
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.gpu_targets import TARGETS, described_mesh
from jaxpage.runner.plan import NUM_EDITS, pack_edits
from jaxpage.runner.program_facts import entry_of, facts_of
from jaxpage.runner.step import compile_step

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 2, 2048, 16
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
LARGE_OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
SMALL_OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 128}


class Config(ConfigOnly):
    """A `config.json` that is in no file."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.path, self.config, self.generation_config = Path("config"), config, {}


def blueprint(hf: dict[str, Any], options: dict[str, int], target: str, num_gpus: int) -> Blueprint:
    config = EngineConfig(
        tensor_parallel_size=num_gpus, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=4096, **options
    )
    mesh = described_mesh(TARGETS[target], num_gpus)
    return draw_blueprint(config, Config(hf), mesh, lambda _: TARGETS[target].pool_bytes)


def describe(it: Blueprint, bucket: Bucket) -> dict[str, Any]:
    """Compile a step, and say what it is made of."""
    edits = pack_edits(np.zeros((2, 0), np.int32), NUM_EDITS)
    program = compile_step(it.program_config, bucket, it.shapes.params, it.shapes.kv_cache, it.shapes.state, edits)
    text = program.as_text()
    launches = [line for line in entry_of(text).splitlines() if re.search(r" (?:fusion|custom-call|copy)\(", line)]
    kv_shape = rf"bf16\[{NUM_BLOCKS},2,{BLOCK_SIZE},\d+,\d+\]"
    return dataclasses.asdict(facts_of(program)) | {
        "num_rows": bucket.num_rows,
        "serialized_bytes": len(serialize_executable.serialize(program)[0]),
        "launches_per_layer": sum("jit(layer)" in line for line in launches) / NUM_LAYERS,
        "makers_of_kv": sorted(set(re.findall(rf"= {kv_shape}\S* ([a-z\-]+)\(", text))),
        "kv_copies": len(re.findall(rf"{kv_shape}[^\n]* copy(?:-start)?\(", text)),
        "num_state_arrays": len(jax.tree.leaves((it.shapes.kv_cache, it.shapes.state))),
    }


def programs() -> Iterator[tuple[str, Blueprint, Bucket]]:
    for target, num_gpus in (("h200", 1), ("h200", 8), ("a100", 1)):
        large = blueprint(LARGE, LARGE_OPTIONS, target, num_gpus)
        wanted = large.buckets[-1:] if target == "a100" else (large.buckets[-1], Bucket(64, 64, 1))
        for bucket in wanted:
            kind = "decode" if bucket.max_query_len == 1 else "mixed"
            yield f"large {target} x {num_gpus} {kind}", large, bucket
    small = blueprint(SMALL, SMALL_OPTIONS, "h200", 8)
    for bucket in small.buckets:
        kind = "decode" if bucket.max_query_len == 1 else "mixed"
        yield f"small h200 x 8 {kind} {bucket.num_tokens}", small, bucket


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(describe, it, bucket) for name, it, bucket in programs()}
    print(json.dumps({name: program.result() for name, program in found.items()}))
