"""The programs of one engine, made ready in the order of their use: what can serve first, the rest meanwhile.

What compiles while requests are served takes the cores that they need. So it waits as long as steps run in the programs
that are best for them (`hold`), and goes on when there is nothing to do, when a step would have been cheaper in a
program that is missing, or when somebody waits for one.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.programs.program import Program, Stage
from jaxpage.runner.programs.registry import PROGRAMS

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 4
_PATIENCE_SECONDS = 0.5
"""How long compiling keeps still behind the start, and behind each step that needs nothing of it."""
_MOST_PATIENCE_SECONDS = 5.0
"""How long it keeps still in all before one program is compiled beside whatever is served."""
_LOOK_SECONDS = 0.05
"""How often it is looked whether compiling may go on."""

Job = tuple[Program[Any], Any]
"""A program and the variant that it is compiled for."""


class ProgramCompiler:
    """Gives programs that are ready. Not thread-safe but for its own threads."""

    def __init__(self, cache: ProgramCache, plan: EnginePlan, progress: Callable[[int, int], None]) -> None:
        """Starts on the first programs at once, in threads; `progress(done, total)` after each of all."""
        self._cache = cache
        self._plan = plan
        self._progress = progress
        self._jobs: dict[Stage, list[Job]] = _jobs_of(plan)
        self._ready: dict[str, dict[Any, jax.stages.Compiled]] = {name: {} for name in PROGRAMS}
        later = [*self._jobs[Stage.SOON], *self._jobs[Stage.REST]]
        self._later: dict[Job, Future[jax.stages.Compiled]] = {job: Future() for job in later}
        """What is made behind the start, in this order but for what is wanted."""
        self._untaken = list(later)
        self._wanted: list[Job] = []
        """Those that somebody waits for, and that nobody has begun."""
        self._lock = threading.Lock()
        """Of the two above."""
        self._held_until = 0.0
        self._begun = 0.0
        """When a program was last begun."""
        self._num_failed = 0
        self._num_rehearsed = 0
        self._closing = threading.Event()
        self._workers: list[threading.Thread] = []
        # Much of XLA's compiling is serial: two programs at a time take little longer than one.
        self._num_threads = min(os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="compile")
        self._is_traced = threading.Event()
        longest, *others = self._jobs[Stage.FIRST]
        self._first: list[Future[Any]] = [self._pool.submit(self._make_longest, longest)]
        self._first += [self._pool.submit(self._make_when_traced, job) for job in others]

    @property
    def num_wanted(self) -> int:
        """Programs that there will be."""
        return sum(map(len, self._jobs.values())) - self._num_failed

    @property
    def has_unrehearsed(self) -> bool:
        """Whether programs have become ready since the last `rehearsal`."""
        return self.num_ready > self._num_rehearsed

    @property
    def num_ready(self) -> int:
        """Programs that can be run."""
        return sum(map(len, self._ready.values()))

    @property
    def is_complete(self) -> bool:
        """Whether no more will become ready."""
        return not any(worker.is_alive() for worker in self._workers)

    def wait_traced(self) -> None:
        """Return when the first program no longer needs Python's lock: everything else that starts an engine can wait.

        It takes twice the time while weights are being read, and nothing takes longer than to compile it.
        """
        self._is_traced.wait()

    def wait(self, *, background: bool) -> None:
        """Return when what serving needs is ready or, unless in the `background`, when all is.

        Raises what keeps one of them from being compiled; in the background, that is logged.
        """
        for program in self._first:
            program.result()
        self._pool.shutdown(wait=False)
        self._begun = time.monotonic()
        self._held_until = self._begun + _PATIENCE_SECONDS if background else 0.0
        if background:
            logger.info("%d of %d programs are ready: serving", self._cache.stats.num_programs, self.num_wanted)
        for _ in range(self._num_threads):
            self._workers.append(threading.Thread(target=self._make_later, name="compile", daemon=True))
            self._workers[-1].start()
        if not background:
            for program in self._later.values():
                program.result()
            for worker in self._workers:
                worker.join()

    def hold(self, is_served: bool) -> None:
        """A step has been sent off. If it `is_served` as well as it will ever be, nothing is begun for a while."""
        self._held_until = time.monotonic() + _PATIENCE_SECONDS if is_served else 0.0

    def want(self, jobs: Sequence[Job]) -> list[Future[jax.stages.Compiled]]:
        """Make these next, whatever is served meanwhile; returns those that are not ready."""
        missing = [job for job in jobs if job in self._later and not self._later[job].done()]
        with self._lock:
            self._wanted += [job for job in missing if job in self._untaken and job not in self._wanted]
        return [self._later[job] for job in missing]

    def give_up(self) -> None:
        """Begin no further program, and wait for none."""
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Stop compiling; waits for the programs that are being compiled."""
        self._closing.set()
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.join()
        self._cache.save()

    def ready[Variant](self, program: Program[Variant]) -> tuple[Variant, ...]:
        """The variants of a program that are ready."""
        return tuple(self._ready[program.name])

    def get(self, name: str, variant: Any) -> jax.stages.Compiled:
        """A program that is ready, or that will be: waits for it. One of `Stage.WHEN_RUN` is made here."""
        ready = self._ready[name].get(variant)
        if ready is not None:
            return ready
        job = PROGRAMS[name], variant
        if (found := self._later.get(job)) is None or not self._workers:
            return self._make(job)
        self.want([job])
        return found.result()

    def rehearsal(self) -> Iterator[tuple[str, Any]]:
        """Every program that is ready by its name and variant, to be run with nothing in it.

        In a batch whose last step had no rows, it changes nothing but what "hidden" holds.
        """
        self._num_rehearsed = self.num_ready
        for name, program in PROGRAMS.items():
            for variant in tuple(self._ready[name]):
                if program.stage(self._plan, variant)[0] is not Stage.WHEN_RUN:
                    yield name, variant

    def _make_longest(self, job: Job) -> None:
        program, variant = job
        try:
            if self._cache.has(program, self._plan, variant):
                self._is_traced.set()
            self._make(job)
        finally:
            self._is_traced.set()

    def _make_when_traced(self, job: Job) -> None:
        self._is_traced.wait()
        self._make(job)

    def _make_later(self) -> None:
        """What one thread does behind the start: one program after the other, until all are made."""
        _give_way()
        while (job := self._next_job()) is not None:
            self._cache.save()
            try:
                self._later[job].set_result(self._make(job))
            except Exception as error:
                program, variant = job
                logger.exception("%s cannot be compiled: what needs it fails", program.title(variant))
                self._num_failed += 1
                self._later[job].set_exception(error)
            if all(program.done() for program in self._later.values()):
                self._finish()

    def _next_job(self) -> Job | None:
        """What is to be made next, as soon as it may; None when all is taken, or none is to be begun."""
        while not self._closing.is_set():
            with self._lock:
                if not self._untaken:
                    return None
                now = time.monotonic()
                may_go_on = self._wanted or now >= self._held_until or now >= self._begun + _MOST_PATIENCE_SECONDS
                if may_go_on:
                    job = self._wanted.pop(0) if self._wanted else self._untaken[0]
                    self._untaken.remove(job)
                    self._begun = now
                    return job
            self._closing.wait(_LOOK_SECONDS)
        return None

    def _finish(self) -> None:
        self._cache.save()
        stats = self._cache.stats
        logger.info(
            "all %d programs are ready: %d from disk, the others compiled; %.1f s of work",
            *(stats.num_programs, stats.num_loaded, stats.seconds),
        )

    def _make(self, job: Job) -> jax.stages.Compiled:
        program, variant = job
        compiled = self._cache.get(program, self._plan, variant, when_traced=self._is_traced.set)
        self._ready[program.name][variant] = compiled
        self._progress(self._cache.stats.num_programs, self.num_wanted)
        return compiled


def _jobs_of(plan: EnginePlan) -> dict[Stage, list[Job]]:
    """What is compiled when, in order: of equals, as the programs are registered."""
    jobs: dict[Stage, list[tuple[int, Job]]] = {stage: [] for stage in Stage}
    for program in PROGRAMS.values():
        for variant in program.variants(plan):
            stage, order = program.stage(plan, variant)
            jobs[stage].append((order, (program, variant)))
    return {stage: [job for _, job in sorted(found, key=lambda it: it[0])] for stage, found in jobs.items()}


def _give_way() -> None:
    """Let steps have the cores that this thread would compile on; threads have their own priority on Linux alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where it gives way still more, it may not give way less
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
