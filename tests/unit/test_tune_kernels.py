"""Tuning the attention kernel, as far as a machine without a GPU can: the search, the file, and who reads it."""

import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpage.ops.attention.launch import GPU, AttentionLaunch, AttentionShape, choose_launch, tuned_launches

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune_kernels"
H200 = GPU(num_sms=132, compute_capability=90)


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("tune_kernels", SCRIPT.with_suffix(".py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["tune_kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def shape(script: Any) -> AttentionShape:
    """A decode of 8 rows of Llama-3.1-8B's."""
    found: AttentionShape = next(it for it in script.shapes() if it.num_rows == 8)
    return found


def distance(launch: AttentionLaunch, other: AttentionLaunch) -> float:
    """Steps from one to the other, as seconds."""
    doublings = (abs(math.log2(x / y)) for x, y in zip(launch_sizes(launch), launch_sizes(other), strict=True))
    return 1 + sum(doublings) + abs(launch.num_stages - other.num_stages)


def launch_sizes(launch: AttentionLaunch) -> tuple[int, ...]:
    return launch.block_m, launch.tile, launch.spare_items or 1, launch.num_warps


def test_the_fastest_launch_near_is_found_and_what_cannot_run_is_not(script: Any, shape: AttentionShape) -> None:
    best = AttentionLaunch(block_q=1, block_m=16, tile=128, full_tile=0, spare_items=25, num_warps=2, num_stages=2)
    asked: list[AttentionLaunch] = []

    def seconds_of(launch: AttentionLaunch) -> float:
        asked.append(launch)
        return math.inf if launch.tile > 128 else distance(launch, best)

    tuned = script.tune(shape, H200, seconds_of)
    assert (tuned.launch, tuned.seconds) == (best, 1)
    assert asked[0] == choose_launch(shape, H200)
    assert tuned.computed_seconds == distance(asked[0], best) > 1
    assert len(set(asked)) == len(asked) < 60


def test_what_saves_next_to_nothing_is_not_taken(script: Any, shape: AttentionShape) -> None:
    seconds = iter([1.0])
    tuned = script.tune(shape, H200, lambda launch: next(seconds, 0.99))
    assert tuned.launch == choose_launch(shape, H200)


def test_stages_that_give_the_same_code_are_passed_over(script: Any, shape: AttentionShape) -> None:
    """As 3 and 4 do."""
    tuned = script.tune(shape, H200, lambda launch: 1.0 if launch.num_stages < 5 else 0.5)
    assert tuned.launch.num_stages == 5


def test_without_time_the_computed_launch_stays(script: Any, shape: AttentionShape) -> None:
    tuned = script.tune(shape, H200, lambda launch: 1.0 / launch.tile, ends=0)
    assert tuned.launch == choose_launch(shape, H200)


def test_every_neighbour_of_every_shape_can_be_launched(script: Any) -> None:
    shapes = list(script.shapes())
    assert len(shapes) > 100
    for shape in shapes:
        group = shape.num_heads // shape.num_kv_heads
        start = choose_launch(shape, H200)
        for launch in script.neighbours(start, shape):
            differing = [name for name, value in dataclasses.asdict(launch).items() if value != getattr(start, name)]
            assert len(differing) == 1 or differing == ["block_q", "block_m"]
            assert launch.block_q * group <= launch.block_m
            assert 1 <= launch.block_q <= shape.max_query_len
            assert launch.full_tile % launch.tile == 0
            assert all(n & (n - 1) == 0 for n in (launch.block_m, launch.tile, launch.num_warps))


def test_what_was_tuned_is_read_for_shapes_like_it_and_no_others(
    script: Any, shape: AttentionShape, tmp_path: Path
) -> None:
    launch = AttentionLaunch(block_q=1, block_m=32, tile=32, full_tile=0, spare_items=25, num_warps=8, num_stages=5)
    row = script.row_of(shape, script.Tuned(launch, 1e-5, 2e-5))
    script.write(tmp_path / H200.tuned_file, script.head_of("NVIDIA H200"), [row])
    tuned = tuned_launches(H200, tmp_path)
    for changes in ({}, {"num_rows": 5, "num_tokens": 5}, {"max_kv_len": 5000}):
        assert choose_launch(dataclasses.replace(shape, **changes), H200, tuned) == launch
    for changes in ({"num_rows": 16}, {"max_kv_len": 4000}, {"head_dim": 64}, {"kv_itemsize": 1}, {"span": 4096}):
        other = dataclasses.replace(shape, **changes)
        assert choose_launch(other, H200, tuned) == choose_launch(other, H200) != launch
    assert tuned_launches(GPU(num_sms=108, compute_capability=80), tmp_path) == {}


def test_a_tuned_block_holds_no_more_queries_than_a_row_has(script: Any) -> None:
    shape = next(it for it in script.shapes() if it.max_query_len == 4)
    launch = AttentionLaunch(block_q=4, block_m=16, tile=32, full_tile=0, spare_items=25, num_warps=8, num_stages=5)
    three = dataclasses.replace(shape, max_query_len=3)
    assert choose_launch(three, H200, {shape.rounded: launch}) == dataclasses.replace(launch, block_q=3)


def test_a_file_is_gone_on_with_and_one_of_other_versions_is_not(
    script: Any, shape: AttentionShape, tmp_path: Path
) -> None:
    file, head = tmp_path / "tuned" / "it.json", script.head_of("NVIDIA H200")
    assert script.read(file, head) == []
    rows = [script.row_of(shape, script.Tuned(choose_launch(shape, H200), 1e-5, 1e-5))]
    script.write(file, head, rows)
    assert script.read(file, head) == rows
    assert script.read(file, head | {"triton": "0.0"}) == []


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    settings = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | settings)


def test_a_dry_run_writes_a_file_that_is_read(script: Any, tmp_path: Path) -> None:
    done = run("--dry-run", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    gpu = GPU(num_sms=1, compute_capability=0)
    assert file.name == gpu.tuned_file
    assert list(tuned_launches(gpu, tmp_path)) == [script.TINY.rounded]
    (row,) = json.loads(file.read_text())["launches"]
    assert row["computed_us"] >= row["us"] > 0


def test_a_machine_without_a_gpu_is_told_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no GPU" in done.stderr
