"""`jaxpage bench roofline`: what a GPU could reach at best with a model, and what the compiled programs move instead.

No GPU is needed, and nothing is timed. The least that a decode step must move is its weights, the KV that its rows
attend to and their new KV; the least that it must do are its products. The GPU's peaks turn both into milliseconds. The
step's program is then compiled for that GPU, and what its kernels read and write is counted.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxpage.config import EngineConfig
from jaxpage.models.config_only import open_for_compiling
from jaxpage.request import Draw
from jaxpage.runner.blueprint import Blueprint, bytes_per_device, draw_blueprint
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.gpu_targets import TARGETS, GPUTarget, described_mesh
from jaxpage.runner.program_facts import facts_of
from jaxpage.runner.program_table import draw_arguments, step_arguments
from jaxpage.runner.program_traffic import traffic_of
from jaxpage.runner.step import compile_draw, compile_step


@dataclass(frozen=True)
class Floor:
    """The least that one decode step asks of each device."""

    weight_bytes: int
    kv_bytes: int
    """Read and written."""
    flops: int

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def milliseconds(self, gpu: GPUTarget) -> float:
        """At the GPU's peaks, whichever takes longer."""
        return 1e3 * max(self.num_bytes / gpu.bytes_per_second, self.flops / gpu.flops_per_second)


def floor_of(it: Blueprint, batch: int, context: int) -> Floor:
    """For `batch` rows that attend to `context` positions each, the new one included, counted from shapes."""
    cfg, num_devices = it.model_config, it.mesh.size
    params = it.shapes.params
    itemsize = it.dtype.itemsize
    looked_up = 0 if cfg.tie_word_embeddings else bytes_per_device(params["embed"])  # a row per token, and no more
    weights = bytes_per_device(params) - looked_up
    attended = positions = 0
    for group, _ in it.layout.layers:
        spec = it.layout.groups[group].spec
        seen = min(context, spec.span or context)
        positions += spec.token_elements * (seen + 1) * itemsize
        attended += 4 * cfg.num_heads * cfg.head_dim * seen  # scores and values, two operations for each product
    return Floor(
        weight_bytes=weights,
        kv_bytes=batch * positions // num_devices,
        flops=2 * batch * (weights // itemsize) + batch * attended // num_devices,
    )


def roofline(config: EngineConfig, target: str, batches: list[int], context: int) -> list[dict[str, Any]]:
    """A line per batch: the floor, and what the compiled decode step moves. Raises as `draw_blueprint` does."""
    gpu = TARGETS[target]
    mesh = described_mesh(gpu, config.tensor_parallel_size)
    it = draw_blueprint(config, open_for_compiling(config.model), mesh, lambda _: gpu.pool_bytes)
    lines = []
    for batch in batches:
        bucket = Bucket(max(batch, 4), max(batch, 4), 1)
        program = compile_step(it.program_config, bucket, *step_arguments(it.shapes, it.program_config, bucket))
        arguments = draw_arguments(it.shapes, it.program_config, bucket.num_rows, 1, Draw.GREEDY)
        draw = compile_draw(it.program_config, Draw.GREEDY, 1, *arguments)
        floor, facts = floor_of(it, batch, context), facts_of(program)
        traffic = traffic_of(program.as_text() or "")
        for part, num_bytes in traffic_of(draw.as_text() or "").items():
            traffic[part] = traffic.get(part, 0) + num_bytes
        # Attention's arguments are whole caches: it reads what the floor counts.
        moved = sum(traffic.values()) + floor.kv_bytes
        at_peak = 1e3 * moved / gpu.bytes_per_second
        lines.append(
            {
                "batch": batch,
                "context": context,
                "weight_gb": floor.weight_bytes / 1e9,
                "kv_gb": floor.kv_bytes / 1e9,
                "gflop": floor.flops / 1e9,
                "floor_ms": floor.milliseconds(gpu),
                "floor_tokens_per_s": 1e3 * batch / floor.milliseconds(gpu),
                "moved_gb": moved / 1e9,
                "moved_ms": at_peak,
                "excess": moved / floor.num_bytes - 1,
                **{f"excess_{part}_gb": bytes_ / 1e9 for part, bytes_ in _excess(it, traffic).items()},
                "num_kernels": facts.num_kernels + facts_of(draw).num_kernels,
                "collectives": facts.collectives,
                "scratch_mb": facts.scratch_bytes / 1e6,
            }
        )
    return lines


def _excess(it: Blueprint, traffic: dict[str, int]) -> dict[str, int]:
    """What each part of a step moves beside its weights: activations, and partial sums."""
    params = it.shapes.params
    head = params["embed"] if it.model_config.tie_word_embeddings else params["lm_head"]
    weights = {"layer": bytes_per_device(params["layers"]), "logits": bytes_per_device(head)}
    return {part: moved - weights.get(part, 0) for part, moved in traffic.items()}


def show(lines: list[dict[str, Any]], target: str, num_devices: int) -> str:
    """As a table for people."""
    gpu = TARGETS[target]
    rows = [
        f"{num_devices} x {gpu.name}, at peak {gpu.bytes_per_second / 1e12:.2f} TB/s and "
        f"{gpu.flops_per_second / 1e12:.0f} TFLOP/s; per device and step:",
        f"{'batch':>6} {'context':>8} {'weights':>9} {'KV':>9} {'products':>12} {'floor':>9} {'tokens/s':>10}"
        f" {'moved':>9} {'at peak':>9} {'excess':>7}  where",
    ]
    for line in lines:
        parts = {
            name[len("excess_") : -len("_gb")]: value for name, value in line.items() if name.startswith("excess_")
        }
        where = ", ".join(f"{part} {1e3 * value:.1f} MB" for part, value in parts.items() if math.fabs(value) > 5e-5)
        rows.append(
            f"{line['batch']:6} {line['context']:8} {line['weight_gb']:6.2f} GB {line['kv_gb']:6.2f} GB "
            f"{line['gflop']:6.0f} GFLOP {line['floor_ms']:6.2f} ms {line['floor_tokens_per_s']:10.0f} "
            f"{line['moved_gb']:6.2f} GB {line['moved_ms']:6.2f} ms {100 * line['excess']:6.1f}%  {where}"
        )
    return "\n".join(rows)
