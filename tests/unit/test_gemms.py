"""What is read of a program's matrix products, how they are cut, and what a model of a card makes of them."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpage.aot.card import card_of
from jaxpage.aot.gemm_time import best_gemm_seconds, ctas_per_sm, dram_bytes, gemm_seconds
from jaxpage.aot.gemms import Gemm, gemms_of, main_launch
from jaxpage.aot.step_time import step_time
from jaxpage.aot.targets import TARGETS
from jaxpage.ops.attention.launch import GPU
from jaxpage.ops.gemm_launch import GemmLaunch, choose_gemms, tuned_gemms

H200, A100 = GPU(132, 90), GPU(108, 80)
CARD = card_of(TARGETS["h200"])


def tiling(sizes: str) -> str:
    """What XLA says of a fusion with such tiles."""
    level = f'"num_warps":"4","output_tiles":[{{"sizes":{sizes}}}],"num_ctas":1,"num_stages":3,"is_tma_allowed":true'
    kind = "__triton_nested_gemm_fusion"
    return f'backend_config={{"fusion_backend_config":{{"kind":"{kind}","block_level_fusion_config":{{{level}}}}}}}'


PROGRAM = f"""HloModule jit_step, input_output_alias={{}}

%split_computation (x: bf16[32,8,512], w: bf16[4096,8,512]) -> f32[8,32,4096] {{
  %w = bf16[4096,8,512]{{2,1,0}} parameter(1)
  %x = bf16[32,8,512]{{2,1,0}} parameter(0)
  %dot.1 = f32[8,4096,32]{{1,2,0}} dot(%w, %x), lhs_batch_dims={{1}}, lhs_contracting_dims={{2}}, \
rhs_batch_dims={{1}}, rhs_contracting_dims={{2}}, backend_config={{"sizes":["64"]}}
  ROOT %result = f32[8,32,4096]{{2,1,0}} bitcast(%dot.1)
}}

%logits_computation (x: bf16[32,4096], w: bf16[1000,4096]) -> f32[32,1000] {{
  %w = bf16[1000,4096]{{1,0}} parameter(1)
  %x = bf16[32,4096]{{1,0}} parameter(0)
  %wide = f32[1000,4096]{{1,0}} convert(%w)
  %also = f32[32,4096]{{1,0}} convert(%x)
  ROOT %dot.2 = f32[32,1000]{{1,0}} dot(%also, %wide), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}, \
backend_config={{"sizes":["128"]}}
}}

