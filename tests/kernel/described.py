"""Artifacts for GPUs, and the engine on a machine that `described_driver/` describes: see `described_engine.py`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from described_machine import environment, environment_there

A_LITTLE_MEMORY = {"XLA_CLIENT_MEM_FRACTION": "0.01"}
"""Of each GPU's. JAX keeps tables about all that it takes, in the host's memory: 3 GiB for a whole H200."""

Found = dict[str, Any]


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


def run_engine(libraries: Path, options: dict[str, Any], kinds: tuple[str, ...] = (), **variables: str) -> Found:
    """What `described_engine.py` prints where these libraries are CUDA's.

    options: the engine's; variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("described_engine.py"), json.dumps(options), *kinds],
        env=environment_there(libraries, options["tensor_parallel_size"], **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    return found
