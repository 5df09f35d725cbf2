"""Recurrent states of rows, kept in blocks of the KV cache and loaded from there, for prefix hits and forks.

Both take [NUM_STATES, 2 + blocks of a checkpoint] int32: row, position and block ids.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpage.ops.attention.paged import KVCache
from jaxpage.ops.checkpoint import load_states, save_states
from jaxpage.ops.state_spec import CheckpointLayout
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.scheduler.step_plan import StateLoad, StateSave

NUM_STATES = 4
"""Rows that a program saves or loads at a time."""
_NOWHERE = np.iinfo(np.int32).max
"""An index out of every array's range: scatters with mode="drop" write nowhere."""


def pack_states(states: Sequence[StateSave | StateLoad], layout: CheckpointLayout) -> Iterator[np.ndarray]:
    """The packed inputs of as many runs as it takes."""
    for start in range(0, len(states), NUM_STATES):
        packed = np.full((NUM_STATES, 2 + layout.num_blocks), _NOWHERE, np.int32)
        for index, state in enumerate(states[start : start + NUM_STATES]):
            packed[index] = state.row, state.position, *state.block_ids
        yield packed


Arrays = list[jax.Array]
Work = Callable[[Arrays, Arrays, jax.Array, jax.Array, jax.Array], tuple[Arrays, Arrays]]
"""(paged buffers, recurrent states, rows, positions, block ids) -> both, of one device"""


class Checkpoint(Program[None]):
    """(kv_cache, rows) -> kv_cache."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self._work = work

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [] if plan.layout.checkpoint is None else [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["kv_cache"]

    changes = takes

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        assert plan.layout.checkpoint is not None
        return np.full((NUM_STATES, 2 + plan.layout.checkpoint.num_blocks), _NOWHERE, np.int32)

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        def on_device(buffers: Arrays, recurrent: Arrays, packed: jax.Array) -> tuple[Arrays, Arrays]:
            return self._work(buffers, recurrent, packed[:, 0], packed[:, 1], packed[:, 2:])

        if plan.target.mesh is not None:  # each device keeps the bytes of its own part
            specs = plan.state_specs
            on_device = jax.shard_map(
                on_device,
                mesh=plan.target.mesh,
                in_specs=(*specs, PartitionSpec()),
                out_specs=tuple(specs),
                check_vma=False,
            )

        def run(kv_cache: KVCache, packed: jax.Array) -> tuple[tuple[KVCache], None]:
            buffers, recurrent = on_device(kv_cache.buffers, kv_cache.recurrent, packed)
            return (dataclasses.replace(kv_cache, buffers=buffers, recurrent=recurrent),), None

        return run


def _save(
    buffers: Arrays, recurrent: Arrays, rows: jax.Array, positions: jax.Array, blocks: jax.Array
) -> tuple[Arrays, Arrays]:
    return save_states(buffers, recurrent, rows, positions, blocks), recurrent


def _load(
    buffers: Arrays, recurrent: Arrays, rows: jax.Array, positions: jax.Array, blocks: jax.Array
) -> tuple[Arrays, Arrays]:
    return buffers, load_states(buffers, recurrent, rows, positions, blocks)


SAVE, LOAD = Checkpoint("save", _save), Checkpoint("load", _load)
