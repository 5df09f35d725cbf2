"""Where a weight's values come from: tensors of the checkpoint, parts of them, and how they are put together."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jaxpage.models.checkpoints.checkpoint import Checkpoint, Index

Box = tuple[range, ...]
"""A part of an array: consecutive positions along each axis."""


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint, or a part of one, as a part of a `Weight`."""

    name: str
    """Its Hugging Face name."""
    shape: tuple[int, ...]
    """As stored."""
    view: tuple[int, ...]
    """As it goes into the weight: each stored axis is one axis or several."""
    copies: int = 1
    """How often each slice along the view's first axis goes in, one copy behind the other."""
    index: Index = ()
    """The part of the stored tensor that goes in; by default all of it."""

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """The shape of what it fills."""
        return (self.view[0] * self.copies, *self.view[1:])

    def placed(self) -> Iterator[tuple["Source", tuple[int, ...]]]:
        """Itself, at the origin."""
        yield self, (0,) * len(self.view)

    def read(self, checkpoint: Checkpoint, box: Box) -> np.ndarray:
        """The values at `box` of what it fills, in their stored type."""
        rows, *others = box
        first, stop = rows.start // self.copies, -(-rows.stop // self.copies)
        index, shape, cut = self._stored((range(first, stop), *others))
        values = checkpoint.read(self.name, self.shape, index).reshape(shape)[cut]
        if self.copies == 1:
            return values
        start = rows.start - first * self.copies
        return np.repeat(values, self.copies, axis=0)[start : start + len(rows)]

    def _stored(self, box: Box) -> tuple[Index, tuple[int, ...], Index]:
        """Where the values at `box` of the view are stored.

        Returns the smallest index that holds them all, the shape of what is there as part of the view, and where in
        that they are.
        """
        parts = (*self.index, *[slice(None)] * (len(self.shape) - len(self.index)))
        taken = [range(size)[part] for size, part in zip(self.shape, parts, strict=True)]
        index, shape, cut = [], [], []
        for positions, axes in zip(taken, _split(self.view, [len(it) for it in taken]), strict=True):
            begin, length, run, consecutive = positions.start, len(positions), len(positions), True
            for axis in axes:
                size, wanted = self.view[axis], box[axis]
                run //= size
                if consecutive:
                    begin, length = begin + wanted.start * run, len(wanted) * run
                    shape.append(len(wanted))
                    cut.append(slice(None))
                    consecutive = len(wanted) == 1
                else:
                    shape.append(size)
                    cut.append(slice(wanted.start, wanted.stop))
            index.append(slice(begin, begin + length))
        return tuple(index), tuple(shape), tuple(cut)


@dataclass(frozen=True)
class Join:
    """Pieces side by side along one axis, which may be joined themselves: all of them have as many axes."""

    pieces: tuple["Source | Join", ...]
    axis: int = 0

    @property
    def filled_shape(self) -> tuple[int, ...]:
        """The shape of what it fills."""
        joined = list(self.pieces[0].filled_shape)
        joined[self.axis] = sum(piece.filled_shape[self.axis] for piece in self.pieces)
        return tuple(joined)

    def placed(self) -> Iterator[tuple[Source, tuple[int, ...]]]:
        """Every source in it, and where the box that it fills begins."""
        begin = 0
        for piece in self.pieces:
            for source, offset in piece.placed():
                yield source, (*offset[: self.axis], offset[self.axis] + begin, *offset[self.axis + 1 :])
            begin += piece.filled_shape[self.axis]


def _split(view: tuple[int, ...], sizes: list[int]) -> list[range]:
    """The axes of `view` that each axis of a tensor of `sizes` becomes."""
    groups, first = [], 0
    for size in sizes:
        last, product = first, 1
        while product < size:
            product *= view[last]
            last += 1
        assert product == size, f"a tensor of {sizes} has no view {view} that splits its axes"
        groups.append(range(first, last))
        first = last
    groups[-1] = range(groups[-1].start, len(view))  # with the axes of size 1 at the end
    return groups
