"""Kernels and whole step programs, compiled for GPUs that are not there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_checks.sizes import LLAMA_8B

COMPILER = Path(sys.prefix) / "gpu-compiler"
"""Where `scripts/setup.sh` puts JAX's compiler for GPUs."""
NUM_LAYERS = 2
DRAWS = ("GREEDY", "RANDOM", "FILTERED", "ANY")


def run(script: str) -> dict[str, dict[str, Any]]:
    """What a script of this folder prints, in a process that neither interprets kernels nor looks for GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COMPILER)}
    command = [sys.executable, Path(__file__).with_name(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def all_kernels() -> dict[str, dict[str, Any]]:
    """What is in the kernels of every GPU, by their names."""
    return run("gpu_kernels.py")


@pytest.fixture(scope="module")
def kernels(all_kernels: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same but for Blackwell, whose machine code is another."""
    return {name: kernel for name, kernel in all_kernels.items() if not name.startswith("sm_100")}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What is in programs, by how far they are compiled: see `gpu_programs.py`."""
    if not COMPILER.exists():
        pytest.skip(f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it")
    return run("gpu_programs.py")


@pytest.fixture(scope="module")
def steps(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Every bucket's program."""
    return found["steps"]


@pytest.fixture(scope="module")
def forks(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What copies rows and blocks, of each engine."""
    return {f"{name}, forks": program for name, program in found["forks"].items()}


@pytest.fixture(scope="module")
def draws(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What draws behind the largest decode of each engine, by its kind; and what also proposes drafts."""
    drafts = {f"{name}, with drafts": program for name, program in found["drafts"].items()}
    return drafts | {f"{name}, {kind}": program for kind in DRAWS for name, program in found[kind].items()}


SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}
"""Bytes of a multiprocessor, of which each program takes 1 KiB more than it asks for."""


