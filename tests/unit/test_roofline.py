"""The least that a decode step must move and do, and what is read of a compiled program's text."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gpu_checks.sizes import LLAMA_8B
from jax.sharding import Mesh

from jaxpage.aot.facts import bytes_of
from jaxpage.aot.targets import TARGETS
from jaxpage.aot.traffic import traffic_of
from jaxpage.bench.roofline import floor_of, show
from jaxpage.config import EngineConfig
from jaxpage.models.checkpoints.weightless import ConfigOnly
from jaxpage.runner.engine_plan import EnginePlan, plan_engine
from jaxpage.runner.model import model_of_checkpoint

WITHOUT_EMBEDDINGS = 8_030_261_248 - 128256 * 4096  # of its parameters


def plan_of(folder: Path, hf: dict[str, Any]) -> EnginePlan:
    (folder / "config.json").write_text(json.dumps(hf))
    config = EngineConfig(dtype="bfloat16", num_blocks=1024)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return plan_engine(config, model_of_checkpoint(config, ConfigOnly(folder), mesh), lambda _: 2**40)


@pytest.mark.parametrize("batch", [1, 256])
def test_the_least_is_the_weights_and_the_kv_of_the_rows(tmp_path: Path, batch: int) -> None:
    floor = floor_of(plan_of(tmp_path, LLAMA_8B), batch, 1024)
    assert floor.weight_bytes == 2 * WITHOUT_EMBEDDINGS
    assert floor.kv_bytes == batch * 32 * 2 * 8 * 128 * 2 * (1024 + 1)  # read, and one position written
    assert floor.flops == batch * (2 * WITHOUT_EMBEDDINGS + 32 * 4 * 4096 * 1024)


def test_layers_with_a_window_read_no_more_than_it(tmp_path: Path) -> None:
    sliding = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert floor_of(plan_of(tmp_path, sliding), 1, 1024).kv_bytes == 32 * 2 * 8 * 128 * 2 * 101


def test_memory_bounds_a_small_batch_on_an_h200_and_products_a_large_one(tmp_path: Path) -> None:
    it = plan_of(tmp_path, LLAMA_8B)
    small, large = floor_of(it, 1, 128), floor_of(it, 4096, 1)
    assert small.milliseconds(TARGETS["h200"]) == pytest.approx(1e3 * small.num_bytes / 4.8e12)
    assert large.milliseconds(TARGETS["h200"]) == pytest.approx(1e3 * large.flops / 989e12)


def test_bytes_of_a_shape_are_those_of_all_its_arrays() -> None:
    assert bytes_of("(bf16[2,8]{1,0}, /*index=1*/s32[], f32[3]{0}, pred[5]{0})") == 32 + 4 + 12 + 5


PROGRAM = """HloModule jit_step, input_output_alias={ {0}: (0, {}, may-alias) }

%best (p: f32[8,100]) -> s32[8] {
  %p = f32[8,100]{1,0} parameter(0)
  ROOT %index = s32[8]{0} custom-call(%p), metadata={op_name="jit(draw)/sample/argmax"}
}

ENTRY %main (cache: bf16[1024,64], weight: bf16[16,32], x: bf16[8,16]) -> bf16[1024,64] {
  %cache = bf16[1024,64]{1,0} parameter(0)
  %weight = bf16[16,32]{1,0} parameter(1)
  %x = bf16[8,16]{1,0} parameter(2)
  %y = bf16[8,32]{1,0} fusion(%x, %weight), kind=kCustom, metadata={op_name="jit(step)/jit(layer)/dot_general"}
  %written = bf16[1024,64]{1,0} custom-call(%y, %cache), metadata={op_name="jit(step)/jit(layer)/attend"}
  %logits = f32[8,100]{1,0} fusion(%y), kind=kCustom, metadata={op_name="jit(step)/logits/dot_general"}
  %tokens = s32[8]{0} fusion(%logits), kind=kInput, calls=%best, metadata={op_name="jit(draw)/sample/argmax"}
  ROOT %result = bf16[1024,64]{1,0} bitcast(%written)
}
"""


def test_traffic_is_operands_and_results_of_kernels_but_for_what_stays_in_place() -> None:
    assert traffic_of(PROGRAM) == {
        "layer": (8 * 16 + 16 * 32 + 8 * 32) * 2 + 8 * 32 * 2,
        "logits": 8 * 32 * 2 + 8 * 100 * 4,
        "sample": 8 * 100 * 4 + 8 * 4,
    }


def test_of_a_table_of_embeddings_only_what_is_looked_up_counts() -> None:
    """Also where the lookup is fused into whatever takes its rows."""
    looked_up = """HloModule jit_step

%fused (table: bf16[1000,64], ids: s32[8]) -> f32[8] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[8]{0} parameter(1)
  %rows = bf16[8,64]{1,0} gather(%table, %ids), offset_dims={1}
  ROOT %sum = f32[8]{0} reduce(%rows)
}

ENTRY %main (table: bf16[1000,64], ids: s32[8]) -> f32[8] {
  %table.1 = bf16[1000,64]{1,0} parameter(0)
  %ids.1 = s32[8]{0} parameter(1)
  ROOT %norm = f32[8]{0} fusion(%table.1, %ids.1), kind=kInput, calls=%fused, metadata={op_name="jit(step)/reduce"}
}
"""
    assert traffic_of(looked_up) == {"other": 8 * 64 * 2 + 8 * 4 + 8 * 4}


def test_the_report_has_a_line_per_batch_and_per_product() -> None:
    numbers = ("weight_gb", "kv_gb", "gflop", "reached_floor_ms", "predicted_ms", "predicted_over_floor")
    numbers += ("predicted_tokens_per_s", "gemm_ms", "launch_ms")
    gemm: dict[str, Any] = {"shape": [32, 4096, 4096], "tile": [32, 32, 128], "count": 7}
    gemm |= dict.fromkeys(("stages", "warps", "splits", "ctas"), 4)
    gemm |= dict.fromkeys(("waves", "read_mb", "tiles_read_mb", "us", "best_us"), 1.0)
    row = {"graph_nodes": 352, "gemms": [gemm], **dict.fromkeys(numbers, 1.0)}
    report = show({"devices": 8, "context": 1024, "batches": {"32": row}}, "h200").splitlines()
    assert report[0].startswith("8 x NVIDIA H200, 1024 positions; per device and step.")
    assert "predicted" in report[0]
    assert report[2].split()[0] == "32"
    assert report[2].endswith("gemm 1.00 ms, launch 1.00 ms")
    assert "32x4096x4096" in report[5]
    assert "32x32x128" in report[5]
