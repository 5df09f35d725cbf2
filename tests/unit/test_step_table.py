"""The rows of a step: what the edits make of the device's arrays is the step that was scheduled."""

import random

import numpy as np
import pytest

from jaxpage.runner.step_table import StepTable
from jaxpage.scheduler.step_plan import SchedulerOutput

NUM_ROWS, NUM_GROUPS, WIDTH = 12, 2, 5
NUM_TABLE_ENTRIES = NUM_GROUPS * NUM_ROWS * WIDTH


class Device:
    """The arrays that the edits are for."""

    def __init__(self) -> None:
        self.memory = np.zeros(NUM_TABLE_ENTRIES + 2 * NUM_ROWS, np.int32)

    def edit(self, edits: np.ndarray) -> None:
        addresses, values = edits
        assert len(set(addresses.tolist())) == len(addresses), "a scatter has no order"
        assert ((addresses >= 0) & (addresses < self.memory.size)).all()
        self.memory[addresses] = values

    @property
    def scheduled(self) -> list[tuple[int, int]]:
        """(row, query length) of each."""
        rows, query_lens = self.memory[NUM_TABLE_ENTRIES:].reshape(2, NUM_ROWS).tolist()
        return list(zip(rows, query_lens, strict=True))

    @property
    def block_tables(self) -> np.ndarray:
        return self.memory[:NUM_TABLE_ENTRIES].reshape(NUM_GROUPS, NUM_ROWS, WIDTH)


def step(
    rows: list[int], query_lens: list[int], blocks: list[tuple[int, int, int, int]] | None = None
) -> SchedulerOutput:
    return SchedulerOutput([], [], [], [], rows, query_lens, blocks or [])


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_steps_stands_on_the_device_without_holes(seed: int) -> None:
    rng = random.Random(seed)
    table, device = StepTable(NUM_ROWS, NUM_GROUPS, WIDTH), Device()
    expected_tables = np.zeros((NUM_GROUPS, NUM_ROWS, WIDTH), np.int32)
    for _ in range(200):
        rows = rng.sample(range(NUM_ROWS), rng.randint(1, NUM_ROWS))
        query_lens = [rng.choice((1, 1, 1, 7, 300)) for _ in rows]
        spots = {
            (row, rng.randrange(NUM_GROUPS), rng.randrange(WIDTH)) for row in rng.choices(rows, k=rng.randint(0, 6))
        }
        blocks = [(*spot, rng.randint(1, 999)) for spot in spots]
        edits, step_rows = table.advance(step(rows, query_lens, blocks))
        device.edit(edits)
        assert [device.scheduled[step_row] for step_row in step_rows] == list(zip(rows, query_lens, strict=True))
        assert sorted(step_rows.tolist()) == list(range(len(rows)))
        assert all(query_len == 0 for _, query_len in device.scheduled[len(rows) :])
        for row, group, index, block_id in blocks:
            expected_tables[group, row, index] = block_id
        assert (device.block_tables == expected_tables).all()


def test_a_step_like_the_last_one_needs_no_edit() -> None:
    table = StepTable(NUM_ROWS, NUM_GROUPS, WIDTH)
    assert table.advance(step([4, 2, 9], [1, 5, 1])).edits.shape[1] > 0
    assert table.advance(step([4, 2, 9], [1, 5, 1])).edits.shape[1] == 0
    assert table.advance(step([9, 4, 2], [1, 1, 5])).edits.shape[1] == 0, "the order of the requests does not matter"


def test_a_row_that_goes_costs_as_much_as_moves_into_its_place() -> None:
    table, device = StepTable(NUM_ROWS, NUM_GROUPS, WIDTH), Device()
    device.edit(table.advance(step(list(range(10)), [1] * 10)).edits)
    edits, step_rows = table.advance(step([0, 1, 2, *range(4, 10)], [1] * 9))
    device.edit(edits)
    assert edits.shape[1] == 2, "row 9 moves to the step row of row 3, and its own becomes padding"
    assert [device.scheduled[step_row][0] for step_row in step_rows] == [0, 1, 2, *range(4, 10)]
    assert table.advance(step([0, 1, 2, *range(4, 10), 3], [1] * 10)).edits.shape[1] == 2
