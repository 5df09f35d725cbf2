"""The model as the engine sees it: a value, made from a checkpoint or by a user's own function."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpage.models.sources import digest_of
from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import HEADS_AXIS, KVCache, StepContext
from jaxpage.ops.state_spec import StateSpec


class Hidden(NamedTuple):
    """What `ServedModel.forward` gives for each token of a step."""

    last: jax.Array  # [tokens, embed], as `logits` takes it
    extras: dict[str, jax.Array]  # [tokens, ...] each
    """Other hidden states by name, for a proposer or a probe that asks for them. The others are never computed."""


Embed = Callable[[Params, jax.Array], jax.Array]
"""(params, tokens [tokens] int32) -> x [tokens, embed]"""
Forward = Callable[[Params, jax.Array, KVCache, StepContext], tuple[Hidden, KVCache]]
"""(params, x [tokens, embed], states, step) -> (hidden, states)"""
Logits = Callable[[Params, jax.Array], jax.Array]
"""(params, hidden [rows, embed]) -> [rows, vocab] float32"""


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel:
    """A decoder on its devices: pure functions over a pytree of arrays, and what the engine must know of them.

    The functions carry no `jit` and know no device. `layers.run_layers` runs layers that keep states; `attend` and the
    other ops take a layer's state and give it back. Raises `ValueError` for a `heads_axis` that the mesh does not have,
    and where the functions depend on values that a `key` must tell.
    """

    name: str
    """What it is called in logs and errors."""
    vocab_size: int
    embed_size: int
    max_model_len: int
    """The longest sequence that it is made for, in tokens."""
    states: tuple[tuple[StateSpec, ...], ...]
    """What each layer keeps of a sequence."""
    params: Params | Callable[[], Params]
    """Arrays on the mesh, or a function that puts them there: called once, while programs compile."""
    mesh: Mesh
    embed: Embed
    forward: Forward
    logits: Logits
    param_shapes: Params = None
    """`ShapeDtypeStruct`s with shardings: compiling needs no weights. Only where `params` is a function."""
    dtype: Any = None
    """Of hidden states and KV cache; the weights' where it is not given."""
    heads_axis: str | None = HEADS_AXIS
    """The mesh axis that divides KV heads and vocabulary; None leaves both whole on each device."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a text."""
    key: str = ""
    """All that a compiled program depends on beside shapes and our own code. Where it is not given, a digest of the
    functions' sources, of what these import, and of the values that are bound to them."""
    config: Any = field(default=None, repr=False)
    """What made it, for whoever looks: the engine does not."""

    def __post_init__(self) -> None:
        if self.heads_axis is not None and self.heads_axis not in self.mesh.axis_names:
            raise ValueError(
                f"heads_axis of model {self.name!r} is {self.heads_axis!r}, and its mesh has the axes "
                f"{', '.join(self.mesh.axis_names)}: name one of them, or None to leave heads undivided"
            )
        if self.param_shapes is None:
            if callable(self.params):
                raise ValueError(f"params of model {self.name!r} is a function: give their param_shapes, too")
            object.__setattr__(self, "param_shapes", jax.tree.map(_shape_of, self.params))
        dtype = self.dtype if self.dtype is not None else _dtype_of(self.param_shapes)
        object.__setattr__(self, "dtype", np.dtype(dtype))
        if not self.key:
            object.__setattr__(self, "key", digest_of(self.embed, self.forward, self.logits))

    def load_params(self) -> Params:
        """The weights on their devices."""
        return self.params() if callable(self.params) else self.params

    @property
    def num_devices(self) -> int:
        return self.mesh.size

    @property
    def num_shards(self) -> int:
        """Parts that heads and vocabulary are divided into."""
        return 1 if self.heads_axis is None else self.mesh.shape[self.heads_axis]


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    if not isinstance(array.sharding, NamedSharding):
        raise ValueError(f"a weight lies on {array.sharding}: place every weight with a NamedSharding of the mesh")
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _dtype_of(shapes: Params) -> np.dtype[Any]:
    """The floating-point type of most numbers."""
    sizes: dict[np.dtype[Any], int] = {}
    for leaf in jax.tree.leaves(shapes):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + int(np.prod(leaf.shape))
    return max(sizes, key=lambda dtype: sizes[dtype])
