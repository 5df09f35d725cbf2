"""What compiled programs take of a GPU's memory, against the bound that the KV cache's size comes from."""

from typing import Any

import pytest
from test_gpu_code import COMPILER, run


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Of each engine of `program_memory.py`: bounds, and the scratch and results of its programs, in bytes."""
    if not COMPILER.exists():
        pytest.skip(f"no GPU compiler in {COMPILER}: scripts/setup.sh installs it")
    return run("program_memory.py")


def test_no_program_takes_more_scratch_than_was_left_for_it(found: dict[str, dict[str, Any]]) -> None:
    assert len(found) >= 5
    for engine, it in found.items():
        for name, program in it["programs"].items():
            assert program["scratch"] <= it["bounds"]["scratch"], (engine, name)


def test_scratch_and_the_results_of_three_steps_fit_beside_the_cache(found: dict[str, dict[str, Any]]) -> None:
    for engine, it in found.items():
        scratch, result = (max(program[part] for program in it["programs"].values()) for part in ("scratch", "result"))
        assert scratch + 3 * result <= it["bounds"]["programs"], engine


def test_the_bound_wastes_little(found: dict[str, dict[str, Any]]) -> None:
    """A GiB more than programs take is 1 % of the KV cache that an H200 has beside an 8B model."""
    for engine, it in found.items():
        scratch = max(program["scratch"] for program in it["programs"].values())
        assert it["bounds"]["scratch"] <= scratch + 2**30, engine
