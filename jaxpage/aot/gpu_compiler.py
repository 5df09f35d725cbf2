"""Where JAX's compiler for GPUs is. No JAX: it must be found before JAX is imported."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from jaxpage.errors import ConfigError


def find_gpu_compiler() -> None:
    """Let JAX find its CUDA plugin: installed beside it or, as `scripts/setup.sh` does, in a folder of its own.

    Call it before JAX is imported, which then looks for no GPU. Raises `ConfigError` where there is no plugin.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    apart = Path(sys.prefix) / "gpu-compiler"
    if apart.is_dir() and str(apart) not in sys.path:
        sys.path.append(str(apart))
    if not any(find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        raise ConfigError(
            "JAX has no compiler for GPUs here: install jaxpage[cuda12] or jaxpage[cuda13]; no GPU is needed to compile"
        )
