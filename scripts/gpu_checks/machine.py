"""What machine this is, and what its card reaches."""

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from gpu_checks.child import Context, Row
from gpu_checks.device import data_sheet
from gpu_checks.timing import time_program
from gpu_checks.verdicts import COPY_SHARE, PRODUCT_SHARE

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton", "numpy")
KERNELS_NEED = ("jax_triton", "triton")
ENGINES_NEED = ("msgspec", "zmq", "llguidance", "tokenizers", "transformers", "jinja2", "gguf", "yaml", "ml_dtypes")
_FLAGS = ("XLA_FLAGS", "JAX_PLATFORMS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
_QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def machine(context: Context) -> Iterator[Row]:
    """Versions, what is missing, and the devices."""
    yield {"python": platform.python_version(), "cpus": os.cpu_count(), "tools": _tools()}
    yield {"versions": {name: _version(name) for name in PACKAGES}}
    yield {"environment": {name: os.environ[name] for name in _FLAGS if name in os.environ}}
    missing = [name for name in (*KERNELS_NEED, *ENGINES_NEED) if importlib.util.find_spec(name) is None]
    yield {
        "case": "packages",
        "ok": not missing,
        "expected": "all there",
        "measured": f"missing: {', '.join(missing)}" if missing else "all there",
    }
    yield from _asked_of_nvidia_smi()
    devices = jax.devices()
    device, sheet = devices[0], data_sheet()
    row: dict[str, Any] = {"device": device.device_kind, "num_devices": len(devices), "platform": device.platform}
    row["memory_gib"] = (device.memory_stats() or {}).get("bytes_limit", 0) / 2**30
    if sheet is not None:
        row["sheet_bytes_per_second"] = sheet.bytes_per_second
        row["sheet_flops_per_second"] = sheet.flops_per_second
    yield row
    yield {"case": "a GPU", "ok": device.platform == "gpu" or context.is_dry, "measured": device.device_kind}


def peaks(context: Context) -> Iterator[Row]:
    """A copy of a large array, and a product of large bfloat16 matrices, of random numbers: zeros run faster."""
    sheet, key = data_sheet(), jax.random.key(0)
    bits = jax.random.bits(key, context.sizes.copy_bytes // 4, jnp.uint32)
    timing = time_program(jax.jit(lambda x: x ^ 1), (bits,), 1, 1.0)
    row: Row = {"case": "copy", "peak": "bytes", "unit": "TB/s", "scale": 1e12, "spread": timing.spread}
    yield row | {"value": 2 * bits.nbytes / timing.seconds / 1e12} | _floor(sheet, "bytes_per_second", COPY_SHARE, 1e12)
    del bits
    n = context.sizes.product
    left, right = (jax.random.normal(each, (n, n), jnp.bfloat16) for each in jax.random.split(key))
    timing = time_program(jax.jit(jnp.matmul), (left, right), 1, 1.0)
    row = {"case": "product", "peak": "flops", "unit": "TFLOP/s", "scale": 1e12, "spread": timing.spread}
    yield row | {"value": 2 * n**3 / timing.seconds / 1e12} | _floor(sheet, "flops_per_second", PRODUCT_SHARE, 1e12)


def _floor(sheet: Any, name: str, share: float, scale: float) -> Row:
    return {} if sheet is None else {"at_least": share * getattr(sheet, name) / scale}


def _tools() -> dict[str, str | None]:
    return {name: shutil.which(name) for name in ("ptxas", "nvcc", "nvidia-smi", "ncu", "cuobjdump")}


def _asked_of_nvidia_smi() -> Iterator[Row]:
    if shutil.which("nvidia-smi") is None:
        return
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    yield {"nvidia_smi": _QUERY, "says": (done.stdout or done.stderr).strip()}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
