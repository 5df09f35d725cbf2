"""Kernels and whole step programs, compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILER = Path(sys.prefix) / "gpu-compiler"
"""Where `scripts/setup.sh` puts JAX's compiler for GPUs."""
NUM_LAYERS = 2


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
def kernels() -> dict[str, dict[str, Any]]:
    return run("gpu_kernels.py")


@pytest.fixture(scope="module")
def programs() -> dict[str, dict[str, Any]]:
    if not COMPILER.exists():
        pytest.skip(f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it")
    return run("gpu_programs.py")


def test_every_kernel_keeps_to_registers_and_shared_memory(kernels: dict[str, dict[str, Any]]) -> None:
    assert len(kernels) >= 11
    assert {name: kernel["spilled"] for name, kernel in kernels.items() if kernel["spilled"]} == {}
    # Two programs to a multiprocessor of an A100 (164 KiB) or H200 (227 KiB).
    most = {"sm_80": 82 * 1024, "sm_90": 113 * 1024}
    assert all(kernel["shared"] <= most[name[:5]] for name, kernel in kernels.items())


def test_products_run_on_tensor_cores_and_tiles_are_read_ahead(kernels: dict[str, dict[str, Any]]) -> None:
    attention = {name: kernel for name, kernel in kernels.items() if not name.endswith("reduced")}
    assert all(kernel["products"] and kernel["reads_ahead"] for kernel in attention.values())
    prefills = [kernel["products"] for name, kernel in attention.items() if name.startswith("sm_90 (512")]
    assert prefills == [["wgmma.mma_async"]] * len(prefills)


def test_state_and_cache_are_updated_in_place(programs: dict[str, dict[str, Any]]) -> None:
    for name, program in programs.items():
        assert program["num_aliased"] == program["num_state_arrays"], name
        # An array of the cache's size is an argument, or a kernel's result that is aliased with one.
        assert program["makers_of_kv"] == ["get-tuple-element", "parameter"], name
        assert program["kv_copies"] == 0, name


def test_programs_can_be_shipped(programs: dict[str, dict[str, Any]]) -> None:
    assert min(program["serialized_bytes"] for program in programs.values()) > 10_000


def test_nothing_moves_between_host_and_device(programs: dict[str, dict[str, Any]]) -> None:
    assert {name: n for name, program in programs.items() if (n := program["num_host_transfers"])} == {}


def test_scratch_is_a_few_activations_and_what_draws_need(programs: dict[str, dict[str, Any]]) -> None:
    """A row's logits are 0.5 MB in the large model, and options of sampling look at them from several sides."""
    bounds = {"large h200 x 1": 2.5, "large a100 x 1": 2.5, "large h200 x 8": 0.8, "small h200 x 8": 0.6}
    for name, program in programs.items():
        (most,) = (bound for kind, bound in bounds.items() if name.startswith(kind))
        assert program["scratch_bytes"] / program["num_rows"] < most * 2**20, name


def test_a_layer_is_two_all_reduces_and_embedding_one(programs: dict[str, dict[str, Any]]) -> None:
    for name, program in programs.items():
        assert program["collectives"] == ({"all-reduce": 2 * NUM_LAYERS + 1} if " x 8 " in name else {}), name


def test_neither_weights_nor_cache_nor_logits_are_gathered(programs: dict[str, dict[str, Any]]) -> None:
    """Of each row, a draw gathers the best of each device: less than a thousand numbers, of a vocabulary of 128,256."""
    for name, program in programs.items():
        if name.startswith("large"):
            assert program["largest_gathered"] <= 1024 * program["num_rows"], name


def test_the_kernels_of_a_layer_are_as_many_as_they_were(programs: dict[str, dict[str, Any]]) -> None:
    """Rotation with the KV write, attention and, of few heads, the reduction of its segments; the rest is XLA's."""
    per_layer = {name: program["num_triton_kernels"] / NUM_LAYERS for name, program in programs.items()}
    assert per_layer == {name: 2 if " x 1 " in name else 3 for name in programs}
    most = max(program["launches_per_layer"] for program in programs.values())
    assert 5 < most <= 14  # of Qwen3, which has norms of queries and keys
