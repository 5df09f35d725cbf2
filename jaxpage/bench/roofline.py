"""`jaxpage bench roofline`: what a GPU could reach at best with a model, and what compiled programs should take there.

No GPU is needed, and nothing is timed. The least that a decode step must move is its weights, the KV that its rows
attend to and their new KV; the least that it must do are its products. The step's programs are then compiled for that
GPU, and a model of the card (`jaxpage.aot`) says what their kernels should take: predictions, until a card was asked.
"""

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxpage.aot.attention_time import attention_seconds
from jaxpage.aot.card import Card, card_of
from jaxpage.aot.facts import facts_of
from jaxpage.aot.gemm_time import best_gemm_seconds, ctas_per_sm
from jaxpage.aot.gemms import Gemm
from jaxpage.aot.step_time import PARTS, step_time
from jaxpage.aot.targets import TARGETS, GPUTarget, described_mesh
from jaxpage.aot.traffic import traffic_of
from jaxpage.config import EngineConfig
from jaxpage.ops.attention.launch import GPU, AttentionShape, choose_launch, tuned_launches
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket, choose_bucket
from jaxpage.runner.engine_plan import EnginePlan, bytes_per_device, plan_engine
from jaxpage.runner.model import model_to_compile
from jaxpage.runner.programs.program import compile_program
from jaxpage.runner.programs.sample import SAMPLE
from jaxpage.runner.programs.step import STEP


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
        return 1e3 * self.seconds(gpu.bytes_per_second, gpu.flops_per_second)

    def seconds(self, bytes_per_second: float, flops_per_second: float) -> float:
        """At such rates, whichever takes longer."""
        return max(self.num_bytes / bytes_per_second, self.flops / flops_per_second)


