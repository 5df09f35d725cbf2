"""The host's copy of the rows of a step: which row stands where, and how many tokens it computes. No JAX.

The device keeps the rows of a step from one step to the next (`BatchState.scheduled`), as it keeps the block tables.
Only what differs travels, as edits: (address, value) pairs. In steady decode these are the blocks that rows begin.
"""

from typing import NamedTuple

import numpy as np

from jaxpage.scheduler.step_plan import SchedulerOutput

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
_NOTHING: Ints = np.zeros(0, np.int32)


class StepEdits(NamedTuple):
    """A step as the device's state must be changed for it."""

    edits: Ints  # [2, n]: address, value. First the flat block tables [groups, rows, width], then `scheduled` [2, rows]
    step_rows: Ints  # [requests]: the step row of each scheduled request


class StepTable:
    """Gives rows their step rows, and keeps them there as long as they are scheduled: the first ones, without holes."""

    def __init__(self, num_rows: int, num_groups: int, table_width: int) -> None:
        self._table_width = table_width
        self._scheduled_address = num_groups * num_rows * table_width
        self._rows = np.zeros(num_rows, np.int32)
        self._query_lens = np.zeros(num_rows, np.int32)
        self._num_step_rows = 0
        self._last: tuple[list[int], list[int], Ints] = [], [], np.zeros(0, np.int32)
        """The last step's rows, their query lengths and their step rows."""

    def advance(self, output: SchedulerOutput) -> StepEdits:
        """Bring the rows up to the next step."""
        last_rows, last_lens, last_step_rows = self._last
        if output.rows == last_rows and output.query_lens == last_lens:
            return StepEdits(np.stack(self._block_edits(output)), last_step_rows)
        num_rows, count = len(self._rows), len(output.rows)
        scheduled = np.array(output.rows, np.int32)
        len_of_row = np.zeros(num_rows, np.int32)
        len_of_row[scheduled] = output.query_lens

        stays = len_of_row[self._rows[: self._num_step_rows]] > 0
        stays[count:] = False  # the last ones fill the holes
        placed = np.zeros(num_rows, bool)
        placed[self._rows[: self._num_step_rows][stays]] = True
        free = np.concatenate([np.flatnonzero(~stays[:count]), np.arange(self._num_step_rows, count)])
        rows = self._rows.copy()
        rows[free] = scheduled[~placed[scheduled]]
        query_lens = np.zeros(num_rows, np.int32)
        query_lens[:count] = len_of_row[rows[:count]]

        changed_rows = np.flatnonzero(rows != self._rows)
        changed_lens = np.flatnonzero(query_lens != self._query_lens)
        table_addresses, blocks = self._block_edits(output)
        addresses = (
            table_addresses,
            self._scheduled_address + changed_rows,
            self._scheduled_address + num_rows + changed_lens,
        )
        values = (blocks, rows[changed_rows], query_lens[changed_lens])
        edits = np.stack([np.concatenate(addresses), np.concatenate(values)]).astype(np.int32)
        self._rows, self._query_lens, self._num_step_rows = rows, query_lens, count
        step_row_of = len_of_row  # its old content is used up
        step_row_of[rows[:count]] = np.arange(count)
        step_rows = step_row_of[scheduled]
        self._last = output.rows, output.query_lens, step_rows
        return StepEdits(edits, step_rows)

    def _block_edits(self, output: SchedulerOutput) -> tuple[Ints, Ints]:
        """Where the block tables change, and to which blocks. Each [n]."""
        if not output.new_blocks:
            return _NOTHING, _NOTHING
        row, group, index, block_id = np.array(output.new_blocks, np.int32).reshape(-1, 4).T
        return (group * len(self._rows) + row) * self._table_width + index, block_id

    def first_tokens(self, step_rows: Ints) -> Ints:
        """Where the tokens of these step rows begin among those of the last step."""
        return (np.cumsum(self._query_lens) - self._query_lens)[step_rows]
