"""Step programs over several devices: heads, MLP and vocabulary divided, and the tokens of one device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def served() -> dict[str, dict[str, Any]]:
    """By model, what one device and eight give."""
    script = Path(__file__).with_name("step_on_devices.py")
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_eight_devices_give_the_tokens_of_one(served: dict[str, dict[str, Any]], model: str) -> None:
    one, eight = served[model]["1"], served[model]["8"]
    assert eight["tokens"] == one["tokens"]
    assert [len(row) for row in one["tokens"]] == [59, 36, 87, 23, 59]
    assert all(len(set(row[-10:])) > 1 for row in one["tokens"])  # what never changes would prove little


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_every_device_keeps_its_own_kv_heads(served: dict[str, dict[str, Any]], model: str) -> None:
    assert {n: found["kv_heads_on_a_device"] for n, found in served[model].items()} == {"1": 8, "8": 1}
