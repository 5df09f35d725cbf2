"""Kernels and whole step programs, compiled for GPUs that are not there."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jaxpage.runner.state import BatchState

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
        assert program["aliased"] == len(fields(BatchState)) + NUM_LAYERS, name
        # An array of the cache's size is an argument, or a kernel's result that is aliased with one.
        assert program["makers_of_kv"] == ["get-tuple-element", "parameter"], name
        assert program["kv_copies"] == 0, name


def test_nothing_moves_between_host_and_device(programs: dict[str, dict[str, Any]]) -> None:
    assert {name: program["host_transfers"] for name, program in programs.items() if program["host_transfers"]} == {}


def test_scratch_is_a_few_activations(programs: dict[str, dict[str, Any]]) -> None:
    for name, program in programs.items():
        assert program["scratch_bytes"] < (16 if name.endswith("mixed") else 2) * 2**20, name


def test_a_layer_is_two_all_reduces_and_embedding_one(programs: dict[str, dict[str, Any]]) -> None:
    for name, program in programs.items():
        assert program["collectives"] == ({"all-reduce": 2 * NUM_LAYERS + 1} if " x 8 " in name else {}), name


def test_weights_and_cache_are_never_gathered(programs: dict[str, dict[str, Any]]) -> None:
    """The sampler gathers a step's logits, 8192 for each row, and nothing is larger."""
    gathered = {name: program["largest_gathered"] for name, program in programs.items() if program["largest_gathered"]}
    assert gathered == {"h200 x 8 decode": 8 * 8192, "h200 x 8 mixed": 16 * 8192}


def test_the_kernels_of_a_layer_are_as_many_as_they_were(programs: dict[str, dict[str, Any]]) -> None:
    """Rotation with the KV write, attention, the reduction of its segments; norms and products are XLA's."""
    assert {name: program["triton_kernels"] / NUM_LAYERS for name, program in programs.items()} == {
        "h200 decode": 3,
        "h200 mixed": 3,
        "h200 x 8 decode": 3,
        "h200 x 8 mixed": 3,
        "a100 mixed": 2,
    }
    assert max(program["launches_per_layer"] for program in programs.values()) <= 12
