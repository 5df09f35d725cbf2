"""Artifacts for GPUs, and the engine run from them on what `described_driver/` describes: see `described_engine.py`."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton

from jaxpage.runner.gpu_targets import GPUTarget

COMPILER = Path(sys.prefix) / "gpu-compiler"
HEADERS = Path(triton.__file__).parent / "backends/nvidia/include"
LIBRARIES = ("libcuda.so.1", "libcudart.so.12", "libnvidia-ml.so.1", "libnccl.so.2")
A_LITTLE_MEMORY = 0.01
"""Of each GPU's. JAX keeps tables about all that it takes, in the host's memory: 3 GiB for a whole H200."""

Found = dict[str, Any]


def missing() -> str | None:
    """Why no artifact can be made or run here, if so."""
    if shutil.which("gcc") is None:
        return "no gcc on PATH: the driver that describes devices is compiled with it"
    if not COMPILER.exists():
        return f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it"
    if not (HEADERS / "cuda.h").exists():
        return f"no cuda.h in {HEADERS}: Triton brings it"
    if importlib.util.find_spec("nvidia") is not None:
        return "CUDA's own libraries are installed, and JAX would load those"
    return None


def environment(**extra: str) -> dict[str, str]:
    """For a process that compiles kernels, and does not interpret them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": str(COMPILER), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | extra


def build_driver(folder: Path, target: GPUTarget) -> Path:
    """Fill `folder` with the CUDA libraries of a machine that has such GPUs, and return it."""
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


def compile_artifact(out: Path, model: Path, target: str, options: dict[str, Any]) -> Path:
    """What `jaxpage compile` makes for a target and options of the engine, in `out`."""
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    subprocess.run(
        [sys.executable, "-m", "jaxpage", "compile", "--target", target, "--model", model, "--out", out, *flags],
        env=environment(JAX_PLATFORMS="cpu"),
        check=True,
        capture_output=True,
    )
    return out


def driver_environment(libraries: Path, num_gpus: int, memory_fraction: float | None = None) -> dict[str, str]:
    """For a process for which these libraries are CUDA's."""
    memory = {} if memory_fraction is None else {"XLA_PYTHON_CLIENT_MEM_FRACTION": str(memory_fraction)}
    return environment(
        JAX_PLATFORMS="cuda",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        LD_LIBRARY_PATH=str(libraries),
        DESCRIBED_DEVICES=str(num_gpus),
        **memory,
    )


def run_engine(
    libraries: Path,
    options: dict[str, Any],
    kinds: tuple[str, ...] = (),
    memory_fraction: float | None = None,
) -> Found:
    """What `described_engine.py` prints where these libraries are CUDA's."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("described_engine.py"), json.dumps(options), *kinds],
        env=driver_environment(libraries, options["tensor_parallel_size"], memory_fraction),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found
