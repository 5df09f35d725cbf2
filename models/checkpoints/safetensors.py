"""Hugging Face directories with safetensors files as a `Checkpoint`.

Tensors are memory-mapped: nothing is read before it is asked for, and nothing twice. The safetensors header is parsed
here because the library's numpy face knows no bfloat16. Format: https://github.com/huggingface/safetensors#format.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints.checkpoint import Index

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BODY_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where one tensor lies: `[start, stop)` are bytes of its shard's file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsCheckpoint:
    """`Checkpoint` over a directory with `model.safetensors`, or with shards and their index.

    Only what the index maps counts: other files, and other copies in the shards, are never looked at. Every shard is
    opened here and its table checked against its size. Raises `ModelLoadError` naming the file at fault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = _read_json(generation) if generation.is_file() else {}
        if (path / _INDEX).is_file():
            self._shard_of = {name: path / shard for name, shard in _weight_map(path / _INDEX).items()}
        elif (path / _SINGLE).is_file():
            self._shard_of = dict.fromkeys(_read_table(path / _SINGLE), path / _SINGLE)
        else:
            raise ModelLoadError(f"{path} has neither {_SINGLE} nor {_INDEX}: only safetensors weights are read")
        tables = {shard: _read_table(shard) for shard in sorted(set(self._shard_of.values()))}
        self._data = {shard: np.memmap(shard, dtype=np.uint8, mode="r") for shard in tables}
        for name, shard in self._shard_of.items():
            if name not in tables[shard]:
                raise ModelLoadError(f"{shard} lacks the tensor {name} that {_INDEX} places there")
        plain = plain_names(self._shard_of)
        self._tensors = {plain[name]: tables[shard][name] for name, shard in self._shard_of.items()}
        self._shard_of = {plain[name]: shard for name, shard in self._shard_of.items()}

    def names(self) -> Iterable[str]:
        """Names of all tensors; see `plain_names`."""
        return self._tensors.keys()

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """The part at `index` of a tensor of `shape`, in its stored float type: a read-only view of the mapped file.

        Only the pages that the view touches are read, when it is used. Raises `ModelLoadError` naming tensor and
        file when it is missing, of another shape or no float.
        """
        if name not in self._tensors:
            raise ModelLoadError(f"{self.path} has no tensor {name}")
        tensor, shard = self._tensors[name], self._shard_of[name]
        if tensor.shape != shape:
            raise ModelLoadError(f"tensor {name} in {shard} has shape {tensor.shape}, the config asks for {shape}")
        if tensor.dtype not in _DTYPES:
            raise ModelLoadError(
                f"tensor {name} in {shard} has the type {tensor.dtype}, served are {', '.join(_DTYPES)}"
            )
        stored = self._data[shard][tensor.start : tensor.stop].view(np.ndarray)
        values: np.ndarray = stored.view(_DTYPES[tensor.dtype]).reshape(shape)[index]
        return values


def plain_names(stored: Iterable[str]) -> dict[str, str]:
    """Stored names to those of a causal language model, `model.layers...` and `lm_head...`.

    transformers leaves out "model." where it saves a model without its head, as embedding models are, and puts the
    text part of a model that also sees under "language_model.", before or behind "model.".
    """
    names = set(stored)
    body = next((prefix for prefix in _BODY_PREFIXES if f"{prefix}embed_tokens.weight" in names), "model.")

    def plain(name: str) -> str:
        if name.startswith("language_model.lm_head."):
            return name.removeprefix("language_model.")
        if name.startswith(body) and not name.startswith("lm_head."):
            return "model." + name.removeprefix(body)
        return name

    return {name: plain(name) for name in names}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return value


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name to shard's file name."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelLoadError(f"{index} names the shard {shard!r}: it must be a file beside it")
    return weight_map


def _read_table(shard: Path) -> dict[str, _Tensor]:
    """The shard's header, checked against its size."""
    try:
        size = shard.stat().st_size
        with shard.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if size < 8 or header_size > size - 8:
                raise ModelLoadError(f"{shard} is cut short: {size} bytes are less than its header")
            header = json.loads(file.read(header_size))
    except OSError as error:
        raise ModelLoadError(f"{shard} cannot be opened: {error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{shard} is no safetensors file: {error}") from error
    table = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            start, stop = (8 + header_size + offset for offset in entry["data_offsets"])
            tensor = _Tensor(entry["dtype"], tuple(entry["shape"]), start, stop)
            count = math.prod(tensor.shape)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{shard} has a damaged entry for tensor {name}: {entry}") from error
        if not 8 + header_size <= start <= stop:
            raise ModelLoadError(f"{shard} has a damaged entry for tensor {name}: {entry}")
        if stop > size:
            raise ModelLoadError(f"{shard} is cut short: tensor {name} ends at byte {stop}, the file at {size}")
        # Types that are not served are refused by `read`, should anyone ask for them.
        if tensor.dtype in _DTYPES and stop - start != (expected := count * int(_DTYPES[tensor.dtype].itemsize)):
            raise ModelLoadError(f"{shard} gives tensor {name} {stop - start} bytes, its shape needs {expected}")
        table[name] = tensor
    return table
