"""A machine whose GPUs `described_driver/` describes: its CUDA libraries, and the environment of a process there."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import triton

from jaxpage.aot.targets import GPUTarget

COMPILER = Path(sys.prefix) / "gpu-compiler"
HEADERS = Path(triton.__file__).parent / "backends/nvidia/include"
LIBRARIES = ("libcuda.so.1", "libcudart.so.12", "libnvidia-ml.so.1", "libnccl.so.2", "libcublas.so.12")
WITHOUT_TUNING = "--xla_gpu_autotune_level=0"
"""For XLA. There is nothing to time, and what it fills memory with to try programs would pass for their results."""


def why_not() -> str | None:
    """What this machine lacks to stand in for one with GPUs, if anything."""
    if shutil.which("gcc") is None:
        return "no gcc on PATH: the driver that describes devices is compiled with it"
    if not COMPILER.exists():
        return f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it"
    if not (HEADERS / "cuda.h").exists():
        return f"no cuda.h in {HEADERS}: Triton brings it"
    if importlib.util.find_spec("nvidia") is not None:
        return "CUDA's own libraries are installed, and JAX would load those"
    return None


def build_libraries(target: GPUTarget, folder: Path) -> Path:
    """Fill an empty folder with CUDA libraries of a machine that has such GPUs."""
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


def environment(**extra: str) -> dict[str, str]:
    """For a process that compiles kernels, and does not interpret them."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"PYTHONPATH": str(COMPILER), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | extra


def environment_there(libraries: Path, num_gpus: int = 1, **extra: str) -> dict[str, str]:
    """For a process on the described machine."""
    return environment(
        JAX_PLATFORMS="cuda",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        LD_LIBRARY_PATH=str(libraries),
        DESCRIBED_DEVICES=str(num_gpus),
        **extra,
    )
