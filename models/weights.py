"""Weights declared in one place: sources, type and logical axes; and how they reach the devices.

Each process reads the parts of the checkpoint that its own devices hold. Beside what the devices keep, host memory
holds one shard at a time.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.stored import Box, Join, Source
from jaxpage.ops.quantized import QuantizedWeight, channel_scale, to_int8

Params = Any
"""A pytree of arrays and `QuantizedWeight`s (or, in `param_specs`, of `Weight`)."""

MESH_AXES: Mapping[str, str | None] = {
    "vocab": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "embed": None,
    "head": None,
    "head_dim": None,
    "part": None,
}
"""Logical axis of a weight -> axis of the device mesh; None is replicated."""

_CHUNK = 1 << 20
"""About how many values are converted at once."""


@dataclass(frozen=True)
class Weight:
    """One array of a model, made of one or several tensors that are always multiplied together."""

    sources: tuple[Source | Join, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension; keys of `MESH_AXES`, or of the loader's own table."""
    join_axis: int = 0
    """Where several sources are concatenated."""
    dtype: np.dtype[Any] | None = None
    """Its own type; None is the model's."""
    quantize: Literal["int8"] | None = None
    """What it becomes on loading: "int8" is a `QuantizedWeight` with a scale for each output channel."""

    @property
    def shape(self) -> tuple[int, ...]:
        return Join(self.sources, self.join_axis).filled_shape

    def placed(self) -> Iterator[tuple[Source, tuple[int, ...]]]:
        """Every source, and where the box that it fills begins."""
        return Join(self.sources, self.join_axis).placed()

    def sharding(self, mesh: Mesh, mesh_axes: Mapping[str, str | None] = MESH_AXES) -> NamedSharding:
        """Where the array lives on `mesh`; an axis of a size that the devices do not divide is whole on each."""
        wanted = zip(self.shape, (mesh_axes[axis] for axis in self.axes), strict=True)
        divided = (axis if axis is not None and size % mesh.shape[axis] == 0 else None for size, axis in wanted)
        return NamedSharding(mesh, PartitionSpec(*divided))


def weight(
    name: str,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    *,
    dtype: np.dtype[Any] | None = None,
    quantize: Literal["int8"] | None = None,
) -> Weight:
    """A weight that is one tensor, as stored."""
    return Weight((Source(name, shape, shape),), axes, dtype=dtype, quantize=quantize)


def map_weights(function: Callable[[Weight], Any], specs: Params) -> Params:
    """`specs` with every `Weight` replaced by `function` of it."""
    return jax.tree.map(function, specs, is_leaf=lambda leaf: isinstance(leaf, Weight))


def param_shapes(
    specs: Params, dtype: np.dtype[Any], mesh: Mesh, mesh_axes: Mapping[str, str | None] = MESH_AXES
) -> Params:
    """What `load_params` will give, as `ShapeDtypeStruct`s."""

    def shapes(weight: Weight) -> Any:
        sharding, own = weight.sharding(mesh, mesh_axes), weight.dtype or dtype
        if weight.quantize is None:
            return jax.ShapeDtypeStruct(weight.shape, own, sharding=sharding)
        values: Any = jax.ShapeDtypeStruct(weight.shape, np.int8, sharding=sharding)
        scale: Any = jax.ShapeDtypeStruct(weight.shape[:-1], np.float32, sharding=_channel_sharding(sharding))
        return QuantizedWeight(values, scale, np.dtype(own))

    return map_weights(shapes, specs)


