"""The check of a GPU machine, as far as a machine without one can run it: all parts, on tiny shapes and plain XLA."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    settings = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | settings)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("check") / "found.json"
    done = run("--dry-run", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all right\n")
    assert "the numbers mean nothing" in done.stdout
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_every_part_is_measured(found: dict[str, Any]) -> None:
    parts = ["peaks", "kernels", "kv_writes", "kernel_speed", "start_up", "engine", "modes"]
    assert list(dict.fromkeys(row["part"] for row in found["rows"])) == parts
    assert [row["mode"] for row in found["rows"] if row["part"] == "modes"] == ["sync", "overlap", "resident"]


def test_kernels_are_compared_by_their_errors_on_new_numbers(found: dict[str, Any]) -> None:
    compared = [row for row in found["rows"] if row["part"] in ("kernels", "kv_writes")]
    assert len({row["seed"] for row in compared}) == len(compared)
    assert all(row["error"] < 1e-2 for row in compared)


def test_a_second_start_compiles_nothing(found: dict[str, Any]) -> None:
    first, second = (row for row in found["rows"] if row["part"] == "start_up")
    assert (first["num_loaded"], second["num_loaded"]) == (0, second["num_programs"])


def test_steps_of_the_engine_are_held_against_the_least_they_move(found: dict[str, Any]) -> None:
    assert all(row["floor_ms"] > 0 and row["share"] > 0 for row in found["rows"] if row["part"] in ("modes", "engine"))


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no GPU; try --dry-run" in done.stderr


def test_what_there_is_no_time_for_is_told_and_not_called_right() -> None:
    done = run("--dry-run", "--seconds", "0")
    assert done.returncode == 1
    assert "no time is left" in done.stdout
