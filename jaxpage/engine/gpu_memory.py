"""How much of a GPU's memory JAX takes in a process of ours. No JAX: it must be settled before JAX looks for a GPU."""

import os
from collections.abc import Mapping

POOL_SHARE = 0.92
"""What JAX may take where a process is an engine's alone: the rest holds CUDA, its libraries, graphs and code."""

_NAMES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Where JAX is told, now and formerly; it refuses to be told twice. Untold, it takes 0.75."""


def share_for_engine(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of an engine's process: nothing where the user has said how much."""
    return {} if any(environment.get(name) for name in _NAMES) else {_NAMES[0]: str(POOL_SHARE)}


def share_of_jax() -> str:
    """What JAX takes of a GPU in this process, in words."""
    for name in _NAMES:
        if share := os.environ.get(name):
            return f"{name}={share}"
    return f"0.75, JAX's default: {_NAMES[0]}={POOL_SHARE} before JAX starts gives more"
