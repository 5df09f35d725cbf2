"""Artifacts for GPUs, loaded and run by JAX's own client for GPUs, on devices that `described_driver/` describes.

Nothing is computed there, and no test here says that a number is right or that anything is fast: for that there is
`scripts/gpu_check`, on a GPU. What is shown is that an artifact which was compiled without a GPU is taken by a client
that has one, every program of it, and what the host asks of a driver from one step to the next: how many launches and
copies, and that it waits for nothing.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import triton

from jaxpage.gpu_memory import POOL_SHARE
from jaxpage.runner.gpu_targets import TARGETS, GPUTarget

COMPILER = Path(sys.prefix) / "gpu-compiler"
HEADERS = Path(triton.__file__).parent / "backends/nvidia/include"
LIBRARIES = ("libcuda.so.1", "libcudart.so.12", "libnvidia-ml.so.1", "libnccl.so.2")
SHAPES = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
LATER = {"max_model_len": 64, "num_blocks": 20}
NUM_LAYERS = 2
KINDS = ("greedy", "random", "any", "forked")
A_LITTLE_MEMORY = 0.01
"""Of each GPU's. JAX keeps tables about all that it takes, in the host's memory: 3 GiB for a whole H200."""

Found = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _has_what_it_takes() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on PATH: the driver that describes devices is compiled with it")
    if not COMPILER.exists():
        pytest.skip(f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it")
    if not (HEADERS / "cuda.h").exists():
        pytest.skip(f"no cuda.h in {HEADERS}: Triton brings it")
    if importlib.util.find_spec("nvidia") is not None:
        pytest.skip("CUDA's own libraries are installed, and JAX would load those")


def environment(**extra: str) -> dict[str, str]:
    """For a process that compiles kernels, and does not interpret them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": str(COMPILER), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | extra


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("described") / "model"
    config = tiny.TINY["llama"] | {"num_attention_heads": 8}  # and 2 KV heads, of which 8 GPUs have 4 copies each
    tiny.write_checkpoint(folder, config, tiny.make_weights(config))
    return folder


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GPUTarget], Path]:
    """A folder with CUDA libraries of a machine that has such GPUs."""

    def build(target: GPUTarget) -> Path:
        folder = tmp_path_factory.mktemp("libraries")
        macros = {
            "NAME": json.dumps(target.name),
            "COMPUTE_CAPABILITY": target.compute_capability,
            "NUM_SMS": target.num_sms,
            "CLOCK_KHZ": round(target.clock_ghz * 1e6),
            "SHARED_BYTES": target.shared_bytes,
            "L2_BYTES": target.l2_bytes,
            "MEMORY_BYTES": target.memory_bytes,
            "BYTES_PER_SECOND": int(target.bytes_per_second),
        }
        sources = sorted(Path(__file__).with_name("described_driver").glob("*.c"))
        subprocess.run(
            [
                *("gcc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror"),
                *("-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", f"-I{HEADERS}"),
                *(f"-D{name}={value}" for name, value in macros.items()),
                *(*sources, "-o", folder / LIBRARIES[0]),
            ],
            check=True,
        )
        for name in LIBRARIES[1:]:
            (folder / name).symlink_to(LIBRARIES[0])
        return folder

    return build


@pytest.fixture(scope="module")
def h200(described: Callable[[GPUTarget], Path]) -> Path:
    return described(TARGETS["h200"])


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """What `jaxpage compile` makes for so many H200."""

    def make(num_gpus: int) -> Path:
        out = tmp_path_factory.mktemp("artifact") / "programs"
        options = SHAPES | LATER | {"tensor_parallel_size": num_gpus}
        flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        subprocess.run(
            [sys.executable, "-m", "jaxpage", "compile", "--target", "h200", "--model", model, "--out", out, *flags],
            env=environment(JAX_PLATFORMS="cpu"),
            check=True,
            capture_output=True,
        )
        return out

    return make


