"""The one view of a checkpoint that models load from, whatever the file format."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Index = tuple[slice, ...]
"""A part of a tensor: slices without steps, within its shape, over its leading axes; those left out are whole."""


class Checkpoint(Protocol):
    """Tensors under their Hugging Face names, plus the two config files as dicts (GGUF metadata is translated)."""

    path: Path
    config: dict[str, Any]
    """As `config.json`."""
    generation_config: dict[str, Any]
    """As `generation_config.json`; empty when there is none. `eos_token_id` may be an int or a list."""

    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        ...

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """One tensor, or the part of it at `index`, in its stored float type (quantized ones as float32).

        Only that part is read from the file. Raises `ModelLoadError` naming tensor and file when it is missing,
        truncated or not of `shape`, which is the whole tensor's.
        """
        ...
