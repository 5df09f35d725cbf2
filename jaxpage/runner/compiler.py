"""The programs of one engine, made ready in the order of their use: what can serve first, the rest meanwhile."""

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.programs.program import Program, Stage
from jaxpage.runner.programs.registry import PROGRAMS

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 4
_PATIENCE_SECONDS = 1.0

_Job = tuple[Program[Any], Any]
"""A program and the variant that it is compiled for."""


class ProgramCompiler:
    """Gives programs that are ready. Not thread-safe but for its own threads."""

    def __init__(self, cache: ProgramCache, plan: EnginePlan, progress: Callable[[int, int], None]) -> None:
        """Starts on the first programs at once, in threads; `progress(done, total)` after each of all."""
        self._cache = cache
        self._plan = plan
        self._progress = progress
        self._jobs: dict[Stage, list[_Job]] = _jobs_of(plan)
        self._ready: dict[str, dict[Any, jax.stages.Compiled]] = {name: {} for name in PROGRAMS}
        self._soon: dict[_Job, Future[jax.stages.Compiled]] = {}
        self._num_rehearsed = 0
        self._closing = threading.Event()
        self._may_go_on = threading.Event()
        self._background: threading.Thread | None = None
        # Much of XLA's compiling is serial: two programs at a time take little longer than one.
        num_threads = min(os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
        self._is_traced = threading.Event()
        longest, *others = self._jobs[Stage.FIRST]
        self._first: list[Future[Any]] = [self._pool.submit(self._make_longest, longest)]
        self._first += [self._pool.submit(self._make_when_traced, job) for job in others]

    @property
    def num_wanted(self) -> int:
        """Programs that there will be."""
        return sum(map(len, self._jobs.values()))

    @property
    def has_unrehearsed(self) -> bool:
        """Whether programs have become ready since the last `rehearsal`."""
        return self._num_ready > self._num_rehearsed

    @property
    def _num_ready(self) -> int:
        return sum(map(len, self._ready.values()))

    @property
    def is_complete(self) -> bool:
        """Whether no more will become ready."""
        return self._background is None or not self._background.is_alive()

    def wait_traced(self) -> None:
        """Return when the first program no longer needs Python's lock: everything else that starts an engine can wait.

        It takes twice the time while weights are being read, and nothing takes longer than to compile it.
        """
        self._is_traced.wait()

    def wait(self, *, background: bool) -> None:
        """Return when what serving needs is ready or, unless in the `background`, when all is.

        What compiles in the background leaves the first step its cores: see `go_on`.
        """
        for program in self._first:
            program.result()
        if not background:
            self.go_on()
        self._soon = {job: self._pool.submit(self._make_later, job) for job in self._jobs[Stage.SOON]}
        logger.info("%d of %d programs are ready: serving", self._cache.stats.num_programs, self.num_wanted)
        if background:
            self._background = threading.Thread(target=self._make_rest, name="compile", daemon=True)
            self._background.start()
        else:
            list(self._pool.map(self._make, self._jobs[Stage.REST]))
            self._finish()
        self._pool.shutdown(wait=False)

    def go_on(self) -> None:
        """Compile the rest: a first step has been served. Without one, it begins `_PATIENCE_SECONDS` after `wait`."""
        self._may_go_on.set()

    def give_up(self) -> None:
        """Begin no further program, and wait for none."""
        self._closing.set()
        self.go_on()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop compiling; waits for the programs that are being compiled."""
        self._closing.set()
        self.go_on()
        self._pool.shutdown(cancel_futures=True)
        if self._background is not None:
            self._background.join()
        self._cache.save()

    def ready[Variant](self, program: Program[Variant]) -> tuple[Variant, ...]:
        """The variants of a program that are ready."""
        return tuple(self._ready[program.name])

    def get(self, name: str, variant: Any) -> jax.stages.Compiled:
        """A program that is ready, or that will be soon: waits for it. One of `Stage.WHEN_RUN` is made here."""
        ready = self._ready[name].get(variant)
        if ready is not None:
            return ready
        job = PROGRAMS[name], variant
        if job in self._soon:
            self.go_on()
            return self._soon[job].result()
        return self._make(job)

    def rehearsal(self) -> Iterator[tuple[str, Any]]:
        """Every program that is ready by its name and variant, to be run with nothing in it.

        In a batch whose last step had no rows, it changes nothing but what "hidden" holds.
        """
        self._num_rehearsed = self._num_ready
        for name, program in PROGRAMS.items():
            for variant in tuple(self._ready[name]):
                if program.stage(self._plan, variant)[0] is not Stage.WHEN_RUN:
                    yield name, variant

    def _make_longest(self, job: _Job) -> None:
        program, variant = job
        try:
            if self._cache.has(program, self._plan, variant):
                self._is_traced.set()
            self._make(job)
        finally:
            self._is_traced.set()

    def _make_when_traced(self, job: _Job) -> None:
        self._is_traced.wait()
        self._make(job)

    def _make_later(self, job: _Job) -> jax.stages.Compiled:
        self._may_go_on.wait(_PATIENCE_SECONDS)
        _give_way()
        self._cache.save()
        return self._make(job)

    def _make_rest(self) -> None:
        self._may_go_on.wait(_PATIENCE_SECONDS)
        _give_way()
        for job in self._jobs[Stage.REST]:
            if self._closing.is_set():
                return
            self._cache.save()
            self._make(job)
        with contextlib.suppress(CancelledError):  # closed meanwhile
            self._finish()

    def _finish(self) -> None:
        for program in self._soon.values():
            program.result()
        self._cache.save()
        stats = self._cache.stats
        logger.info(
            "all %d programs are ready: %d from disk, the others compiled; %.1f s of work",
            *(stats.num_programs, stats.num_loaded, stats.seconds),
        )

    def _make(self, job: _Job) -> jax.stages.Compiled:
        program, variant = job
        compiled = self._cache.get(program, self._plan, variant, when_traced=self._is_traced.set)
        self._ready[program.name][variant] = compiled
        self._progress(self._cache.stats.num_programs, self.num_wanted)
        return compiled


def _jobs_of(plan: EnginePlan) -> dict[Stage, list[_Job]]:
    """What is compiled when, in order: of equals, as the programs are registered."""
    jobs: dict[Stage, list[tuple[int, _Job]]] = {stage: [] for stage in Stage}
    for program in PROGRAMS.values():
        for variant in program.variants(plan):
            stage, order = program.stage(plan, variant)
            jobs[stage].append((order, (program, variant)))
    return {stage: [job for _, job in sorted(found, key=lambda it: it[0])] for stage, found in jobs.items()}


def _give_way() -> None:
    """Let steps have the cores that this thread would compile on; threads have their own priority on Linux alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
