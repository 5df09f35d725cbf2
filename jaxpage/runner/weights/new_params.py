"""Weights that come while the engine serves: all of them fit, or none is taken.

In: a pytree as the model's own. Out: its arrays by their names, or a `RequestError` that says which do not fit.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxpage.errors import RequestError

_MOST_NAMED = 4


def by_name(params: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths, such as "layers.0.q"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def checked(params: Any, shapes: Any, is_finite: Callable[[jax.Array], jax.Array]) -> dict[str, jax.Array]:
    """The arrays of `params` by name, each of which fits that of `shapes`, and holds numbers only.

    Raises `RequestError` naming those that lack, are too many, have another shape or kind, are deleted or not finite.
    """
    given, wanted = by_name(params), by_name(shapes)
    faults = {
        "lack": [name for name in wanted if name not in given],
        "are unknown": [name for name in given if name not in wanted],
        "do not fit": [
            misfit for name, leaf in given.items() if name in wanted and (misfit := _misfit(name, leaf, wanted[name]))
        ],
    }
    if not any(faults.values()):
        faults["are not finite"] = _not_finite(given, is_finite)
    if any(faults.values()):
        reasons = "; ".join(f"{_some(names)} {fault}" for fault, names in faults.items() if names)
        raise RequestError(f"the weights are not taken, none of them: {reasons}", "params")
    return given


def _misfit(name: str, leaf: Any, wanted: jax.ShapeDtypeStruct) -> str | None:
    """What is wrong with a leaf by itself."""
    if not isinstance(leaf, jax.Array):
        return f"{name} (a {type(leaf).__name__}, and no jax.Array)"
    if leaf.is_deleted():
        return f"{name} (deleted or donated)"
    if not isinstance(leaf.sharding, NamedSharding | SingleDeviceSharding):
        return f"{name} (it lies on {leaf.sharding}: place it with a NamedSharding)"
    if leaf.shape != wanted.shape:
        return f"{name} ({list(leaf.shape)}, the model has {list(wanted.shape)})"
    if jnp.issubdtype(leaf.dtype, jnp.floating) != jnp.issubdtype(wanted.dtype, jnp.floating):
        return f"{name} ({leaf.dtype}, the model has {wanted.dtype})"
    return None


def _not_finite(given: Mapping[str, jax.Array], is_finite: Callable[[jax.Array], jax.Array]) -> list[str]:
    floats = {name: leaf for name, leaf in given.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    with jax.transfer_guard_device_to_host("allow"):  # a flag of each array is all that is read
        return [name for name, leaf in floats.items() if not np.asarray(is_finite(leaf))]


def _some(names: list[str]) -> str:
    others = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + others
