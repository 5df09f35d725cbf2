"""The fork and edit programs on a small device state: what they are told changes, and padding changes nothing."""

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxpage.kv_cache.manager import BlockCopy
from jaxpage.ops.attention.paged import KVCache, Target
from jaxpage.ops.state_spec import KVGroup, KVLayout, KVSpec, PagedPlace
from jaxpage.runner.programs.edit import edited, pack_edits
from jaxpage.runner.programs.fork import FORK, pack_forks
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state
from jaxpage.scheduler.step_plan import RowFork, SchedulerOutput
from jaxpage.speculative.drafts import DraftState

NUM_ROWS, MAX_MODEL_LEN, NUM_BLOCKS = 5, 20, 9
FULL, WINDOW = KVGroup(KVSpec(2, 4), 4), KVGroup(KVSpec(1, 4, window=6), 8)
LAYOUT = KVLayout((FULL, WINDOW), tuple((PagedPlace(*place),) for place in ((0, 0), (1, 0), (0, 1))), 4)
Arrays = dict[str, np.ndarray]


def arrays_of(kv_cache: KVCache, state: BatchState) -> Arrays:
    """Everything on the device, by name."""
    buffers = {f"buffer {i}": np.array(buffer) for i, buffer in enumerate(kv_cache.buffers)}
    fields = [*dataclasses.fields(state), *dataclasses.fields(DraftState)]
    of_rows = {field.name: getattr(state, field.name, getattr(state.drafts, field.name, None)) for field in fields}
    return buffers | {name: np.array(array) for name, array in of_rows.items() if name != "drafts"}


def random_device_state() -> tuple[KVCache, BatchState]:
    """Different numbers everywhere, and rows of 3, 5, 7, ... known tokens."""
    rng = np.random.default_rng(0)
    everywhere = NamedSharding(jax.make_mesh((1,), ("tp",)), PartitionSpec())

    def fill(array: jax.Array) -> jax.Array:
        return jnp.asarray(rng.permutation(array.size).reshape(array.shape), array.dtype)

    state = jax.tree.map(
        fill,
        empty_state(
            *(NUM_ROWS, MAX_MODEL_LEN, 2, FULL.block_size, 4),
            rules_size=70,
            drafts=True,
        ),
    )
    state = dataclasses.replace(state, num_tokens=jnp.arange(3, 3 + 2 * NUM_ROWS, 2, dtype=jnp.int32))
    kv_cache = jax.tree.map(fill, empty_kv_cache(LAYOUT, NUM_BLOCKS, np.dtype(np.float32)))
    return jax.device_put((kv_cache, state), everywhere)


def packed(row_forks: Sequence[RowFork], copies: Sequence[BlockCopy]) -> np.ndarray:
    return pack_forks(SchedulerOutput(list(row_forks), list(copies), [], [], [], [], []), NUM_ROWS, 2)


Program = Callable[[KVCache, BatchState, np.ndarray], tuple[tuple[KVCache, BatchState], None]]


@pytest.fixture(scope="module")
def program() -> Program:
    plan: Any = SimpleNamespace(target=Target())
    return jax.jit(FORK.function(plan, None))


def fork(
    program: Program, row_forks: Sequence[RowFork] = (), copies: Sequence[BlockCopy] = ()
) -> tuple[Arrays, Arrays]:
    """Everything before and after."""
    kv_cache, state = random_device_state()
    before = arrays_of(kv_cache, state)
    changed, _ = program(kv_cache, state, packed(row_forks, copies))
    return before, arrays_of(*changed)


def by_row(name: str, array: np.ndarray) -> np.ndarray:
    return array.swapaxes(0, 1) if name in ("block_tables", "scheduled") else array


@pytest.mark.parametrize(
    "sources",
    [
        {0: 1, 1: 0},
        {0: 1, 1: 2, 2: 0},
        {0: 4, 1: 4, 2: 4, 3: 4, 4: 4},
        {0: 1, 1: 2, 2: 3, 3: 4, 4: 4},
        {4: 0},
        {2: 2},
    ],
    ids=["swap", "cycle", "one_to_all", "shift", "last_row", "itself"],
)
def test_rows_are_forked_all_at_once_and_only_their_last_token_is_replaced(
    program: Program, sources: dict[int, int]
) -> None:
    forks = [RowFork(source, target, 1000 + target) for target, source in sources.items()]
    before, after = fork(program, forks)
    for name, old in before.items():
        expected = old.copy()
        if not name.startswith("buffer") and name not in ("scheduled",):
            for target, source in sources.items():
                by_row(name, expected)[target] = by_row(name, old)[source]
                if name == "token_ids":
                    expected[target, before["num_tokens"][source] - 1] = 1000 + target
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


def test_blocks_are_copied_in_every_buffer(program: Program) -> None:
    """The second copy writes what the first one read: a block may be given back and taken again before the step."""
    before, after = fork(program, copies=[(3, 4), (5, 3), (1, 2)])
    for name, old in before.items():
        expected = old.copy()
        if name.startswith("buffer"):
            expected[4], expected[3], expected[2] = old[3], old[5], old[1]
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


def test_nothing_to_fork_changes_nothing(program: Program) -> None:
    before, after = fork(program)
    for name, old in before.items():
        np.testing.assert_array_equal(after[name], old, err_msg=name)


def test_as_many_forks_and_copies_as_fit_are_made(program: Program) -> None:
    """Each row forked, and a copy for each row and group."""
    forks = [RowFork((row + 1) % NUM_ROWS, row, row) for row in range(NUM_ROWS)]
    copies = [(1, target) for _ in range(NUM_ROWS) for target in (7, 8)]
    before, after = fork(program, forks, copies)
    np.testing.assert_array_equal(after["block_tables"], np.roll(before["block_tables"], -1, axis=1))
    np.testing.assert_array_equal(after["seed"], np.roll(before["seed"], -1, axis=0))
    for target in (7, 8):
        np.testing.assert_array_equal(after["buffer 0"][target], before["buffer 0"][1])


def test_edits_change_block_tables_and_scheduled_rows_at_their_addresses_only() -> None:
    _, state = random_device_state()
    tables, scheduled = np.array(state.block_tables), np.array(state.scheduled)
    others = arrays_of(*random_device_state())
    addresses = [0, tables.size - 1, tables.size, tables.size + scheduled.size - 1]
    edits = pack_edits(np.array([addresses, [101, 102, 103, 104]], np.int32), 9)
    after = arrays_of(random_device_state()[0], jax.jit(edited)(state, edits))
    tables.reshape(-1)[[0, -1]] = 101, 102
    scheduled.reshape(-1)[[0, -1]] = 103, 104
    for name, array in after.items():
        np.testing.assert_array_equal(array, {"block_tables": tables, "scheduled": scheduled}.get(name, others[name]))
