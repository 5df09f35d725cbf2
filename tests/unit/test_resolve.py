"""What the engine settles by itself: sizes of a step, and how much memory is left for the KV cache."""

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxpage import LLM
from jaxpage.config import EngineConfig, SizedConfig
from jaxpage.engine.gpu_memory import POOL_SHARE, share_for_engine, share_of_jax
from jaxpage.errors import ConfigError
from jaxpage.kv_cache.spec import block_bytes, plan_layout
from jaxpage.ops.state_spec import KVSpec
from jaxpage.runner.devices import available_host_memory, container_room, make_mesh
from jaxpage.runner.engine_plan import plan_engine
from jaxpage.runner.model import model_to_compile
from jaxpage.runner.resolve import Memory, max_blocks, resolve_num_blocks, resolve_sizes

LAYOUT = plan_layout([[KVSpec(num_kv_heads=8, head_dim=128)]] * 32, 16)
BLOCK = 2 * 2**20
"""Bytes of one of `LAYOUT` in bfloat16."""
GIB = 2**30


@pytest.mark.parametrize(
    ("platform", "given", "expected"),
    [
        ("cpu", {}, (64, 512)),
        ("gpu", {}, (256, 2048)),
        ("gpu", {"max_num_seqs": 8}, (8, 2048)),
        ("gpu", {"max_num_seqs": 4096}, (4096, 4096)),
        ("gpu", {"max_num_batched_tokens": 100}, (100, 100)),
        ("cpu", {"max_num_batched_tokens": 8192}, (64, 8192)),
        ("cpu", {"max_num_seqs": 3, "max_num_batched_tokens": 5}, (3, 5)),
    ],
)
def test_a_step_is_sized_for_its_platform_around_what_is_given(
    platform: str, given: dict[str, int], expected: tuple[int, int]
) -> None:
    sized = resolve_sizes(EngineConfig(**given), platform)
    assert (sized.max_num_seqs, sized.max_num_batched_tokens) == expected


def test_every_other_option_stays_as_it_is() -> None:
    config = EngineConfig(seed=3, speculative_config={"method": "ngram", "num_speculative_tokens": 2})  # type: ignore[arg-type]
    sized = config.sized("gpu")
    assert (sized.seed, sized.speculative_config) == (3, config.speculative_config)


def test_only_an_automatic_size_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    resolve_sizes(EngineConfig(max_num_seqs=8, max_num_batched_tokens=64), "gpu")
    assert caplog.messages == []
    resolve_sizes(EngineConfig(max_num_seqs=8), "gpu")
    assert caplog.messages == ["max_num_seqs=8, max_num_batched_tokens=2048 (what is not given: default on gpu)"]


def blocks(memory: Memory, platform: str, **options: Any) -> int:
    config: SizedConfig = EngineConfig(**options).sized(platform)
    return resolve_num_blocks(config, LAYOUT, 131072, memory, of_a_block=BLOCK, platform=platform)


def test_a_block_is_counted_in_all_layers_and_divided_among_devices() -> None:
    assert block_bytes(LAYOUT, 2, 1) == BLOCK
    assert block_bytes(LAYOUT, 2, 8) == BLOCK // 8


def test_on_a_gpu_the_cache_gets_all_that_nothing_else_needs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    memory = Memory(free=100 * GIB, weights=15 * GIB, batch=GIB, programs=4 * GIB, share="0.92")
    assert blocks(memory, "gpu") == 80 * GIB // BLOCK
    assert "1.00 of what each device has: 100.00 GiB (0.92) but for weights 15.00, batch 1.00" in caplog.text
    assert blocks(memory, "gpu", kv_memory_fraction=0.25) == 20 * GIB // BLOCK


def test_on_a_cpu_the_cache_gets_half_and_no_more_than_a_gibibyte() -> None:
    assert blocks(Memory(free=3 * GIB, weights=2 * GIB), "cpu") == GIB // 2 // BLOCK
    assert blocks(Memory(free=100 * GIB, weights=2 * GIB), "cpu") == GIB // BLOCK


