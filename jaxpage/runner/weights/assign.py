"""New values for arrays that stay where they are: from arrays of the same process to the weights, chunk by chunk.

Weights that arrive while the engine serves are no piece that steps change, and come in any sharding: what copies them
is compiled for each shape when it is first met, and kept.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxpage.runner.programs.program import compile_function

Chunk = tuple[int, int, int]
"""An axis, where a chunk begins on it, and how long it is."""


class Assign:
    """Copies arrays into others, of the same shapes, that other programs hold; nothing goes through the host."""

    def __init__(self, chunk_bytes: int) -> None:
        """At most so many bytes of each device are used besides the arrays themselves."""
        self._chunk_bytes = chunk_bytes
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def is_finite(self, array: jax.Array) -> jax.Array:
        """Whether no number of an array is NaN or infinite, as an array of one bool on its devices."""
        return self._run("finite", (array,), lambda values: jnp.isfinite(values).all())

    def fresh(self, shape: jax.ShapeDtypeStruct, new: jax.Array) -> jax.Array:
        """The values of `new` in memory of their own, in the type and sharding that `shape` says."""
        empty = self._run(
            ("empty", shape.shape, shape.dtype), (), lambda: jnp.zeros(shape.shape, shape.dtype), shape.sharding
        )
        return self.copy(empty, new)

    def copy(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """`old` with the values of `new`, in its own type, sharding and memory: `old` is donated.

        `new` may lie on other devices, and be divided otherwise.
        """
        sharding = old.sharding
        assert isinstance(sharding, NamedSharding)
        if new.sharding.is_equivalent_to(sharding, new.ndim):
            return self._overwrite((), old, new)
        if not new.ndim:
            return self._overwrite((), old, self._moved(new, sharding))
        for axis, start, size in self._chunks(new.shape, new.dtype.itemsize, sharding):
            cut = partial(jax.lax.slice_in_dim, start_index=start, limit_index=start + size, axis=axis)
            chunk = self._run(("cut", axis, start, size), (new,), cut, _whole(new.sharding))
            old = self._overwrite((axis, start), old, self._moved(chunk, sharding))
            old.block_until_ready()  # or the memory of all chunks would be taken at once
        return old

    def _moved(self, chunk: jax.Array, sharding: NamedSharding) -> jax.Array:
        """What is whole on each of its devices, as `sharding` divides it. JAX would take it through the host."""
        sources = [shard.data for shard in chunk.addressable_shards]
        by_device = {shard.device: shard.data for shard in chunk.addressable_shards}
        parts = []
        for number, (device, index) in enumerate(sharding.addressable_devices_indices_map(chunk.shape).items()):
            source = by_device.get(device, sources[number % len(sources)])
            bounds = tuple(part.indices(size)[:2] for part, size in zip(index or (), chunk.shape, strict=True))
            cut = partial(
                jax.lax.slice,
                start_indices=[start for start, _ in bounds],
                limit_indices=[end for _, end in bounds],
            )
            part = self._run(("part", bounds), (source,), cut)
            parts.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays(chunk.shape, sharding, parts)

    def _overwrite(self, where: tuple[int, ...], old: jax.Array, new: jax.Array) -> jax.Array:
        """Write `new` over all of `old` or, at (axis, start), over a part."""

        def overwritten(old: jax.Array, new: jax.Array) -> jax.Array:
            values = jnp.copy(new).astype(old.dtype)  # JAX gives back an argument that nothing is done with
            if not where:
                return values
            axis, start = where
            return jax.lax.dynamic_update_slice_in_dim(old, values, start, axis)

        return self._run(("overwrite", *where), (old, new), overwritten, old.sharding, donated=0)

    def _chunks(self, shape: tuple[int, ...], itemsize: int, sharding: NamedSharding) -> list[Chunk]:
        """The parts of an array that are moved one after the other, each divided over the target as the whole is."""
        local = sharding.shard_shape(shape)
        parts = [whole // own for whole, own in zip(shape, local, strict=True)]
        axis = int(np.argmax([size if count == 1 else 0 for size, count in zip(shape, parts, strict=True)]))
        if parts[axis] > 1:  # every axis is divided: chunks are, too
            axis = 0
        row = math.prod(local) // local[axis] * itemsize
        step = max(1, self._chunk_bytes // max(row, 1)) * parts[axis]
        return [(axis, start, min(step, shape[axis] - start)) for start in range(0, shape[axis], step)]

    def _run(
        self,
        name: Hashable,
        args: tuple[jax.Array, ...],
        function: Callable[..., Any],
        sharding: Sharding | None = None,
        donated: int | None = None,
    ) -> jax.Array:
        key = (name, sharding, *((array.shape, array.dtype, array.sharding) for array in args))
        if key not in self._compiled:
            self._compiled[key] = compile_function(function, *args, donated=donated, out_shardings=sharding)
        result: jax.Array = self._compiled[key](*args)
        return result


def _whole(sharding: Sharding) -> Sharding:
    """The same devices, each with all of it."""
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
