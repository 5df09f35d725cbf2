"""Rows and KV blocks that go on as copies of others, before a step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.attention.kv_write import copy_blocks
from jaxpage.ops.attention.paged import KVCache
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState
from jaxpage.scheduler.step_plan import SchedulerOutput

_UNUSED = np.iinfo(np.int32).max
"""An index out of every array's range: scatters with mode="drop" write nowhere."""


class ForkPlan(NamedTuple):
    """What goes on as a copy of something else, before a step."""

    row_forks: jax.Array  # [3, rows] int32: source row, target row, last token; maximal in padding
    num_copies: jax.Array  # int32
    copies: jax.Array  # [2, capacity] int32: source block, target block


def pack_forks(output: SchedulerOutput, num_rows: int, num_groups: int) -> np.ndarray:
    """Pack a step's row forks and block copies: each row is forked to at most once, and copies a block per group."""
    capacity = num_rows * num_groups
    packed = np.full(3 * num_rows + 1 + 2 * capacity, _UNUSED, np.int32)
    forks = packed[: 3 * num_rows].reshape(3, num_rows)
    for index, fork in enumerate(output.row_forks):
        forks[:, index] = fork.source, fork.target, fork.token_id
    packed[3 * num_rows] = len(output.block_copies)
    if output.block_copies:
        copies = packed[3 * num_rows + 1 :].reshape(2, capacity)
        copies[:, : len(output.block_copies)] = np.asarray(output.block_copies, np.int32).T
    return packed


def unpack_forks(packed: jax.Array, num_rows: int) -> ForkPlan:
    """The inverse of `pack_forks`, in a compiled program."""
    start = 3 * num_rows
    return ForkPlan(packed[:start].reshape(3, num_rows), packed[start], packed[start + 1 :].reshape(2, -1))


class Fork(Program[None]):
    """(kv_cache, state, forks) -> kv_cache, state."""

    name = "fork"
    unsettles = True

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["kv_cache", "state"]

    changes = takes

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return pack_forks(
            SchedulerOutput([], [], [], [], [], [], []), plan.config.max_num_seqs, len(plan.layout.groups)
        )

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        branch_free = plan.target.branch_free

        def fork(kv_cache: KVCache, state: BatchState, packed: jax.Array) -> tuple[tuple[KVCache, BatchState], None]:
            forks = unpack_forks(packed, state.num_rows)
            buffers = copy_blocks(
                kv_cache.buffers, forks.copies[0], forks.copies[1], forks.num_copies, branch_free=branch_free
            )
            recurrent = [_copy_rows(array, forks.row_forks) for array in kv_cache.recurrent]
            kv_cache = dataclasses.replace(kv_cache, buffers=buffers, recurrent=recurrent)
            return (kv_cache, _fork_rows(state, forks)), None

        return fork


def _fork_rows(state: BatchState, forks: ForkPlan) -> BatchState:
    _, copy, token_id = forks.row_forks

    def copy_rows(array: jax.Array) -> jax.Array:
        return _copy_rows(array, forks.row_forks)

    copied = {
        field.name: jax.tree.map(copy_rows, getattr(state, field.name))
        for field in dataclasses.fields(state)
        if field.name not in ("block_tables", "scheduled")
    }
    copied["block_tables"] = jax.vmap(copy_rows)(state.block_tables)
    last = copied["num_tokens"].at[copy].get(mode="clip") - 1
    copied["token_ids"] = copied["token_ids"].at[copy, last].set(token_id, mode="drop")
    return dataclasses.replace(state, **copied)


def _copy_rows(array: jax.Array, row_forks: jax.Array) -> jax.Array:
    """[rows, ...], all of whose forks read it as it was."""
    source, copy, _ = row_forks
    return array.at[copy].set(array[jnp.minimum(source, array.shape[0] - 1)], mode="drop")


FORK = Fork()