def run(
    libraries: Path,
    model: Path,
    programs: Path,
    num_gpus: int = 1,
    kinds: tuple[str, ...] = (),
    memory_fraction: float = POOL_SHARE,
) -> Found:
    """What `described_engine.py` prints where these libraries are CUDA's.

    memory_fraction: what JAX takes of each GPU's memory; an engine's share by default.
    """
    options = SHAPES | {"model": str(model), "programs": str(programs), "tensor_parallel_size": num_gpus}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("described_engine.py"), json.dumps(options), *kinds],
        env=environment(
            JAX_PLATFORMS="cuda",
            JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
            LD_LIBRARY_PATH=str(libraries),
            DESCRIBED_DEVICES=str(num_gpus),
            XLA_CLIENT_MEM_FRACTION=str(memory_fraction),
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def single(h200: Path, model: Path, artifact: Callable[[int], Path]) -> tuple[Path, Found]:
    """An artifact for one H200, and what came of it there."""
    programs = artifact(1)
    return programs, run(h200, model, programs, kinds=KINDS)


@pytest.fixture(scope="module")
def pair(h200: Path, model: Path, artifact: Callable[[int], Path]) -> Found:
    """The same of two."""
    return run(h200, model, artifact(2), 2, KINDS, A_LITTLE_MEMORY)


@pytest.fixture(scope="module", params=["single", "pair"])
def found(request: pytest.FixtureRequest) -> Found:
    it = request.getfixturevalue(request.param)
    result: Found = it if isinstance(it, dict) else it[1]
    return result


def test_a_gpu_client_finds_what_is_described(single: tuple[Path, Found]) -> None:
    target, (_, found) = TARGETS["h200"], single
    assert found["devices"] == [[target.name, "9.0", target.num_sms]]
    # Of the memory, JAX takes what an artifact is made for, in pages of 2 MiB.
    assert 0 <= found["bytes_limit"] - target.pool_bytes < 2 * 2**20


def check_that_all_is_loaded(found: Found) -> None:
    stats = found["stats"]
    assert stats["num_programs_loaded"] == stats["num_programs"] == stats["num_programs_wanted"] > 10
    assert found["traces"] == {}
    assert found["num_compiles"] == 0


def test_every_program_is_loaded_and_none_is_traced_or_compiled(found: Found) -> None:
    check_that_all_is_loaded(found)


def test_every_program_for_eight_gpus_is_loaded(h200: Path, model: Path, artifact: Callable[[int], Path]) -> None:
    """All of them run there, and a greedy step waits for no device either."""
    found = run(h200, model, artifact(8), 8, ("greedy",), A_LITTLE_MEMORY)
    assert len(found["devices"]) == 8
    check_that_all_is_loaded(found)
    for request in ("later", "lagging"):
        check_that_no_step_waits(found["greedy"][request])


def test_another_gpu_refuses_an_artifact_by_name(
    single: tuple[Path, Found], model: Path, described: Callable[[GPUTarget], Path]
) -> None:
    refused = run(described(TARGETS["a100"]), model, single[0])["refused"]
    assert "compiled for devices '1 x NVIDIA H200', and here is '1 x NVIDIA A100-SXM4-80GB'" in refused


def check_that_no_step_waits(decoded: Found) -> None:
    assert [step["waits"] for step in decoded["steps"]] == [0] * 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_waits_for_no_device(found: Found, kind: str) -> None:
    for request in ("later", "lagging"):
        check_that_no_step_waits(found[kind][request])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_request_finds_all_code_on_the_devices(found: Found, kind: str) -> None:
    """Every program has run before the engine was ready, and there JAX has waited for constants to be there."""
    assert found["ready"]["modules"] > 100
    assert found["ready"]["waits"] > 0
    assert found[kind]["first"]["all"]["modules"] == 0
    check_that_no_step_waits(found[kind]["first"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_sends_off_a_step_before_a_device_has_begun_the_one_before(found: Found, kind: str) -> None:
    """They run a launch only when the next step's has come: a host that waits in between waits for ever.

    So much is shown by that it came through, and here that they did lag.
    """
    lagging = found[kind]["lagging"]
    launches = [step["launches"] + step["graphs"] for step in lagging["steps"][3:]]
    assert all(waiting >= number > 0 for waiting, number in zip(lagging["waiting"][1:], launches, strict=True))
    assert lagging["num_tokens"] == found[kind]["later"]["num_tokens"] == (32 if kind == "forked" else 16)


@pytest.mark.parametrize("kind", KINDS)
def test_every_decode_step_is_asked_for_alike(found: Found, kind: str) -> None:
    """One small array goes to each device, and a token for each row comes back; with log-probabilities, four more."""
    later, num_gpus = found[kind]["later"], len(found["devices"])
    asked = [{name: step[name] for name in ("launches", "graphs", "in_graphs", "copies_in")} for step in later["steps"]]
    assert asked[3:] == [asked[3]] * 6
    assert asked[3]["copies_in"] == num_gpus
    assert later["all"]["copies_out"] == later["num_steps"] * (5 if kind == "any" else 1)
    assert later["all"]["modules"] == 0


def test_what_else_is_asked_for_is_done(found: Found) -> None:
    """Log-probabilities come with every token; a fork copies the block that both sequences go on in."""
    for request in ("later", "lagging"):
        assert found["any"][request]["num_logprobs"] == 16
        assert [step["block_copies"] for step in found["forked"][request]["steps"]] == [0, 0, 1] + [0] * 6


def test_a_greedy_step_is_two_graphs(single: tuple[Path, Found]) -> None:
    step = single[1]["greedy"]["later"]["steps"][-1]
    assert (step["launches"], step["graphs"]) == (0, 2)
    assert step["in_graphs"] < 40


def test_devices_exchange_two_sums_per_layer(pair: Found) -> None:
    """And one for the embedding; each draw finds the best token of all, and what it is."""
    step = pair["greedy"]["later"]["steps"][-1]
    assert step["collectives"] == 2 * (2 * NUM_LAYERS + 1 + 2)
