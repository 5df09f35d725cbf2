"""Running a model's layers over a step: each is given the states that it keeps, and gives them back."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from jaxpage.models.served_model import Hidden
from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import KVCache, LayerMetadata, PagedState, StepContext
from jaxpage.ops.recurrent import RecurrentState
from jaxpage.ops.state_spec import PagedPlace

traced_once = jax.jit  # makes no program here
LayerState = PagedState | RecurrentState
Layer = Callable[[Params, jax.Array, tuple[LayerState, ...]], tuple[jax.Array, tuple[LayerState, ...]]]
"""(weights, x, states) -> (x, states); x: [tokens, embed]; states: in the order of the layer's specs."""


def run_layers(
    run: Layer, weights: Sequence[Params], x: jax.Array, states: KVCache, step: StepContext
) -> tuple[list[jax.Array], KVCache]:
    """Run all layers in order. x: [tokens, embed]; returns it behind each of them, and the updated states.

    Inside a program, layers of the same shapes are traced and lowered once (measured with 30 layers: 0.5 s of Python
    instead of 2.3 s), and XLA inlines them.
    """

    def layer(
        weights: Params, x: jax.Array, arrays: list[jax.Array], metadata: list[LayerMetadata | RecurrentState]
    ) -> tuple[jax.Array, list[jax.Array]]:
        given = tuple(_state_of(array, of_step) for array, of_step in zip(arrays, metadata, strict=True))
        x, kept = run(weights, x, given)
        return x, [state.buffer if isinstance(state, PagedState) else state.values for state in kept]

    layer = traced_once(layer)
    layout, outputs = states.layout, []
    buffers, recurrent = list(states.buffers), list(states.recurrent)
    by_group = [step.of_group(index, layout) for index in range(len(layout.groups))]
    for layer_weights, places in zip(weights, layout.layers, strict=True):
        where = [
            (buffers, place.buffer) if isinstance(place, PagedPlace) else (recurrent, place.array) for place in places
        ]
        metadata = [by_group[place.group] if isinstance(place, PagedPlace) else step.of_recurrent for place in places]
        x, kept = layer(layer_weights, x, [arrays[index] for arrays, index in where], metadata)
        for (arrays, index), array in zip(where, kept, strict=True):
            arrays[index] = array
        outputs.append(x)
    return outputs, dataclasses.replace(states, buffers=buffers, recurrent=recurrent)


def _state_of(array: jax.Array, metadata: LayerMetadata | RecurrentState) -> LayerState:
    if isinstance(metadata, RecurrentState):
        return dataclasses.replace(metadata, values=array)
    return PagedState(array, metadata)


def hidden_of(last: jax.Array, outputs: Sequence[jax.Array]) -> Hidden:
    """What `forward` gives: `last`, as the output head takes it, and what stands behind each layer as `layer_0`, ..."""
    return Hidden(last, {f"layer_{index}": output for index, output in enumerate(outputs)})
