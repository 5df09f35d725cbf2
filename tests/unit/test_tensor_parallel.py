"""The whole engine on several devices, of one process or of two: the tokens of one device, whatever the cache does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MODELS = ["llama", "qwen3", "gemma3"]
"""The tiny Llama has 8 KV heads, and a device in each of two processes. Qwen3 has 2 KV heads and Gemma 3 one, and both
have 8 devices in one process: their KV heads are copied. Qwen3's vocabulary does not divide by 8."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).with_name("engine_on_devices.py")
    tests = script.parents[1]
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    settings["PYTHONPATH"] = f"{tests}{os.pathsep}{tests / 'golden'}"
    command = [sys.executable, script, tmp_path_factory.mktemp("devices")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # the library of collectives prints as well
    return result


@pytest.mark.parametrize("model", MODELS)
def test_several_devices_give_the_tokens_of_one(found: dict[str, Any], model: str) -> None:
    one, several = found["served"][model]["one"], found["served"][model]["several"]
    assert several["tokens"] == one["tokens"]
    assert several["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_prefixes_that_several_devices_find_cached_change_nothing(found: dict[str, Any], model: str) -> None:
    several = found["served"][model]["several"]
    assert several["num_cached_tokens"] > 0
    assert several["tokens again"] == found["served"][model]["one"]["tokens"]


@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_there_were_preemptions(found: dict[str, Any], model: str) -> None:
    assert all(served["num_preemptions"] > 0 for served in found["served"][model].values())


@pytest.mark.parametrize(("model", "num_kv_heads"), [("qwen3", 2), ("gemma3", 1)])
def test_every_device_keeps_one_kv_head(found: dict[str, Any], model: str, num_kv_heads: int) -> None:
    served = found["served"][model]
    assert (served["one"]["kv_heads_on_a_device"], served["several"]["kv_heads_on_a_device"]) == (num_kv_heads, 1)


@pytest.mark.parametrize("model", MODELS)
def test_no_token_was_so_close_to_another_that_the_order_of_a_sum_decides(found: dict[str, Any], model: str) -> None:
    """Drawn ones included, whose noise is known. Sums of float32 in another order differ by some 1e-5 here."""
    assert found["served"][model]["one"]["margin"] > 1e-3


def test_the_leader_ends_its_requests_with_an_error_when_a_follower_is_killed(found: dict[str, Any]) -> None:
    assert "engine" in found["served"]["llama"]["several"]["error"]


def test_a_size_that_does_not_divide_the_model_is_refused_with_those_that_do(found: dict[str, Any]) -> None:
    assert "--tensor-parallel-size is 3" in found["refused"]["3"]
    assert "1, 2, 4, 8 can" in found["refused"]["3"]


def test_more_devices_than_there_are_are_refused_with_their_number(found: dict[str, Any]) -> None:
    assert "--tensor-parallel-size is 16, and this machine has 8 of the 16 devices" in found["refused"]["16"]