def test_no_more_blocks_are_made_than_all_rows_can_fill() -> None:
    assert blocks(Memory(free=10**15, weights=0), "gpu", max_num_seqs=2) == 2 * 131072 // 16 + 1


def test_a_device_too_small_is_told_what_takes_its_memory() -> None:
    memory = Memory(free=16 * GIB, weights=15 * GIB, programs=2 * GIB)
    with pytest.raises(ConfigError, match=r"16\.00 GiB but for weights 15\.00, programs 2\.00 do not hold two KV"):
        blocks(memory, "gpu")


def test_positions_of_a_pool_are_counted_in_32_bits() -> None:
    assert 2 * max_blocks(LAYOUT) * LAYOUT.block_size <= 2**31
    config = EngineConfig(num_blocks=max_blocks(LAYOUT) + 1)
    with pytest.raises(ConfigError, match=f"--num-blocks is {config.num_blocks}: of 16 tokens, there may be"):
        plan_engine(config, model_to_compile(config, make_mesh(config)), lambda _: 10**18)


def test_an_engine_process_has_its_share_of_a_gpu_unless_the_user_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert share_for_engine(os.environ) == {"XLA_CLIENT_MEM_FRACTION": str(POOL_SHARE)}
    assert "0.75, JAX's default" in share_of_jax()
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        with monkeypatch.context() as told:
            told.setenv(name, "0.3")
            assert share_for_engine(os.environ) == {}
            assert share_of_jax() == f"{name}=0.3"


def test_the_process_that_an_llm_starts_has_it_and_the_users_own_has_not(
    tiny_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    with LLM(**tiny_options) as llm:
        engine = llm._engine._process.pid  # type: ignore[union-attr]
        assert f"XLA_CLIENT_MEM_FRACTION={POOL_SHARE}".encode() in Path(f"/proc/{engine}/environ").read_bytes()
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ


PROCESS = """
import sys
from unittest.mock import patch

from jaxpage.config import EngineConfig
from jaxpage.runner import devices

address, process_id, free = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = EngineConfig(
    tensor_parallel_size=2, num_processes=2, process_id=process_id, coordinator_address=address
)
devices.join_processes(config)
with patch.object(devices, "available_host_memory", lambda: free):
    print(devices.free_bytes(devices.make_mesh(config)))
"""


def test_processes_agree_on_the_least_memory_beyond_32_bits() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    free = [131 * GIB, 130 * GIB + 12345]
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(process_id), str(of_process)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process_id, of_process in enumerate(free)
    ]
    found = [process.communicate(timeout=120) for process in both]
    assert [out.splitlines()[-1:] for out, _ in found] == [[str(130 * GIB)]] * 2, [
        errors[-2000:] for _, errors in found
    ]


def groups(tmp_path: Path, own: str, files: dict[str, dict[str, str]]) -> list[int]:
    (tmp_path / "own").write_text(own)
    for folder, entries in files.items():
        (tmp_path / "root" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in entries.items():
            (tmp_path / "root" / folder / name).write_text(text)
    return list(container_room(tmp_path / "root", tmp_path / "own"))


def test_a_containers_limit_counts_without_what_was_read_from_files(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 300\nactive_file 7\n"
    files = {
        "a": {"memory.max": "2000\n", "memory.current": "1500\n", "memory.stat": stat},
        "a/b": {"memory.max": "max\n", "memory.current": "900\n", "memory.stat": stat},
        "a/b/c": {"memory.max": "800\n", "memory.current": "1200\n", "memory.stat": stat},
    }
    assert groups(tmp_path, "0::/a/b/c\n", files) == [0, 800]


def test_control_groups_of_the_first_version_count_too_also_by_a_path_from_outside(tmp_path: Path) -> None:
    stat = "inactive_file 1\ntotal_inactive_file 50\n"
    files = {"memory": {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "400", "memory.stat": stat}}
    own = "5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n"
    assert groups(tmp_path, own, files) == [650]


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert list(container_room(tmp_path / "none", tmp_path / "neither")) == []
    assert available_host_memory() > 0
