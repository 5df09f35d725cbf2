"""The least that a decode step must move and do, and what is read of a compiled program's text."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage.bench_roofline import floor_of, show
from jaxpage.config import EngineConfig
from jaxpage.models.config_only import ConfigOnly
from jaxpage.runner.blueprint import Blueprint, draw_blueprint
from jaxpage.runner.gpu_targets import TARGETS
from jaxpage.runner.program_facts import bytes_of
from jaxpage.runner.program_traffic import traffic_of

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
WITHOUT_EMBEDDINGS = 8_030_261_248 - 128256 * 4096  # of its parameters


def blueprint(folder: Path, hf: dict[str, Any]) -> Blueprint:
    (folder / "config.json").write_text(json.dumps(hf))
    config = EngineConfig(dtype="bfloat16", num_blocks=1024)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return draw_blueprint(config, ConfigOnly(folder), mesh, lambda _: 2**40)


@pytest.mark.parametrize("batch", [1, 256])
def test_the_least_is_the_weights_and_the_kv_of_the_rows(tmp_path: Path, batch: int) -> None:
    floor = floor_of(blueprint(tmp_path, LLAMA_8B), batch, 1024)
    assert floor.weight_bytes == 2 * WITHOUT_EMBEDDINGS
    assert floor.kv_bytes == batch * 32 * 2 * 8 * 128 * 2 * (1024 + 1)  # read, and one position written
    assert floor.flops == batch * (2 * WITHOUT_EMBEDDINGS + 32 * 4 * 4096 * 1024)


def test_layers_with_a_window_read_no_more_than_it(tmp_path: Path) -> None:
    sliding = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "sliding_window": 100}
    assert floor_of(blueprint(tmp_path, sliding), 1, 1024).kv_bytes == 32 * 2 * 8 * 128 * 2 * 101


def test_memory_bounds_a_small_batch_on_an_h200_and_products_a_large_one(tmp_path: Path) -> None:
    it = blueprint(tmp_path, LLAMA_8B)
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


def test_the_table_has_a_line_per_batch() -> None:
    numbers = ("weight_gb", "kv_gb", "gflop", "floor_ms", "floor_tokens_per_s", "moved_gb", "moved_ms", "excess")
    line = {"batch": 32, "context": 1024, **dict.fromkeys(numbers, 1.0), "excess_layer_gb": 0.25}
    table = show([line], "h200", 8).splitlines()
    assert table[0].startswith("8 x NVIDIA H200, at peak 4.80 TB/s")
    assert "layer 250.0 MB" in table[2]