def _channel_sharding(sharding: NamedSharding) -> NamedSharding:
    """Where one number for each output channel lives: as the weight, without its last axis."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))


def load_params(
    specs: Params,
    checkpoint: Checkpoint,
    dtype: np.dtype[Any],
    mesh: Mesh,
    mesh_axes: Mapping[str, str | None] = MESH_AXES,
) -> Params:
    """Read every weight of `specs`, shard by shard, straight to the devices; `dtype` is for those without their own.

    Raises `ModelLoadError` naming tensor and file when one is missing, truncated or of another shape.
    """

    shapes = jax.tree.leaves(param_shapes(specs, dtype, mesh, mesh_axes))
    transfers = _Transfers(max((_shard_bytes(shape) for shape in shapes), default=0) // 10)

    def load(weight: Weight) -> jax.Array | QuantizedWeight:
        sharding, own = weight.sharding(mesh, mesh_axes), np.dtype(weight.dtype or dtype)
        if weight.quantize is None:
            return _put_shards(weight.shape, sharding, lambda box: _read_box(weight, box, checkpoint, own), transfers)
        return _load_int8(weight, checkpoint, own, sharding, transfers)

    return map_weights(load, specs)


class _Transfers:
    """Copies to devices that may still be under way, and the host arrays behind them still be there."""

    def __init__(self, most_bytes: int) -> None:
        """So many bytes may be under way while the next shard is read."""
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._arrays: list[jax.Array] = []

    def add(self, arrays: list[jax.Array], num_bytes: int) -> None:
        """Note copies of a host array that the caller no longer holds; wait if there are too many."""
        self._arrays += arrays
        self._num_bytes += num_bytes
        if self._num_bytes > self._most_bytes:
            jax.block_until_ready(self._arrays)
            self._arrays, self._num_bytes = [], 0
            gc.collect(0)  # JAX lets go of host arrays that have been copied only here, or in the next transfer


def _shard_bytes(shape: jax.ShapeDtypeStruct) -> int:
    assert shape.sharding is not None
    return math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize


def _put_shards(
    shape: tuple[int, ...], sharding: NamedSharding, read: Callable[[Box], np.ndarray], transfers: _Transfers
) -> jax.Array:
    """An array of which this process makes the parts that its devices hold, each part once."""
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        box = tuple(range(size)[part] for size, part in zip(shape, index, strict=True))
        holders.setdefault(box, []).append(device)
    shards = []
    for box, devices in holders.items():
        host = read(box)
        copies, num_bytes = [jax.device_put(host, device) for device in devices], host.nbytes
        del host
        transfers.add(copies, num_bytes)
        shards += copies
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _read_box(weight: Weight, box: Box, checkpoint: Checkpoint, dtype: np.dtype[Any]) -> np.ndarray:
    """The values at `box` of a weight, in `dtype`."""
    placed = list(weight.placed())
    source = placed[0][0]
    if len(placed) == 1 and checkpoint.read(source.name, source.shape, (slice(0, 0),)).dtype == dtype:
        return source.read(checkpoint, box)  # where it can be, a view of the file
    out = np.empty([len(positions) for positions in box], dtype)
    for source, offset in placed:
        sizes = zip(box, offset, source.filled_shape, strict=True)
        inside = [range(max(it.start, begin), min(it.stop, begin + size)) for it, begin, size in sizes]
        if not all(inside):
            continue
        for chunk in _chunks(tuple(inside)):
            out[_within(chunk, box)] = source.read(checkpoint, _moved(chunk, offset))
    return out


def _load_int8(
    weight: Weight, checkpoint: Checkpoint, dtype: np.dtype[Any], sharding: NamedSharding, transfers: _Transfers
) -> QuantizedWeight:
    """A channel's scale needs all its inputs: where these are divided among processes, each reads them all."""
    inputs = range(weight.shape[-1])

    @cache
    def scale(channels: Box) -> np.ndarray:
        out = np.empty([len(positions) for positions in channels], np.float32)
        for chunk in _chunks((*channels, inputs)):
            values = _read_box(weight, chunk, checkpoint, dtype)
            out[_within(chunk[:-1], channels)] = channel_scale(np.abs(values).max(axis=-1).astype(np.float32))
        return out

    def values(box: Box) -> np.ndarray:
        out = np.empty([len(positions) for positions in box], np.int8)
        for chunk in _chunks(box):
            its_scale = scale(box[:-1])[_within(chunk[:-1], box[:-1])]
            out[_within(chunk, box)] = to_int8(_read_box(weight, chunk, checkpoint, dtype), its_scale)
        return out

    return QuantizedWeight(
        _put_shards(weight.shape, sharding, values, transfers),
        _put_shards(weight.shape[:-1], _channel_sharding(sharding), scale, transfers),
        dtype,
    )


def _chunks(box: Box) -> Iterator[Box]:
    """`box` in pieces of about `_CHUNK` positions, its last axis undivided."""
    if len(box) <= 1:
        yield box
        return
    first, *others = box
    step = _CHUNK // math.prod(len(positions) for positions in others)
    if step == 0:
        for position in first:
            for rest in _chunks(tuple(others)):
                yield (range(position, position + 1), *rest)
    else:
        for start in range(first.start, first.stop, step):
            yield (range(start, min(start + step, first.stop)), *others)


def _within(box: Box, whole: Box) -> tuple[slice, ...]:
    """Where `box` lies in an array of the values at `whole`."""
    moved = _moved(box, tuple(positions.start for positions in whole))
    return tuple(slice(positions.start, positions.stop) for positions in moved)


def _moved(box: Box, origin: tuple[int, ...]) -> Box:
    """`box` as counted from `origin`."""
    return tuple(
        range(positions.start - start, positions.stop - start) for positions, start in zip(box, origin, strict=True)
    )
