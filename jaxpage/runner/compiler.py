"""The programs of one engine, made ready in the order of their use: what can serve first, the rest meanwhile."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import KVCache, logits_sharding
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket, by_usefulness, choose_bucket
from jaxpage.runner.plan import NO_EDITS, NUM_EDITS, empty_admission, empty_forks, empty_rules, pack_draws, pack_edits
from jaxpage.runner.pooling import NUM_POOLED
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.program_config import ProgramConfig
from jaxpage.runner.scoring import NUM_SCORED_ROWS, NUM_SCORED_TOKENS
from jaxpage.runner.state import BatchState
from jaxpage.runner.step import (
    compile_admit,
    compile_draw,
    compile_edit,
    compile_empty,
    compile_fork,
    compile_pool,
    compile_rules,
    compile_score,
    compile_score_rows,
    compile_step,
)

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 4
_PATIENCE_SECONDS = 1.0
_MANY_EDITS = 1024
_SMALL = ("edit", "fork", "rules", "score", "score_rows", "pool")
"""Programs that there is one of each of, see `runner.step`. Few steps need them, and serving need not wait for them."""


_DrawShape = tuple[int, int]
"""Rows of a step, and how many tokens each draws at most: what is drawn behind a step depends on no more of it."""


@dataclass(frozen=True)
class DeviceShapes:
    """What programs take, as `ShapeDtypeStruct`s: they compile before there is any of it."""

    params: Params
    kv_cache: KVCache
    state: BatchState
    logits: dict[int, jax.ShapeDtypeStruct]
    """By how many tokens a step draws at most (`num_logits`), [that many, vocab] float32 each."""


class ProgramCompiler:
    """Gives the program that a step, an admission or a fork runs in. Not thread-safe but for its own threads."""

    def __init__(
        self,
        store: ProgramCache,
        config: ProgramConfig,
        shapes: DeviceShapes,
        buckets: list[Bucket],
        makers: Mapping[str, Callable[[], Any]],
        progress: Callable[[int, int], None],
    ) -> None:
        """Starts on the first programs at once, in threads; `progress(done, total)` after each of all.

        makers: what `empty` gives when it is traced, by its name among the shapes.
        """
        self.edit_capacity = _MANY_EDITS
        self._store = store
        self._config = config
        self._shapes = shapes
        self._buckets = by_usefulness(buckets)
        self._makers = makers
        self._capacities = _admission_capacities(shapes.state.token_ids.shape[1])
        self._progress = progress
        self._empty: dict[str, jax.stages.Compiled] = {}
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._admit: dict[int, jax.stages.Compiled] = {}
        self._draws: dict[_DrawShape, dict[SamplerKind, jax.stages.Compiled]] = {}
        self._draw_any: dict[_DrawShape, Future[jax.stages.Compiled]] = {}
        """What few requests ask for, and takes the longest to compile."""
        # A GPU has a program of its own for greedy steps: the one that draws at random leaves nothing out there.
        is_cpu = _mesh_of(shapes).devices.flat[0].platform == "cpu"
        self._kinds = (
            (SamplerKind.FILTERED,) if is_cpu else (SamplerKind.GREEDY, SamplerKind.RANDOM, SamplerKind.FILTERED)
        )
        self._num_rehearsed = 0
        self._closing = threading.Event()
        self._may_go_on = threading.Event()
        self._background: threading.Thread | None = None
        # Much of XLA's compiling is serial: two programs at a time take little longer than one.
        num_threads = min(os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="compile")
        self._is_traced = threading.Event()
        self._first: list[Future[Any]] = [self._pool.submit(self._compile_first)]
        self._first.append(self._pool.submit(self._compile_draws, self._shape_of(self._buckets[0])))
        self._first.append(self._pool.submit(self._compile_admission, self._capacities[-1]))
        self._small: dict[str, Future[jax.stages.Compiled]] = {}

    @property
    def num_wanted(self) -> int:
        """Programs that there will be."""
        num_draws = len(self._draw_shapes) * (len(self._kinds) + 1)
        return len(_SMALL) + len(self._makers) + len(self._capacities) + len(self._buckets) + num_draws

    @property
    def has_unrehearsed(self) -> bool:
        """Whether programs have become ready since the last `rehearsal`."""
        return self._num_ready > self._num_rehearsed

    @property
    def _num_ready(self) -> int:
        """Programs that a `rehearsal` runs."""
        later = sum(program.done() for program in (*self._small.values(), *self._draw_any.values()))
        return len(self._admit) + len(self._steps) + len(self._draws) + later

    @property
    def is_complete(self) -> bool:
        """Whether no more will become ready."""
        return self._background is None or not self._background.is_alive()

    @property
    def token_budget(self) -> int:
        """Tokens that a step may carry by what is ready."""
        return max(bucket.num_tokens for bucket in tuple(self._steps) if bucket.takes_any_query)

    def wait_traced(self) -> None:
        """Return when the first step no longer needs Python's lock: everything else that starts an engine can wait.

        It takes twice the time while weights are being read, and nothing takes longer than to compile it.
        """
        self._is_traced.wait()

    def wait(self, *, background: bool) -> None:
        """Return when every step can run in some bucket, or, unless in the `background`, when all is ready.

        What compiles in the background leaves the first step its cores: see `go_on`.
        """
        for program in self._first:
            program.result()
        if not background:
            self.go_on()
        first, *others = self._draw_shapes
        self._draw_any = {first: self._later(self._compile_draw, first, SamplerKind.ANY)}
        self._small = {name: self._later(self._compile_small, name) for name in _SMALL}
        self._draw_any |= {shape: self._later(self._compile_draw, shape, SamplerKind.ANY) for shape in others}
        self._shorter = [self._later(self._compile_admission, capacity) for capacity in self._capacities[:-1]]
        logger.info("%d of %d programs are ready: serving", self._store.stats.num_programs, self.num_wanted)
        rest = self._buckets[1:]
        if background:
            self._background = threading.Thread(target=self._compile_rest, args=(rest,), name="compile", daemon=True)
            self._background.start()
        else:
            list(self._pool.map(self._compile_draws, self._draw_shapes))
            list(self._pool.map(self._compile_step, rest))
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
        self._store.save()

    def bucket(self, num_tokens: int, num_rows: int, max_query_len: int) -> Bucket:
        """The cheapest ready one that holds such a step."""
        return choose_bucket(tuple(self._steps), num_tokens, num_rows, max_query_len)

    def step(self, bucket: Bucket) -> jax.stages.Compiled:
        """The program of a ready bucket."""
        return self._steps[bucket]

    def capacity(self, num_tokens: int) -> int:
        """What an admission of so many known tokens is packed for: the smallest that is ready."""
        return min(capacity for capacity in tuple(self._admit) if capacity >= num_tokens)

    def admission(self, capacity: int) -> jax.stages.Compiled:
        """The program of a ready capacity."""
        return self._admit[capacity]

    def draw(self, bucket: Bucket, kind: SamplerKind) -> jax.stages.Compiled:
        """What draws behind a step in a ready bucket; waits for `SamplerKind.ANY` if it is not ready yet."""
        shape = self._shape_of(bucket)
        if kind is SamplerKind.ANY:
            self.go_on()
            return self._draw_any[shape].result()
        ready = self._draws[shape]
        return ready[min(each for each in ready if each >= kind)]

    def empty(self, name: str) -> jax.stages.Compiled:
        """What makes one of the shapes, all but "params", with nothing in it. In the caller's thread."""
        if name not in self._empty:
            shapes = getattr(self._shapes, name)
            self._empty[name] = self._get("empty", name, shapes, lambda: compile_empty(self._makers[name], shapes))
        return self._empty[name]

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        """One of the small programs by its name in `runner.step`; waits for one that is not ready yet."""
        self.go_on()
        return self._small[name].result()

    def rehearsal(self) -> Iterator[tuple[str, np.ndarray, tuple[int, ...]]]:
        """What `DeviceBatch.run` takes to run every program that is ready, with nothing in it.

        In a batch whose last step had no rows, it changes nothing but what `BatchState.hidden` holds.
        """
        self._num_rehearsed = self._num_ready
        for capacity in tuple(self._admit):
            yield "admit", self._no_admission(capacity), (capacity,)
        drawn: set[_DrawShape] = set()
        for bucket in tuple(self._steps):
            shape = self._shape_of(bucket)
            kinds = [*self._draws[shape], *([SamplerKind.ANY] if self._draw_any[shape].done() else [])]
            for kind in kinds[:1] if shape in drawn else kinds:
                yield "step", NO_EDITS, (*dataclasses.astuple(bucket), kind)
            drawn.add(shape)
        for name, program in self._small.items():
            if program.done():
                yield name, self._nothing(name), ()

    def _later[T](self, work: Callable[..., T], *what: Any) -> Future[T]:
        def when_it_may() -> T:
            self._may_go_on.wait(_PATIENCE_SECONDS)
            _give_way()
            self._store.save()
            return work(*what)

        return self._pool.submit(when_it_may)

    def _compile_rest(self, buckets: list[Bucket]) -> None:
        self._may_go_on.wait(_PATIENCE_SECONDS)
        _give_way()
        for bucket in buckets:
            if self._closing.is_set():
                return
            self._store.save()
            self._compile_draws(self._shape_of(bucket))
            self._compile_step(bucket)
        with contextlib.suppress(CancelledError):  # closed meanwhile
            self._finish()

    def _finish(self) -> None:
        others: list[Future[Any]] = [*self._draw_any.values(), *self._small.values(), *self._shorter]
        for other in others:
            other.result()
        self._store.save()
        stats = self._store.stats
        logger.info(
            "all %d programs are ready: %d from disk, the others compiled; %.1f s of work",
            *(stats.num_programs, stats.num_loaded, stats.seconds),
        )

    def _compile_first(self) -> None:
        bucket = self._buckets[0]
        try:
            if self._store.has("step", (self._config, bucket), self._step_arguments(bucket)):
                self._is_traced.set()
            self._compile_step(bucket)
        finally:
            self._is_traced.set()

    def _compile_step(self, bucket: Bucket) -> None:
        args = self._step_arguments(bucket)

        def compile_it() -> jax.stages.Compiled:
            return compile_step(self._config, bucket, *args, when_traced=self._is_traced.set)

        self._steps[bucket] = self._get("step", (self._config, bucket), args, compile_it)

    def _step_arguments(self, bucket: Bucket) -> tuple[Params, KVCache, BatchState, jax.ShapeDtypeStruct, np.ndarray]:
        return step_arguments(self._shapes, self._config, bucket)

    def _compile_admission(self, capacity: int) -> None:
        self._is_traced.wait()
        state = self._shapes.state
        args = (state, self._no_admission(capacity))
        self._admit[capacity] = self._get("admit", capacity, args, lambda: compile_admit(capacity, *args))

    def _shape_of(self, bucket: Bucket) -> _DrawShape:
        return bucket.num_rows, self._config.num_draws(bucket)

    @property
    def _draw_shapes(self) -> list[_DrawShape]:
        """Those of all buckets, in the order of their use."""
        return list(dict.fromkeys(self._shape_of(bucket) for bucket in self._buckets))

    def _compile_draws(self, shape: _DrawShape) -> None:
        """What most requests ask for, unless it is there."""
        self._is_traced.wait()
        if shape not in self._draws:
            self._draws[shape] = {kind: self._compile_draw(shape, kind) for kind in self._kinds}

    def _compile_draw(self, shape: _DrawShape, kind: SamplerKind) -> jax.stages.Compiled:
        num_rows, num_draws = shape
        args = draw_arguments(self._shapes, self._config, num_rows, num_draws, kind)
        return self._get(
            *("draw", (self._config, kind, num_draws), args),
            lambda: compile_draw(self._config, kind, num_draws, *args),
        )

    def _compile_small(self, name: str) -> jax.stages.Compiled:
        params, kv_cache, state = self._shapes.params, self._shapes.kv_cache, self._shapes.state
        config = self._config
        make: Callable[..., jax.stages.Compiled]
        args: tuple[Any, ...]
        told = self._nothing(name)
        match name:
            case "fork":
                args, make = (kv_cache, state, told), compile_fork
            case "edit":
                args, make = (state, told), compile_edit
            case "rules":
                args, make = (state, told), compile_rules
            case "score":
                args, make = (params, state.hidden, told), partial(compile_score, config)
            case "pool":
                args, make = (state.hidden, told), compile_pool
            case _:
                args, make = (params, state.hidden, told), partial(compile_score_rows, config)
        return self._get(name, config, args, lambda: make(*args))

    def _nothing(self, name: str) -> np.ndarray:
        """What one of the small programs is told when there is nothing for it to do."""
        state, vocab_size = self._shapes.state, self._config.model.vocab_size
        match name:
            case "fork":
                return empty_forks(state.num_rows, len(self._shapes.kv_cache.layout.groups))
            case "edit":
                return self._edits(self.edit_capacity)
            case "rules":
                return empty_rules(vocab_size)
            case "score":
                return np.zeros((2, NUM_SCORED_TOKENS), np.int32)
            case "pool":
                return np.zeros((2, NUM_POOLED), np.int32)
        return np.zeros(NUM_SCORED_ROWS, np.int32)

    def _no_admission(self, capacity: int) -> np.ndarray:
        drafts = self._shapes.state.drafts is not None
        return empty_admission(capacity, self._shapes.kv_cache.layout, drafts=drafts)

    def _edits(self, capacity: int) -> np.ndarray:
        return pack_edits(NO_EDITS, capacity)

    def _get(
        self, name: str, config: object, args: Any, compile_program: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        program = self._store.get(name, config, args, compile_program)
        self._progress(self._store.stats.num_programs, self.num_wanted)
        return program


def step_arguments(
    shapes: DeviceShapes, config: ProgramConfig, bucket: Bucket
) -> tuple[Params, KVCache, BatchState, jax.ShapeDtypeStruct, np.ndarray]:
    """What `compile_step` takes for a bucket."""
    logits = _logits_shape(shapes, config, config.num_logits(bucket))
    return shapes.params, shapes.kv_cache, shapes.state, logits, pack_edits(NO_EDITS, NUM_EDITS)


def draw_arguments(
    shapes: DeviceShapes, config: ProgramConfig, num_rows: int, num_draws: int, kind: SamplerKind
) -> tuple[jax.ShapeDtypeStruct, BatchState, np.ndarray | None]:
    """What `compile_draw` takes for draws behind a step of so many rows."""
    told = pack_draws(num_rows, config.model.vocab_size) if kind is SamplerKind.ANY else None
    return _logits_shape(shapes, config, num_rows * num_draws), shapes.state, told


def _logits_shape(shapes: DeviceShapes, config: ProgramConfig, number: int) -> jax.ShapeDtypeStruct:
    vocab_size = config.model.vocab_size
    sharding = logits_sharding(_mesh_of(shapes), vocab_size)
    return jax.ShapeDtypeStruct((number, vocab_size), np.float32, sharding=sharding)


def _mesh_of(shapes: DeviceShapes) -> Mesh:
    lies = shapes.state.token_ids.sharding
    assert isinstance(lies, NamedSharding)
    assert isinstance(lies.mesh, Mesh)
    return lies.mesh


def _give_way() -> None:
    """Let steps have the cores that this thread would compile on; threads have their own priority on Linux alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _admission_capacities(max_model_len: int) -> list[int]:
    """Padded prompt lengths that an admission is compiled for."""
    return sorted({min(capacity, max_model_len) for capacity in (128, 1024, max_model_len)})
