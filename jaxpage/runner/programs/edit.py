"""Block tables and rows of the next step, as far as they differ: (address, value) pairs, [2, n] int32.

A few travel with the step. If there are more, the others go ahead of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState

NUM_EDITS = 64
"""Edits that travel with a step."""
MANY_EDITS = 1024
"""Those that go ahead of it at a time."""
_UNUSED = np.iinfo(np.int32).max
"""An index out of every array's range: scatters with mode="drop" write nowhere."""


def pack_edits(edits: np.ndarray, capacity: int) -> np.ndarray:
    """Edits of the state (`StepTable`), [2, n] int32, padded to [2, capacity]."""
    packed = np.full((2, capacity), _UNUSED, np.int32)
    packed[:, : edits.shape[1]] = edits
    return packed


def no_edits(capacity: int) -> np.ndarray:
    """Edits of nothing, [2, capacity] int32."""
    return np.full((2, capacity), _UNUSED, np.int32)


class Edit(Program[None]):
    """(state, edits) -> state."""

    name = "edit"
    unsettles = True

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["state"]

    changes = takes

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return no_edits(MANY_EDITS)

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        def edit(state: BatchState, edits: jax.Array) -> tuple[tuple[BatchState], None]:
            return (edited(state, edits),), None

        return edit


def edited(state: BatchState, edits: jax.Array) -> BatchState:
    """The state with its edits made. edits: [2, n] int32; unused ones are out of range."""
    address, value = edits
    tables, scheduled = state.block_tables.reshape(-1), state.scheduled.reshape(-1)
    tables = tables.at[address].set(value, mode="drop")
    # A negative index would count from the end.
    step_row = jnp.where(address < tables.size, scheduled.size, address - tables.size)
    scheduled = scheduled.at[step_row].set(value, mode="drop")
    return dataclasses.replace(
        state, block_tables=tables.reshape(state.block_tables.shape), scheduled=scheduled.reshape(state.scheduled.shape)
    )


EDIT = Edit()
