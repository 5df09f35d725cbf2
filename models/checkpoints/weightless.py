"""A model without its weights: programs are compiled from shapes, which `config.json` tells."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints.checkpoint import Index


class ConfigOnly:
    """`Checkpoint` over a directory with nothing but `config.json`, which is taken at its word."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path / 'config.json'} cannot be read as JSON: {error}") from error
        self.generation_config: dict[str, Any] = {}

    def names(self) -> Iterable[str]:
        """The output head, unless the config says that it is the embeddings: Gemma's are, where it says nothing."""
        tied = self.config.get("tie_word_embeddings", "Gemma" in str(self.config.get("architectures")))
        return () if tied else ("lm_head.weight",)

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """Always raises `ModelLoadError`."""
        raise ModelLoadError(f"{self.path} holds no weights, {name} is asked for: only compiling does without them")


class DummyWeights(ConfigOnly):
    """Random weights of the right shapes, for where only speed matters: quick to make, and the same everywhere."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._numbers = (np.random.default_rng(0).standard_normal(2**20) * 0.02).astype(ml_dtypes.bfloat16)

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """The part at `index` of a tensor in bfloat16, which depends on the tensor's shape alone."""
        rows = range(*index[0].indices(shape[0])) if index else range(shape[0])
        first = rows.start * math.prod(shape[1:]) % self._numbers.size
        numbers = np.roll(self._numbers, -first) if first else self._numbers
        return np.resize(numbers, (len(rows), *shape[1:]))[:, *index[1:]]