def programs_per_sm(name: str, kernel: dict[str, Any]) -> int:
    threads = 32 * kernel["num_warps"]
    return int(min(65536 // (kernel["registers"] * threads), SHARED[name[:5]] // (kernel["shared"] + 1024)))


def test_every_kernel_keeps_to_registers_and_shared_memory(kernels: dict[str, dict[str, Any]]) -> None:
    assert len(kernels) >= 20
    assert {name: kernel["spilled"] for name, kernel in kernels.items() if kernel["spilled"]} == {}
    for name, kernel in kernels.items():
        assert programs_per_sm(name, kernel) >= (2 if "16 rows" in name or "reduced" in name else 1), name
    decode = {name[:5]: programs_per_sm(name, kernel) for name, kernel in kernels.items() if "(8, 8, 1)" in name}
    assert decode["sm_90"] >= 3


def test_nothing_spills_on_blackwell(all_kernels: dict[str, dict[str, Any]]) -> None:
    blackwell = {name: kernel for name, kernel in all_kernels.items() if name.startswith("sm_100")}
    assert len(blackwell) >= 8
    assert {name: kernel["spilled"] for name, kernel in blackwell.items() if kernel["spilled"]} == {}


def test_copies_of_the_next_tile_are_under_way_while_one_is_multiplied(kernels: dict[str, dict[str, Any]]) -> None:
    """When a loop waits for a tile of keys and values, the two groups of copies behind them may still be on their way.

    So they were issued before the products of this tile, the last of which are those of the tile before.
    """
    for name, kernel in kernels.items():
        if not name.endswith("reduced"):
            assert kernel["loops"], name
            for loop in kernel["loops"]:
                assert loop["copies"] > 0, name
                assert loop["waits"], name
                assert min(loop["waits"]) >= 2, name


def test_each_score_is_computed_once(kernels: dict[str, dict[str, Any]]) -> None:
    """A warp's products in a loop's body, with heads of 128: a product of Ampere has 16 x 8 x 16 numbers in each warp,
    one of Hopper 64 rows, 16 numbers of each, and all columns, in four warps together."""
    decode = kernels["sm_90 (8, 8, 1) x 128 , 16 rows"]
    both = 2 * (16 * 64 * 128) // (16 * 8 * 16)
    assert [loop["products"] for loop in decode["loops"]] == [both // decode["num_warps"]]
    prefill = kernels["sm_90 (512, 64, 512) x 128 window, softcap, 128 rows"]
    assert prefill["products"] == ["wgmma.mma_async"]
    assert [loop["products"] for loop in prefill["loops"]] == [128 // 16 + 64 // 16, 128 // 16 + 128 // 16]
    prefill = kernels["sm_80 (512, 64, 512) x 128 window, softcap, 128 rows"]
    for loop, tile in zip(prefill["loops"], (32, 64), strict=True):
        assert loop["products"] == 2 * (128 * tile * 128) // (16 * 8 * 16) // 8


def test_every_bucket_of_six_engines_compiles(steps: dict[str, Any]) -> None:
    """An 8B-shaped one with 4 decode and 3 mixed buckets, a small one with 2 and 2; each for three sets of GPUs."""
    assert len(steps) == 3 * (7 + 4)


def test_a_program_compiled_in_earnest_is_what_its_structure_says(found: dict[str, dict[str, Any]]) -> None:
    assert found["in earnest"]
    for name, program in found["in earnest"].items():
        structure = found["steps"][name]
        assert program["serialized_bytes"] > structure["serialized_bytes"] + 100_000  # machine code
        assert program | {"serialized_bytes": 0} == structure | {"serialized_bytes": 0}


def test_state_and_cache_are_updated_in_place(
    steps: dict[str, Any], draws: dict[str, Any], forks: dict[str, Any]
) -> None:
    for name, program in (steps | draws | forks).items():
        assert program["num_aliased"] == program["num_donated"], name
    for name, program in (steps | forks).items():
        assert program["kv_copies"] == 0, name
    for name, program in steps.items():
        assert program["logits_copies"] == 0, name
        # An array of the cache's size is an argument, or a kernel's result that is aliased with one.
        assert program["makers_of_kv"] == ["get-tuple-element", "parameter"], name


def test_nothing_moves_between_host_and_device(steps: dict[str, Any], draws: dict[str, Any]) -> None:
    assert {name: n for name, program in (steps | draws).items() if (n := program["num_host_transfers"])} == {}


def test_no_program_asks_the_host_how_to_go_on(
    steps: dict[str, Any], draws: dict[str, Any], forks: dict[str, Any]
) -> None:
    """A branch, or a loop of unknown length, would keep the host from sending off the next step until it is taken."""
    for name, program in (steps | draws | forks).items():
        assert program["num_decisions"] == 0, name


def test_every_product_has_tiles_in_flight_and_none_is_tiny(
    found: dict[str, dict[str, Any]], steps: dict[str, Any]
) -> None:
    """XLA's own choice without a device has one stage and tiles of 16 x 8: see `jaxpage.ops.gemm_launch`."""
    small = {f"{name} {kind}": it for name, programs in found["small"].items() for kind, it in programs.items()}
    products = [(name, gemm) for name, it in (steps | small).items() for gemm in it["gemms"]]
    for name, gemm in products:
        assert gemm["num_stages"] > 1, (name, gemm)
        assert max(gemm["tile_rows"], gemm["tile_columns"]) >= 32, (name, gemm)
    assert {name for name, _ in products} == {*steps, *small}
    in_layers = [name for name, _ in products if name in steps]
    # Four in each layer, and the logits: what cuBLAS would do is none of them.
    assert len(in_layers) == len(steps) * (4 * NUM_LAYERS + 1)


def test_nothing_is_computed_twice_where_the_cache_fills_the_memory(
    found: dict[str, dict[str, Any]], steps: dict[str, Any]
) -> None:
    """XLA takes a fifth of a GPU for others, and would compute each layer's output projection again to stay below."""
    (full,) = found["full"].values()
    assert full["argument_bytes"] > 124e9
    sizes = ("rows", "columns", "depth")
    made, usual = (
        sorted(tuple(gemm[size] for size in sizes) for gemm in it["gemms"])
        for it in (full, steps["large h200 x 1 decode 32"])
    )
    assert made == usual
    assert full["num_kernels"] <= steps["large h200 x 1 decode 32"]["num_kernels"] + 1


def test_the_sampler_that_is_measured_by_itself_is_the_one_that_serves(found: dict[str, dict[str, Any]]) -> None:
    (sampler,) = found["sampler"].values()
    assert sampler["num_decisions"] == 0


@pytest.mark.parametrize(
    ("engine", "base", "per_token"),
    [("large .* x 1", 8, 0.08), ("large .* x 8", 6, 0.08), ("small .* x 1", 1, 0.1), ("small .* x 8", 0.5, 0.03)],
)
def test_scratch_is_a_few_activations(steps: dict[str, Any], engine: str, base: float, per_token: float) -> None:
    """In MiB. A layer's KV cache is 128, and a token's activations between gate and down projection 0.06."""
    of_engine = {name: program for name, program in steps.items() if re.match(engine, name)}
    for name, program in of_engine.items():
        num_tokens, num_kv_heads = int(name.split()[-1]), (1 if " x 8" in name else 8 if "large" in name else 2)
        # Partial results of attention: 64 heads of 128 float32 from each program that splits the KV.
        parts = (num_kv_heads * (num_tokens / 16 + 33) + 3 * 132 + num_kv_heads) / 32
        assert program["scratch_bytes"] / 2**20 <= base + per_token * num_tokens + parts, name
    assert of_engine


def test_a_draw_needs_a_few_times_the_logits(draws: dict[str, Any]) -> None:
    """A row's are 0.5 MiB in the large model, and options of sampling look at them from several sides."""
    for name, program in draws.items():
        if name.startswith("large"):
            assert program["scratch_bytes"] / program["num_rows"] < (0.8 if " x 8" in name else 2.5) * 2**20, name


def test_a_layer_is_two_all_reduces_and_embedding_one(steps: dict[str, Any]) -> None:
    for name, program in steps.items():
        assert program["collectives"] == ({"all-reduce": 2 * NUM_LAYERS + 1} if " x 8 " in name else {}), name


def test_neither_weights_nor_cache_nor_logits_are_gathered(steps: dict[str, Any], draws: dict[str, Any]) -> None:
    """Of each row, a draw gathers the best of each device: less than a thousand numbers, of a vocabulary of 128,256."""
    assert {name: n for name, program in steps.items() if (n := program["largest_gathered"])} == {}
    for name, program in draws.items():
        most = 8 if name.endswith(("GREEDY", "with drafts")) else 1024
        assert program["largest_gathered"] <= most * program["num_rows"], name


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_filtered_draw_looks_at_the_vocabulary_twenty_times(draws: dict[str, Any], num_gpus: int) -> None:
    """Ten times for top-k and for top-p, in three or four launches each; devices exchange what they found as often."""
    draw = draws[f"large h200 x {num_gpus}, FILTERED"]
    assert draw["num_kernels"] <= 100
    assert sum(draw["collectives"].values()) <= (0 if num_gpus == 1 else 24)


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_draw_without_filters_is_a_few_kernels(draws: dict[str, Any], num_gpus: int) -> None:
    draw = draws[f"large h200 x {num_gpus}, RANDOM"]
    assert draw["num_kernels"] <= 20
    assert sum(draw["collectives"].values()) <= (0 if num_gpus == 1 else 6)


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        ("large h200 x 1", 15),
        ("large h200 x 8", 12),
        ("large a100 x 1", 14),
        ("small h200 x 1", 16),  # Qwen3, which has norms of queries and keys
        ("small h200 x 8", 14),
        ("small a100 x 1", 14),
    ],
)
def test_the_kernels_of_a_layer_are_as_many_as_they_were(steps: dict[str, Any], engine: str, most: int) -> None:
    """Rotation with the KV write, attention, the reduction of its parts; beside long prompts attention of others.

    The rest is XLA's.
    """
    of_engine = [program for name, program in steps.items() if name.startswith(engine)]
    assert {program["num_triton_kernels"] / NUM_LAYERS for program in of_engine} <= {2, 3, 4}
    assert 5 < max(program["launches_per_layer"] for program in of_engine) <= most


def test_an_8b_step_is_predicted_near_its_floor(tmp_path: Path) -> None:
    """By a model of an H200, from an artifact's programs: see `jaxpage.aot`. At 256 rows, 1.4 is aimed at."""
    if not COMPILER.exists():
        pytest.skip(f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
    options = ("--model", tmp_path, "--target", "h200", "--max-model-len", "8192", "--json")
    command = [sys.executable, "-m", "jaxpage", "bench", "roofline", *options]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    batches = json.loads(done.stdout)["batches"]
    for batch, most in (("1", 1.25), ("32", 1.3), ("256", 1.43)):
        assert 1 < batches[batch]["predicted_over_floor"] <= most, batch
        assert batches[batch]["tuned_over_floor"] <= batches[batch]["predicted_over_floor"]
    # Four of each layer, and the logits.
    assert sum(gemm["count"] for gemm in batches["1"]["gemms"]) == 4 * LLAMA_8B["num_hidden_layers"] + 1
