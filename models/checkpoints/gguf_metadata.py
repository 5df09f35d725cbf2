"""Reading a GGUF file's header: its metadata and where each tensor lies. No tensor data is touched.

The `gguf` package's own reader builds numpy views for every vocabulary string, which takes seconds for a vocabulary
of 49k tokens and half a minute for 262k; this one takes a fraction of a second. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from jaxpage.errors import ModelLoadError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies. `shape` is row-major as in Hugging Face files: `[out, in]`, the reverse of GGUF's."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    """Bytes from the start of the file."""
    part: int = 0
    """Which file, where there are several."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What stands before the tensor data of one GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """Scalars, strings, and arrays as sequences."""
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path) -> GgufHeader:
    """Parses metadata and tensor table. Raises `ModelLoadError` naming the file when it is no GGUF or cut short."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (OSError, ValueError, struct.error, IndexError) as error:  # mmap of an empty file is a ValueError
        raise ModelLoadError(f"{path} is not a readable GGUF file ({error}): it may be cut short") from error


class GgufStrings(Sequence[str]):
    """An array of strings, decoded when somebody reads it: an engine's process needs none of a vocabulary."""

    def __init__(self, stored: bytes, count: int) -> None:
        """stored: each string behind its length, as it is in the file."""
        self._stored = stored
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded[index]

    @cached_property
    def _decoded(self) -> list[str]:
        # The hot loop of loading a tokenizer: locals and slices only.
        stored, position, length_at = self._stored, 0, _LENGTH.unpack_from
        out = []
        for _ in range(self._count):
            start = position + 8
            position = start + length_at(stored, position)[0]
            out.append(stored[start:position].decode("utf-8", "replace"))
        return out


class _Parser:
    """A cursor over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> GgufHeader:
        magic, version, num_tensors, num_keys = self.unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ModelLoadError(f"{self.path} is not a GGUF file of version 2 or 3, little-endian")
        metadata = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.unpack("<I")[0])
        entries = [self.tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        base = -(-self.position // alignment) * alignment
        tensors = {name: GgufTensor(shape, kind, base + offset) for name, shape, kind, offset in entries}
        return GgufHeader(self.path, metadata, tensors)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        num_dims = self.unpack("<I")[0]
        dims = self.unpack(f"<{num_dims}Q")
        kind, offset = self.unpack("<IQ")
        return name, tuple(reversed(dims)), kind, offset

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> "GgufStrings":
        data, begin, position, length_at = self.data, self.position, self.position, _LENGTH.unpack_from
        for _ in range(count):
            position += 8 + length_at(data, position)[0]
        if position > len(data):
            raise ValueError(f"a string ends at byte {position} of {len(data)}")
        self.position = position
        return GgufStrings(data[begin:position], count)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.unpack("<IQ")
            if item_kind == _STRING:
                return self.strings(count)
            if item_kind in _SCALARS:
                return self.unpack(f"<{count}{_SCALARS[item_kind]}")
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata value of unknown kind {kind} at byte {self.position}")
        return self.unpack("<" + _SCALARS[kind])[0]
