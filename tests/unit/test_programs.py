"""Compiled programs on disk: what becomes of those that cannot be kept."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.programs.program import Piece, Program, Stage


class Double(Program[None]):
    """A program without pieces."""

    name = "double"

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.FIRST, 0

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return []

    changes = takes

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return np.zeros(2, np.int32)

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        return lambda packed: ((), 2 * packed)


def store_with_a_program(folder: Path, *, must_keep: bool = False) -> ProgramCache:
    plan: Any = SimpleNamespace(mesh=Mesh(np.array(jax.devices()[:1]), ("tp",)), shapes={}, program_config=None)
    store = ProgramCache(folder, plan.mesh, must_keep=must_keep)
    store.get(Double(), plan, None)
    return store


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder that nobody can make: it would lie in a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "programs"


def test_a_folder_that_cannot_be_written_to_is_told_of_and_stops_nothing(
    unwritable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store_with_a_program(unwritable).save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(unwritable.parent) in caplog.text


def test_an_artifact_must_be_written(unwritable: Path) -> None:
    with pytest.raises(NotADirectoryError):
        store_with_a_program(unwritable, must_keep=True).save()


def test_what_cannot_be_written_whole_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    store_with_a_program(tmp_path).save()
    assert list(tmp_path.iterdir()) == []


def test_what_was_kept_is_loaded_by_the_next(tmp_path: Path) -> None:
    store_with_a_program(tmp_path).save()
    (kept,) = tmp_path.iterdir()
    assert kept.suffix == ".program"
    assert store_with_a_program(tmp_path).stats.num_loaded == 1
