"""Weights that change while an engine serves: all of them or none, from device to device, and old KV is not found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, FOLDER / "updates_on_devices.py", tmp_path_factory.mktemp("programs")]
    environment = {**os.environ, **settings, "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_answers_are_those_of_the_new_weights_under_a_guard_against_transfers(found: dict[str, Any]) -> None:
    assert len({tuple(found[name]) for name in ("old", "two", "three")}) == 3
    assert found["three_again"] == found["behind_sleep"] == found["three"]
    assert found["cached"] == 0


def test_outputs_carry_the_version_of_their_weights(found: dict[str, Any]) -> None:
    assert found["version"] == 1
    assert found["versions"] == [1] * 24
    assert found["versions_of_three"] == [70] * 24


def test_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(found: dict[str, Any]) -> None:
    names = {
        "missing": "head lack",
        "extra": "tail are unknown",
        "shape": "head ([64, 32], the model has [32, 64]) do not fit",
        "kind": "head (int32, the model has float32) do not fit",
        "nan": "layers.1.up are not finite",
        "host": "head (a ndarray, and no jax.Array)",
        "deleted": "table (deleted or donated)",
    }
    assert list(found["refused"]) == list(names)
    for kind, words in names.items():
        assert words in found["refused"][kind]
    assert found["old_again"] == found["old"]


def test_a_hundred_updates_under_load_lose_and_compile_nothing(found: dict[str, Any]) -> None:
    reason, num_tokens, versions = found["kept"]
    assert (reason, num_tokens) == ("length", 24)
    assert versions == sorted(versions)
    assert len(set(versions)) > 10
    assert found["num_compiles"] == 0


def test_nobody_finds_kv_of_other_weights(found: dict[str, Any]) -> None:
    assert found["behind_a_kept"] == [found["two"], 0]


def test_what_runs_is_computed_anew_or_ended_where_that_is_asked_for(found: dict[str, Any]) -> None:
    assert found["recomputed"]
    assert found["aborted"] == ["abort", True]


def test_the_callers_arrays_stay_the_callers(found: dict[str, Any]) -> None:
    assert found["alive"]


def test_arrays_of_other_devices_come_in_chunks_in_the_engines_own_type(found: dict[str, Any]) -> None:
    chunks = found["chunks"]
    assert chunks["right"] == [True] * 9
    assert chunks["most_bytes"] <= 2048
    assert chunks["num_copies"] >= 9 * 96 * 64 * 4 // 2048
