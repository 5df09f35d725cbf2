"""The whole engine on eight devices: the tokens of one, whatever the KV cache and the batch do meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODELS = ["llama", "qwen3", "gemma3"]
"""The tiny Llama has 8 KV heads, Qwen3 2 and Gemma 3 one: on 8 devices, these are copied. Qwen3's vocabulary does not
divide by 8."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("engine_on_devices.py")
    tests = script.parents[1]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    settings["PYTHONPATH"] = f"{tests}{os.pathsep}{tests / 'golden'}"
    command = [sys.executable, script, tmp_path_factory.mktemp("devices")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("model", MODELS)
def test_eight_devices_give_the_tokens_of_one(found: dict[str, Any], model: str) -> None:
    one, eight = found["served"][model]["1"], found["served"][model]["8"]
    assert eight["tokens"] == one["tokens"]
    assert eight["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_prefixes_that_eight_devices_find_cached_change_nothing(found: dict[str, Any], model: str) -> None:
    eight = found["served"][model]["8"]
    assert eight["num_cached_tokens"] > 0
    assert eight["tokens again"] == found["served"][model]["1"]["tokens"]


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_there_were_preemptions(found: dict[str, Any], model: str) -> None:
    assert all(served["num_preemptions"] > 0 for served in found["served"][model].values())


def test_every_device_keeps_one_kv_head(found: dict[str, Any]) -> None:
    served = found["served"].values()
    assert [(by_size["1"]["kv_heads_on_a_device"], by_size["8"]["kv_heads_on_a_device"]) for by_size in served] == [
        (8, 1),
        (2, 1),
        (1, 1),
    ]


def test_no_token_was_so_close_to_another_that_the_order_of_a_sum_decides(found: dict[str, Any]) -> None:
    assert {name: served["1"]["margin"] > 1e-3 for name, served in found["served"].items()} == dict.fromkeys(
        ("llama", "qwen3", "gemma3"), True
    )


def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(found: dict[str, Any]) -> None:
    assert "--tensor-parallel-size is 3" in found["refused"]["3"]
    assert "1, 2, 4, 8 can" in found["refused"]["3"]


def test_more_devices_than_there_are_are_refused_with_their_number(found: dict[str, Any]) -> None:
    assert "--tensor-parallel-size is 16, and this machine has 8 of the 16 devices" in found["refused"]["16"]
