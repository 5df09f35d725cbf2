"""Loads a checkpoint's weights onto four devices, of one process or of two, and prints what was read, as JSON.

A process of its own, because how many devices a CPU has is settled when JAX starts. Arguments: the checkpoint's folder,
the number of processes, this one's number, and where they find each other.
"""

import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpage.models.checkpoints.checkpoint import Index
from jaxpage.models.checkpoints.safetensors import SafetensorsCheckpoint
from jaxpage.models.stored import Join, Source
from jaxpage.models.weights import Weight, load_params, param_shapes, weight
from jaxpage.ops.matmul import embed_rows, linear

VOCAB, EMBED, FFN, EXPERTS, HEAD_DIM = 2048, 512, 1024, 4, 64
EXPERT_FFN = 256
TENSORS: dict[str, tuple[int, ...]] = {
    "embed": (VOCAB, EMBED),
    "norm": (EMBED,),
    "down": (EMBED, FFN),
    "k": (2 * HEAD_DIM, EMBED),
    "fused": (3 * EMBED, EMBED),
} | {f"{part}.{expert}": (EXPERT_FFN, EMBED) for expert in range(EXPERTS) for part in ("gate", "up")}


class Counting:
    """A checkpoint that counts the bytes read of each tensor."""

    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        self.path, self.config, self.generation_config = checkpoint.path, checkpoint.config, {}
        self.num_bytes: Counter[str] = Counter()
        self._checkpoint = checkpoint

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        values = self._checkpoint.read(name, shape, index)
        self.num_bytes[name] += values.nbytes
        return values


def experts() -> Weight:
    """[experts, 2, ffn, embed], of a gate's and an up projection's tensor for each expert."""

    def projection(name: str) -> Source:
        return Source(name, TENSORS[name], (1, 1, EXPERT_FFN, EMBED))

    pairs = [Join((projection(f"gate.{i}"), projection(f"up.{i}")), axis=1) for i in range(EXPERTS)]
    return Weight(tuple(pairs), ("part", "part", "ffn", "embed"))


def specs() -> dict[str, Weight]:
    keys = Source("k", TENSORS["k"], (2, HEAD_DIM, EMBED), copies=2)
    middle = Source("fused", TENSORS["fused"], (EMBED, EMBED), index=(slice(EMBED, 2 * EMBED),))
    return {
        "embed": weight("embed", TENSORS["embed"], ("vocab", "embed")),
        "norm": weight("norm", TENSORS["norm"], ("embed",), dtype=np.dtype(np.float32)),
        "down": weight("down", TENSORS["down"], ("embed", "ffn")),
        "k": Weight((keys,), ("kv_heads", "head_dim", "embed")),
        "middle": Weight((middle,), ("ffn", "embed")),
        "experts": experts(),
    }


def expected(checkpoint: SafetensorsCheckpoint) -> dict[str, np.ndarray]:
    """The same weights out of whole tensors, in float32."""
    whole = {name: checkpoint.read(name, shape) for name, shape in TENSORS.items()}
    return {
        "embed": whole["embed"],
        "norm": whole["norm"],
        "down": whole["down"],
        "k": np.repeat(whole["k"].reshape(2, HEAD_DIM, EMBED), 2, axis=0),
        "middle": whole["fused"][EMBED : 2 * EMBED],
        "experts": np.array([[whole[f"gate.{i}"], whole[f"up.{i}"]] for i in range(EXPERTS)]),
    }


def is_as_declared(params: Any, shapes: Any) -> bool:
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True)
    return all((a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) for a, b in pairs)


def has_values(array: jax.Array, whole: np.ndarray) -> bool:
    return all(np.array_equal(shard.data, whole[shard.index].astype(array.dtype)) for shard in array.addressable_shards)


def quantized_errors(checkpoint: SafetensorsCheckpoint, mesh: Mesh) -> dict[str, float]:
    """The largest error of products and lookups in int8, as a share of what rounding can make it."""
    whole, dtype = expected(checkpoint), np.dtype(np.float32)
    declared = {
        "embed": weight("embed", TENSORS["embed"], ("vocab", "embed"), quantize="int8"),
        "down": weight("down", TENSORS["down"], ("embed", "ffn"), quantize="int8"),
    }
    params = load_params(declared, checkpoint, dtype, mesh)
    assert is_as_declared(params, param_shapes(declared, dtype, mesh))
    x = np.random.default_rng(2).normal(size=(8, FFN)).astype(np.float32)
    tokens = np.array([0, 5, VOCAB - 1])
    half_step = {name: np.abs(whole[name]).max(axis=-1) / 127 / 2 for name in declared}
    product = np.abs(np.asarray(linear(x, params["down"])) - x @ whole["down"].T)
    looked_up = np.abs(np.asarray(embed_rows(params["embed"], tokens)) - whole["embed"][tokens])
    return {
        "product": float((product / (half_step["down"] * np.abs(x).sum(axis=-1)[:, None])).max()),
        "lookup": float((looked_up / half_step["embed"][tokens, None]).max()),
    }


def transient_bytes(checkpoint: SafetensorsCheckpoint, mesh: Mesh) -> int:
    """The most that is allocated on the host between two shards' arrivals on their devices, the shard included."""
    largest, device_put = 0, jax.device_put

    def measured(host: np.ndarray, device: jax.Device) -> jax.Array:
        nonlocal largest, kept
        largest = max(largest, tracemalloc.get_traced_memory()[1] - kept)
        array = jax.block_until_ready(device_put(host, device))
        is_device_memory = array.unsafe_buffer_pointer() == host.ctypes.data  # where alignment allows it, on a CPU
        tracemalloc.reset_peak()
        kept = tracemalloc.get_traced_memory()[0] - (0 if is_device_memory else host.nbytes)
        return array

    load_params(specs(), checkpoint, np.dtype("bfloat16"), mesh)  # what JAX keeps once and for all
    tracemalloc.start()
    kept = tracemalloc.get_traced_memory()[0]
    jax.device_put = measured
    load_params(specs(), checkpoint, np.dtype("bfloat16"), mesh)
    jax.device_put = device_put
    tracemalloc.stop()
    return largest


def main(folder: str, num_processes: int, process_id: int, address: str) -> None:
    if num_processes > 1:
        jax.distributed.initialize(address, num_processes, process_id)
    files = SafetensorsCheckpoint(Path(folder))
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    checkpoint = Counting(files)
    params = load_params(specs(), checkpoint, np.dtype("bfloat16"), mesh)
    whole = expected(files)
    result: dict[str, Any] = {
        "read": checkpoint.num_bytes,
        "as_declared": is_as_declared(params, param_shapes(specs(), np.dtype("bfloat16"), mesh)),
        "wrong": [name for name, array in params.items() if not has_values(array, whole[name])],
    }
    if num_processes == 1:
        result["quantized"] = quantized_errors(files, mesh)
        one_device = Mesh(np.array(jax.devices()[:1]), ("tp",))
        result["transient"] = {"one": transient_bytes(files, one_device), "four": transient_bytes(files, mesh)}
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