ENTRY %main (x: bf16[32,8,512], w: bf16[4096,8,512], head: bf16[1000,4096]) -> f32[32,1000] {{
  %x.1 = bf16[32,8,512]{{2,1,0}} parameter(0)
  %w.1 = bf16[4096,8,512]{{2,1,0}} parameter(1)
  %head.1 = bf16[1000,4096]{{1,0}} parameter(2)
  %gemm_fusion.1 = f32[8,32,4096]{{2,1,0}} fusion(%x.1, %w.1), kind=kCustom, \
calls=%split_computation, {tiling('["1","32","128"]')}
  %sum = bf16[32,4096]{{1,0}} fusion(%gemm_fusion.1), kind=kLoop, calls=%summed
  %all-reduce.1 = bf16[32,4096]{{1,0}} all-reduce(%sum), replica_groups={{}}
  ROOT %gemm_fusion.2 = f32[32,1000]{{1,0}} fusion(%all-reduce.1, %head.1), kind=kCustom, \
calls=%logits_computation, {tiling('["32","64"]')}
}}
"""


def gemm(rows: int, columns: int, depth: int, **changes: object) -> Gemm:
    """A product of bfloat16, with tiles as `choose_gemms` gives them on an H200."""
    launch = choose_gemms(rows, columns, 2, H200)[0]
    tiles = (launch.tokens, launch.weights, launch.depth, launch.num_warps, launch.num_stages, launch.uses_tma)
    return dataclasses.replace(Gemm("", rows, columns, depth, 1, 1, 2, 2, *tiles), **changes)  # type: ignore[arg-type]


def test_products_are_read_with_their_tiles() -> None:
    split, logits = gemms_of(PROGRAM)
    tiles = {"tile_rows": 32, "tile_columns": 128, "tile_depth": 64, "num_warps": 4, "num_stages": 3, "uses_tma": True}
    sizes = {"rows": 32, "columns": 4096, "depth": 4096, "splits": 8, "batch": 1, "item_bytes": 2, "result_bytes": 4}
    assert dataclasses.asdict(split) == {"name": "gemm_fusion.1", **sizes, **tiles}
    assert (logits.rows, logits.columns, logits.depth, logits.splits) == (32, 1000, 4096, 1)
    # Numbers are as wide as in memory, whatever they are multiplied as.
    assert (logits.item_bytes, logits.result_bytes, logits.tile_depth) == (2, 4, 128)


def test_tiles_read_an_operand_as_often_as_the_other_one_has_tiles() -> None:
    it = gemm(256, 1024, 512, tile_rows=64, tile_columns=128)
    assert it.num_ctas == 4 * 8
    assert it.operand_bytes == 2 * 512 * (256 + 1024)
    assert it.tile_operand_bytes == 2 * 512 * (256 * 8 + 1024 * 4)


def test_a_step_takes_its_kernels_and_the_gaps_between_them() -> None:
    found = step_time(PROGRAM, CARD, attention_seconds=1.0)
    assert found.launches == 4
    assert found.parts["launch"] == pytest.approx(4 * CARD.kernel_seconds)
    assert found.parts["gemm"] == pytest.approx(sum(gemm_seconds(it, CARD) for it in gemms_of(PROGRAM)))
    assert found.parts["collective"] > 5e-6
    assert "attention" not in found.parts
    assert found.seconds == pytest.approx(sum(found.parts.values()))


@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_with_few_tokens_weights_come_near_the_speed_of_memory(rows: int) -> None:
    it = gemm(rows, 28672, 4096)
    assert 0.9 < it.weight_bytes / CARD.dram_bytes_per_second / gemm_seconds(it, CARD) < 1


def test_with_many_tokens_products_come_near_what_triton_reaches() -> None:
    it = gemm(2048, 28672, 4096)
    assert 0.9 < it.flops / CARD.flops_per_second / gemm_seconds(it, CARD) <= 1


def test_the_first_of_xlas_choices_is_many_times_slower_than_ours() -> None:
    """What artifacts had: tiles of 8 x 16, K tiles of 16, two warps, one stage."""
    worst = {"tile_rows": 8, "tile_columns": 16, "tile_depth": 16, "num_warps": 2, "num_stages": 1}
    for rows, least in ((1, 3), (256, 10), (2048, 15)):
        it = gemm(rows, 28672, 4096)
        assert gemm_seconds(dataclasses.replace(it, **worst), CARD) > least * gemm_seconds(it, CARD)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "share"), [(1, 0.9), (32, 0.9), (256, 0.95), (2048, 0.95)])
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_no_tile_is_much_better_by_the_model_than_what_is_chosen(
    rows: int, share: float, columns: int, depth: int
) -> None:
    it = gemm(rows, columns, depth)
    launch = choose_gemms(rows, columns, 2, H200)[0]
    if launch.splits_sums and rows == 256 and columns < 6144:
        it = dataclasses.replace(it, splits=2, result_bytes=4)  # as XLA does
    assert best_gemm_seconds(it, CARD) >= share * gemm_seconds(it, CARD)


def test_what_does_not_fit_does_not_run() -> None:
    assert ctas_per_sm(gemm(512, 512, 512, tile_rows=256, tile_columns=256, tile_depth=256, num_stages=5), CARD) == 0
    assert ctas_per_sm(gemm(16, 4096, 4096), CARD) >= 4


def test_weights_come_from_memory_once_while_their_tiles_are_neighbours() -> None:
    few, many = (gemm(rows, 28672, 4096, tile_rows=16) for rows in (128, 2048))
    assert dram_bytes(few, 1, CARD) < 1.2 * few.weight_bytes
    assert dram_bytes(many, 1, CARD) > 16 * many.weight_bytes


@pytest.mark.parametrize("gpu", [H200, A100])
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 17, 32, 63, 64, 100, 512, 2048])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_tiles_are_powers_of_two_with_something_in_flight_and_a_fallback_for_every_gpu(
    gpu: GPU, num_tokens: int, item_bytes: int
) -> None:
    launches = choose_gemms(num_tokens, 4096, item_bytes, gpu)
    for launch in launches:
        sizes = (launch.tokens, launch.weights, launch.depth, launch.num_warps)
        assert all(size & (size - 1) == 0 for size in sizes)
        assert launch.num_stages > 1
        assert max(launch.tokens, launch.weights) >= 32
        assert not (launch.uses_tma and gpu is A100)
    least = launches[-1]
    assert not least.uses_tma
    assert least.num_stages * (least.tokens + least.weights) * least.depth * item_bytes <= 99 * 1024  # of any GPU


def test_sums_are_split_only_where_tiles_alone_leave_sms_idle() -> None:
    assert not choose_gemms(1, 4096, 2, H200)[0].splits_sums
    assert choose_gemms(1, 768, 2, H200)[0].splits_sums  # an eighth of it


def test_what_was_measured_on_such_a_gpu_goes_first(tmp_path: Path) -> None:
    best = GemmLaunch(16, 64, 256, num_stages=5, num_warps=8, uses_tma=True)
    row = {"num_tokens": 8, "launch": dataclasses.asdict(best)}
    (tmp_path / "gemms_sm_90_132.json").write_text(json.dumps({"launches": [row]}))
    tuned = tuned_gemms(H200, tmp_path)
    assert tuned == {8: best}
    assert tuned_gemms(A100, tmp_path) == {}
    # Whether sums are split is the model's matter, and what cannot be compiled gives way to what is computed.
    assert choose_gemms(5, 4096, 2, H200, tuned) == [
        dataclasses.replace(best, splits_sums=False),
        *choose_gemms(5, 4096, 2, H200),
    ]
    assert choose_gemms(9, 4096, 2, H200, tuned) == choose_gemms(9, 4096, 2, H200)
    assert choose_gemms(8, 4096, 4, H200, tuned) == choose_gemms(8, 4096, 4, H200)


def test_the_tiles_that_are_kept_of_a_program_are_those_of_its_largest_product() -> None:
    launch = main_launch(gemms_of(PROGRAM))
    assert launch == GemmLaunch(32, 128, 64, num_stages=3, num_warps=4, uses_tma=True)
    assert main_launch([]) is None


def test_operands_are_named_as_xla_swaps_them() -> None:
    few, many = choose_gemms(8, 4096, 2, H200)[0], choose_gemms(2048, 4096, 2, H200)[0]
    assert few.override(8).startswith("block_m: 32 block_n: 16 block_k: 128 num_stages: 4 num_warps: 4")
    assert many.override(2048).startswith("block_m: 128 block_n: 256 block_k: 64")
    assert many.override(2048).endswith("is_tma_allowed: true")
