"""Weights declared in one place: name in the checkpoint, shape and logical axes; and how they reach the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.models.checkpoints.checkpoint import Checkpoint

Params = Any
"""A pytree of arrays (or, in `param_specs`, of `Weight`)."""

MESH_AXES: dict[str, str | None] = {
    "vocab": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "embed": None,
    "head": None,
    "head_dim": None,
    "part": None,
}
"""Logical axis of a weight -> axis of the device mesh; None is replicated."""


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or the part of a `Weight` that it makes."""

    name: str
    """Its Hugging Face name."""
    shape: tuple[int, ...]
    """As stored."""
    view: tuple[int, ...]
    """As it goes into the weight."""
    copies: int = 1
    """How often each slice along the view's first axis goes in, one copy behind the other."""


@dataclass(frozen=True)
class Weight:
    """One array of a model, made of one or several tensors that are always multiplied together."""

    sources: tuple[Source, ...]
    axes: tuple[str, ...]
    """Logical axis of each dimension; keys of `MESH_AXES`."""
    join_axis: int = 0
    """Where several sources are concatenated."""

    @property
    def shape(self) -> tuple[int, ...]:
        joined = list(self.sources[0].view)
        joined[self.join_axis] = sum(source.view[self.join_axis] for source in self.sources)
        return tuple(joined)

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """Where the array lives on `mesh`; an axis of a size that the devices do not divide is whole on each."""
        wanted = zip(self.shape, (MESH_AXES[axis] for axis in self.axes), strict=True)
        divided = (axis if axis is not None and size % mesh.shape[axis] == 0 else None for size, axis in wanted)
        return NamedSharding(mesh, PartitionSpec(*divided))


def weight(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Weight:
    """A weight that is one tensor, as stored."""
    return Weight((Source(name, shape, shape),), axes)


def map_weights(function: Callable[[Weight], Any], specs: Params) -> Params:
    """`specs` with every `Weight` replaced by `function` of it."""
    return jax.tree.map(function, specs, is_leaf=lambda leaf: isinstance(leaf, Weight))


def param_shapes(specs: Params, dtype: np.dtype[Any], mesh: Mesh) -> Params:
    """What `load_params` will give, as `ShapeDtypeStruct`s."""
    return map_weights(lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype, sharding=weight.sharding(mesh)), specs)


def load_params(specs: Params, checkpoint: Checkpoint, dtype: np.dtype[Any], mesh: Mesh) -> Params:
    """Read every weight of `specs` straight to its devices, one at a time in host memory.

    Raises `ModelLoadError` naming tensor and file when one is missing, truncated or of another shape.
    """

    def part(source: Source) -> np.ndarray:
        stored = checkpoint.read(source.name, source.shape).reshape(source.view)
        return stored if source.copies == 1 else np.repeat(stored, source.copies, axis=0)

    def load(weight: Weight) -> jax.Array:
        parts = [part(source) for source in weight.sources]
        host = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=weight.join_axis)
        return put_on_mesh(host.astype(dtype, copy=False), weight.sharding(mesh))

    return map_weights(load, specs)


def put_on_mesh(host: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process of the mesh has, on the devices: each process fills its own."""
    if sharding.is_fully_addressable:
        return jax.device_put(host, sharding)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
