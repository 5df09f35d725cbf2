"""A weight in int8 with a scale per output channel, which stands in a model's params where an array would.

`ops.matmul` multiplies with it and looks rows up in it.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

INT8_MAX = 127
"""The largest magnitude in use; -128 is not, so that the range is symmetric."""


@partial(jax.tree_util.register_dataclass, data_fields=("values", "scale"), meta_fields=("dtype",))
@dataclass(frozen=True)
class QuantizedWeight:
    """`values * scale[..., None]`, where an output channel is all that lies along the last axis."""

    values: jax.Array  # [..., in] int8
    scale: jax.Array  # [...] float32
    dtype: np.dtype[np.generic]
    """The type of the weight that was quantized, in which rows are looked up."""


def channel_scale(largest: np.ndarray) -> np.ndarray:
    """The scale of each output channel whose largest magnitude is `largest`, [...] float32; 1 where that is 0."""
    return np.where(largest > 0, largest / np.float32(INT8_MAX), np.float32(1))


def to_int8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """weight: [..., in]; scale: [...] float32. Returns the nearest int8 values, [..., in]."""
    return np.rint(weight.astype(np.float32) / scale[..., None]).astype(np.int8)
