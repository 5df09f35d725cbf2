"""What is compiled behind the start, and when: it yields to serving, unless somebody waits for it."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpage.runner import compiler
from jaxpage.runner.compiler import ProgramCompiler
from jaxpage.runner.programs.pool import POOL
from jaxpage.runner.programs.program import Stage
from jaxpage.runner.programs.registry import PROGRAMS
from jaxpage.runner.programs.score import SCORE

GUARD_SECONDS = 60
FIRST, LATER = [(SCORE, 0)], [(SCORE, 1), (POOL, 2), (SCORE, 3), (POOL, 4)]


class Cache:
    """Compiles at once, and notes what; what is in `broken` cannot be compiled."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.broken: set[Any] = set()
        self.stats = SimpleNamespace(num_programs=0, num_loaded=0, seconds=0.0)
        self.changed = threading.Condition()

    def has(self, *_: Any) -> bool:
        return False

    def save(self) -> None:
        pass

    def get(self, program: Any, plan: Any, variant: Any, when_traced: Any) -> Any:
        when_traced()
        with self.changed:
            self.made.append(variant)
            self.changed.notify_all()
        if variant in self.broken:
            raise ValueError("no such instruction")
        self.stats.num_programs += 1
        return program.name, variant

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.made) >= count, GUARD_SECONDS)


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def programs(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProgramCompiler]:
    jobs = {Stage.FIRST: FIRST, Stage.SOON: LATER[:2], Stage.REST: LATER[2:], Stage.WHEN_RUN: []}
    monkeypatch.setattr(compiler, "_jobs_of", lambda plan: jobs)
    monkeypatch.setattr(compiler, "_PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(compiler, "_MOST_PATIENCE_SECONDS", 3600.0)
    monkeypatch.setattr(compiler, "_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(compiler.os, "cpu_count", lambda: 1)
    found: Any = ProgramCompiler(cache, None, lambda *_: None)  # type: ignore[arg-type]
    found._num_threads = 1
    yield found
    found.close()


def test_nothing_is_begun_while_steps_run_in_what_is_best_for_them(programs: ProgramCompiler, cache: Cache) -> None:
    programs.wait(background=True)
    assert cache.made == [0]
    programs.hold(True)
    assert [it.done() for it in programs.want([])] == []
    assert cache.made == [0]
    assert not programs.is_complete
    programs.hold(False)  # a step would have been cheaper in another program
    cache.wait_for(5)
    assert cache.made == [0, 1, 2, 3, 4]


def test_what_somebody_waits_for_is_made_at_once_and_alone(programs: ProgramCompiler, cache: Cache) -> None:
    programs.wait(background=True)
    (awaited,) = programs.want([(POOL, 4), (SCORE, 0)])
    assert awaited.result(GUARD_SECONDS) == ("pool", 4)
    assert programs.get("score", 3) == ("score", 3)
    assert cache.made == [0, 4, 3]
    assert programs.want([(POOL, 4)]) == []


def test_without_a_quiet_moment_one_is_made_now_and_then(
    programs: ProgramCompiler, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_MOST_PATIENCE_SECONDS", 0.01)
    programs.wait(background=True)
    for count in range(2, 6):
        programs.hold(True)
        cache.wait_for(count)
    assert cache.made == [0, 1, 2, 3, 4]


def test_a_program_that_cannot_be_compiled_is_told_and_the_others_follow(
    programs: ProgramCompiler, cache: Cache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.broken = {2}
    programs.wait(background=True)
    awaited = programs.want(LATER)
    programs.hold(False)
    cache.wait_for(5)
    with pytest.raises(ValueError, match="no such instruction"):
        awaited[1].result(GUARD_SECONDS)
    assert awaited[3].result(GUARD_SECONDS) == ("pool", 4)
    assert "cannot be compiled: what needs it fails" in caplog.text
    assert programs.num_wanted == cache.stats.num_programs == 4


def test_what_keeps_a_program_from_being_compiled_is_raised_where_all_are_waited_for(
    programs: ProgramCompiler, cache: Cache
) -> None:
    cache.broken = {3}
    with pytest.raises(ValueError, match="no such instruction"):
        programs.wait(background=False)


def test_the_names_of_the_programs_here_are_those_that_there_are() -> None:
    assert {program.name for program, _ in FIRST + LATER} <= set(PROGRAMS)
