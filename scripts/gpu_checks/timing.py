"""Times of what takes microseconds, taken inside one program.

A call of a compiled program costs the host 30 to 90 us, which would hide a small kernel. So a kernel runs many times in
one program, where it is a node of a CUDA graph as in an engine's step, and such programs are sent off one after
another. Each run reads what the one before wrote, or inputs of its own: several sets of them, larger together than the
L2 cache, take turns.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

REPEATS = 5
_MOST_IN_A_ROW = 20
_LEAST_PROGRAM_SECONDS = 5e-4
"""So long a program hides its own dispatch."""
_L2_SHARE = 3
"""Input sets are so many times the L2 cache together."""


@dataclass(frozen=True)
class Timing:
    """Of one run of a kernel."""

    seconds: float
    """The median."""
    spread: float
    """From the fastest to the slowest repeat, as a share of the median."""


def num_inside(expected_seconds: float, most: int) -> int:
    """How often a kernel of about so many seconds runs within a program."""
    return max(1, min(most, math.ceil(_LEAST_PROGRAM_SECONDS / max(expected_seconds, 1e-9))))


def num_sets(set_bytes: int, l2_bytes: int, most: int) -> int:
    """How many sets of inputs of so many bytes take turns, so that none is in the cache when its turn comes."""
    return max(1, min(most, -(-_L2_SHARE * l2_bytes // max(set_bytes, 1)), 64))


def time_program(program: Callable[..., Any], args: Sequence[Any], runs_inside: int, seconds: float) -> Timing:
    """Time a compiled program that runs a kernel so many times; takes about `seconds`, after two runs to warm up."""
    for _ in range(2):
        jax.block_until_ready(program(*args))
    started = time.perf_counter()
    jax.block_until_ready(program(*args))
    once = time.perf_counter() - started
    in_a_row = max(1, min(_MOST_IN_A_ROW, int(seconds / REPEATS / max(once, 1e-9))))
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(in_a_row):
            result = program(*args)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / (in_a_row * runs_inside))
    median = statistics.median(times)
    return Timing(median, (max(times) - min(times)) / median)


def chained(step: Callable[[Any, Any], Any], runs_inside: int) -> Callable[..., Any]:
    """`(x, *sets) -> x` that runs `step(x, set)` so often, each with what the one before gave and the next set."""

    def program(x: Any, *sets: Any) -> Any:
        for run in range(runs_inside):
            x = step(x, sets[run % len(sets)])
        return x

    return program
