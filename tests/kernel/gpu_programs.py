"""Compiles step programs for GPUs that are described, not there, and prints what is in them, as JSON.

A process of its own: Triton compiles or interprets, as it was imported, and JAX finds GPUs or not.
"""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.kv_cache.spec import plan_layout
from jaxpage.models import llama
from jaxpage.models.params import map_weights
from jaxpage.ops.attention import KV_CACHE_SPEC
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.plan import NUM_EDITS, pack_edits, rules_layout
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state
from jaxpage.runner.step import ProgramConfig, compile_step

NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, NUM_ROWS = 2, 2048, 16, 4096, 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
}
BUCKETS = {"decode": Bucket(8, 8, 1), "mixed": Bucket(512, 16, 512)}

# XLA's GpuTargetConfigProto, from the data sheets.
_GPU = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  threads_per_core_limit: 2048  fpus_per_core: %(fpus)d  registers_per_core_limit: 65536
  registers_per_block_limit: 65536  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  core_count: %(cores)d  shared_memory_per_core: %(shared)d  shared_memory_per_block_optin: %(optin)d
  memory_bandwidth: %(bandwidth)d  l2_cache_size: %(l2)d  clock_rate_ghz: %(clock)s  device_memory_size: %(memory)d
  cuda_compute_capability { major: %(major)d minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
device_description_str: "%(name)s"
"""
H200 = {
    "name": "NVIDIA H200",
    "major": 9,
    "cores": 132,
    "fpus": 128,
    "clock": "1.98",
    "shared": 233472,
    "optin": 232448,
    "l2": 62914560,
    "bandwidth": 4.8e12,
    "memory": 150e9,
}
A100 = {
    "name": "NVIDIA A100-SXM4-80GB",
    "major": 8,
    "cores": 108,
    "fpus": 64,
    "clock": "1.41",
    "shared": 167936,
    "optin": 166912,
    "l2": 41943040,
    "bandwidth": 2.039e12,
    "memory": 85e9,
}


def gpu_mesh(gpu: dict[str, Any], num_gpus: int) -> Mesh:
    name = f"1x1x{num_gpus}"
    topology = topologies.get_topology_desc(name, "cuda", topology=name, target_config=_GPU % gpu)
    return Mesh(np.array(topology.devices), ("tp",))


def compile_for(mesh: Mesh, bucket: Bucket) -> jax.stages.Compiled:
    config = llama.config_from_hf(LLAMA)
    replicated = NamedSharding(mesh, PartitionSpec())
    params = map_weights(
        lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.bfloat16, sharding=weight.sharding(mesh)),
        llama.param_specs(config),
    )

    def shapes(make: Any, sharding: NamedSharding) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), jax.eval_shape(make)
        )

    layout = plan_layout(llama.kv_specs(config), BLOCK_SIZE)
    kv_cache = shapes(
        lambda: empty_kv_cache(layout, NUM_BLOCKS, np.dtype(jnp.bfloat16)), NamedSharding(mesh, KV_CACHE_SPEC)
    )
    rules_size = rules_layout(config.vocab_size).size

    def make_state() -> BatchState:
        hidden = jnp.zeros((max(bucket.num_tokens for bucket in BUCKETS.values()), config.hidden_size), jnp.bfloat16)
        return empty_state(NUM_ROWS, MAX_MODEL_LEN, 1, BLOCK_SIZE, 4, rules_size=rules_size, hidden=hidden)

    state = shapes(make_state, replicated)
    edits = pack_edits(np.zeros((2, 0), np.int32), NUM_EDITS)
    return compile_step(ProgramConfig(config, 4), bucket, params, kv_cache, state, edits)


def describe(program: jax.stages.Compiled) -> dict[str, Any]:
    """What a program is made of."""
    text = program.as_text()
    entry = text[text.index("\nENTRY ") :]  # without the branches: of them, only some run
    launches = [line for line in entry.splitlines() if re.search(r" (?:fusion|custom-call|copy|copy-start)\(", line)]
    kv_shape = rf"bf16\[{NUM_BLOCKS},2,{BLOCK_SIZE},\d+,\d+\]"

    def count(pattern: str, text: str) -> int:
        return len(re.findall(pattern, text))

    return {
        "collectives": {
            kind: n
            for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
            if (n := count(rf" {kind}(?:-start)?\(", entry))
        },
        "largest_gathered": max(
            (
                np.prod([int(n) for n in dims.split(",")]).item()
                for dims in re.findall(r" = [^=]*?\[([\d,]+)\][^=]* all-gather", text)
            ),
            default=0,
        ),
        "launches_per_layer": sum("/layer/" in line for line in launches) / NUM_LAYERS,
        "triton_kernels": count(r'custom_call_target="triton_kernel_call_ffi"', text),
        "makers_of_kv": sorted(set(re.findall(rf"= {kv_shape}\S* ([a-z\-]+)\(", text))),
        "kv_copies": count(rf"{kv_shape}[^\n]* copy(?:-start)?\(", text),
        "host_transfers": count(r" (?:infeed|outfeed|send|recv)\(|MoveToHost|S\(5\)", text),
        "aliased": count(r"(?:may|must)-alias", text[: text.index("\n")]),
        "scratch_bytes": program.memory_analysis().temp_size_in_bytes,
    }


if __name__ == "__main__":
    found = {}
    for name, gpu, num_gpus, kinds in (
        ("h200", H200, 1, ("decode", "mixed")),
        ("h200 x 8", H200, 8, ("decode", "mixed")),
        ("a100", A100, 1, ("mixed",)),
    ):
        mesh = gpu_mesh(gpu, num_gpus)
        for kind in kinds:
            found[f"{name} {kind}"] = describe(compile_for(mesh, BUCKETS[kind]))
    print(json.dumps(found))