def floor_of(it: EnginePlan, batch: int, context: int) -> Floor:
    """For `batch` rows that attend to `context` positions each, the new one included, counted from shapes."""
    num_devices, params = it.mesh.size, it.shapes["params"]
    itemsize = it.model.dtype.itemsize
    looked_up = bytes_per_device(params["embed"]) if "lm_head" in params else 0  # a row per token, and no more
    weights = bytes_per_device(params) - looked_up
    attended = positions = 0
    for group, _ in it.layout.paged_places:
        spec = it.layout.groups[group].spec
        seen = min(context, spec.span or context)
        positions += spec.token_elements * (seen + 1) * itemsize
        # Scores and values, two operations for each product.
        attended += 4 * spec.num_query_heads * spec.head_dim * seen
    return Floor(
        weight_bytes=weights,
        kv_bytes=batch * positions // num_devices,
        flops=2 * batch * (weights // itemsize) + batch * attended // num_devices,
    )


def roofline(config: EngineConfig, target: str, batches: list[int], context: int) -> dict[str, Any]:
    """The floor of each batch's decode step, and what the compiled one should take. Raises as `plan_engine` does."""
    gpu = TARGETS[target]
    mesh = described_mesh(gpu, config.tensor_parallel_size)
    it = plan_engine(config, model_to_compile(config, mesh), lambda _: gpu.pool_bytes)
    return {
        "target": gpu.name,
        "devices": mesh.size,
        "context": context,
        "batches": {str(batch): _decode(it, gpu, batch, context) for batch in batches},
    }


def _decode(it: EnginePlan, gpu: GPUTarget, batch: int, context: int) -> dict[str, Any]:
    """One batch: its floor, its programs' bytes, and their time by the model."""
    bucket = choose_bucket(it.buckets, batch, batch, 1)
    program = compile_program(STEP, it, bucket)
    draw = compile_program(SAMPLE, it, SAMPLE.behind(it, bucket, SamplerKind.GREEDY))
    card, floor, facts = card_of(gpu), floor_of(it, batch, context), facts_of(program)
    texts = [program.as_text() or "", draw.as_text() or ""]
    traffic: Counter[str] = Counter()
    for text in texts:
        traffic.update(traffic_of(text))
    # Attention's arguments are whole caches: it reads what the floor counts.
    moved = traffic.total() + floor.kv_bytes
    times = [step_time(text, card, _attention_seconds(it, gpu, bucket, batch, context)) for text in texts]
    predicted = sum(each.seconds for each in times)
    tuned = predicted - sum(seconds - best_gemm_seconds(gemm, card) for gemm, seconds in times[0].gemms)
    reached = floor.seconds(card.dram_bytes_per_second, card.best_flops_per_second)
    parts = {name: sum(each.parts[name] for each in times) for name in PARTS}
    return {
        "weight_gb": floor.weight_bytes / 1e9,
        "kv_gb": floor.kv_bytes / 1e9,
        "gflop": floor.flops / 1e9,
        "floor_ms": floor.milliseconds(gpu),
        "floor_tokens_per_s": 1e3 * batch / floor.milliseconds(gpu),
        "moved_gb": moved / 1e9,
        "excess": moved / floor.num_bytes - 1,
        **{f"excess_{part}_gb": bytes_ / 1e9 for part, bytes_ in _excess(it, traffic).items()},
        "reached_floor_ms": 1e3 * reached,
        "predicted_ms": 1e3 * predicted,
        "predicted_over_floor": predicted / reached,
        "predicted_tokens_per_s": batch / predicted,
        "tuned_ms": 1e3 * tuned,
        "tuned_over_floor": tuned / reached,
        **{f"{part}_ms": 1e3 * seconds for part, seconds in parts.items()},
        "graph_nodes": sum(each.launches for each in times),
        "collectives": facts.collectives,
        "scratch_mb": facts.scratch_bytes / 1e6,
        "gemms": [_row_of(gemm, seconds, count, card) for gemm, seconds, count in _alike(times[0].gemms)],
    }


def _alike(gemms: list[tuple[Gemm, float]]) -> list[tuple[Gemm, float, int]]:
    """Products that differ in their names alone, once each, and how many there are."""
    count = Counter((dataclasses.replace(gemm, name=""), seconds) for gemm, seconds in gemms)
    return [(gemm, seconds, number) for (gemm, seconds), number in count.items()]


def _row_of(gemm: Gemm, seconds: float, count: int, card: Card) -> dict[str, Any]:
    """A product as it stands in the report."""
    slots = ctas_per_sm(gemm, card) * card.num_sms
    return {
        "shape": [gemm.rows, gemm.columns, gemm.depth],
        "count": count,
        "tile": [gemm.tile_rows, gemm.tile_columns, gemm.tile_depth],
        "stages": gemm.num_stages,
        "warps": gemm.num_warps,
        "tma": gemm.uses_tma,
        "splits": gemm.splits,
        "ctas": gemm.num_ctas,
        "waves": gemm.num_ctas / slots,
        "read_mb": gemm.operand_bytes / 1e6,
        "tiles_read_mb": gemm.tile_operand_bytes / 1e6,
        "us": 1e6 * seconds,
        "best_us": 1e6 * best_gemm_seconds(gemm, card),
    }


def _excess(it: EnginePlan, traffic: dict[str, int]) -> dict[str, int]:
    """What each part of a step moves beside its weights: activations, and partial sums."""
    params = it.shapes["params"]
    head = params.get("lm_head", params["embed"])
    weights = {"layer": bytes_per_device(params["layers"]), "logits": bytes_per_device(head)}
    return {part: moved - weights.get(part, 0) for part, moved in traffic.items()}


def _attention_seconds(it: EnginePlan, gpu: GPUTarget, bucket: Bucket, batch: int, context: int) -> float:
    """Of a layer's attention in a decode step, on average over the layers."""
    num_devices, target = it.mesh.size, GPU(gpu.num_sms, 10 * gpu.compute_capability)
    seconds = 0.0
    for group, _ in it.layout.paged_places:
        spec = it.layout.groups[group].spec
        shape = AttentionShape(
            num_tokens=bucket.num_tokens,
            num_rows=bucket.num_rows,
            max_query_len=1,
            num_heads=spec.num_query_heads // num_devices,
            num_kv_heads=spec.num_kv_heads // num_devices,
            head_dim=spec.head_dim,
            kv_itemsize=it.model.dtype.itemsize,
            max_kv_len=it.max_model_len,
            span=spec.span,
        )
        launch = choose_launch(shape, target, tuned_launches(target))
        seconds += attention_seconds([(context, 1)] * batch, shape, launch, card_of(gpu))
    return seconds / len(it.layout.paged_places)


def show(found: dict[str, Any], target: str) -> str:
    """What `roofline` gives, as tables for people."""
    gpu, card = TARGETS[target], card_of(TARGETS[target])
    lines = [
        f"{found['devices']} x {gpu.name}, {found['context']} positions; per device and step. The floor is at what "
        f"good kernels reach, {card.dram_bytes_per_second / 1e12:.2f} TB/s and {card.best_flops_per_second / 1e12:.0f} "
        "TFLOP/s; predicted: by a model of the card, from the compiled programs, not measured",
        f"{'batch':>6} {'weights':>9} {'KV':>9} {'products':>12} {'floor':>9} {'predicted':>10} {'over floor':>10}"
        f" {'tokens/s':>9} {'kernels':>8}  where",
    ]
    for batch, row in found["batches"].items():
        parts = {name: row[f"{name}_ms"] for name in PARTS if row.get(f"{name}_ms")}
        where = ", ".join(f"{part} {value:.2f} ms" for part, value in parts.items())
        lines.append(
            f"{batch:>6} {row['weight_gb']:6.2f} GB {row['kv_gb']:6.2f} GB {row['gflop']:6.0f} GFLOP "
            f"{row['reached_floor_ms']:6.2f} ms {row['predicted_ms']:7.2f} ms {row['predicted_over_floor']:10.2f} "
            f"{row['predicted_tokens_per_s']:9.0f} {row['graph_nodes']:8}  {where}"
        )
    lines += [
        "",
        f"{'batch':>6} {'product':>20} {'times':>5} {'tile':>12} {'stages':>6} {'warps':>5} {'splits':>6} {'CTAs':>6}"
        f" {'waves':>6} {'operands':>9} {'tiles read':>10} {'predicted':>10} {'best tile':>10}",
    ]
    for batch, row in found["batches"].items():
        for gemm in row["gemms"]:
            shape, tile = ("x".join(str(size) for size in gemm[name]) for name in ("shape", "tile"))
            lines.append(
                f"{batch:>6} {shape:>20} {gemm['count']:5} {tile:>12} {gemm['stages']:6} {gemm['warps']:5} "
                f"{gemm['splits']:6} {gemm['ctas']:6} {gemm['waves']:6.2f} {gemm['read_mb']:6.1f} MB "
                f"{gemm['tiles_read_mb']:7.1f} MB {gemm['us']:7.1f} us {gemm['best_us']:7.1f} us"
            )
    return "\n".join(lines)
