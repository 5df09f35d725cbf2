"""Runs steps: loads the model, sizes the cache, makes programs ready, dispatches plans and fetches tokens."""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.config import EngineConfig
from jaxpage.errors import ModelLoadError
from jaxpage.kv_cache.spec import max_request_tokens, plan_layout
from jaxpage.models.checkpoint import Checkpoint
from jaxpage.models.config import UnsupportedModelError
from jaxpage.models.packaged import cache_dir
from jaxpage.models.params import load_params
from jaxpage.models.registry import resolve_model
from jaxpage.ops.attention import KVCache
from jaxpage.request import Request
from jaxpage.runner.buckets import Bucket, choose_bucket, first_buckets, make_buckets
from jaxpage.runner.plan import (
    admission_size,
    empty_step,
    pack_admission,
    pack_forks,
    pack_rules,
    pack_step,
    rules_layout,
)
from jaxpage.runner.programs import ProgramStore
from jaxpage.runner.resolve import resolve_dtype, resolve_max_model_len, resolve_num_blocks
from jaxpage.runner.scoring import Scorer, Scores, fetch_scores, host_logprobs
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state
from jaxpage.runner.step import (
    ProgramConfig,
    StepResult,
    compile_admit,
    compile_fork,
    compile_rules,
    compile_step,
    on_device,
)
from jaxpage.sampling_params import MAX_BEAM_CANDIDATES, MAX_STOP_TOKEN_IDS
from jaxpage.scheduler import PromptLogprobs, SchedulerOutput
from jaxpage.wire import TokenLogprobs

logger = logging.getLogger(__name__)

_MAX_COMPILE_THREADS = 4


@dataclass(frozen=True)
class DispatchedStep:
    """A step that runs on the device; its tokens are on their way to the host."""

    result: StepResult
    requests: list[Request]
    """Per scheduled row."""
    wants_logprobs: bool
    scores: Scores | None
    """What a request asks for besides."""


class Runner:
    """One model on its devices. Not thread-safe: one thread dispatches."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        """Loads the weights. Raises `ModelLoadError` or `ConfigError`; `warm_up` must follow."""
        devices = jax.devices()[:1]
        if devices[0].platform == "cpu":
            _keep_freed_memory()
        self._mesh = Mesh(np.array(devices), ("tp",))
        started = time.perf_counter()
        try:
            self._model, self.model_config = resolve_model(checkpoint)
        except UnsupportedModelError as error:
            raise ModelLoadError(f"{checkpoint.path}: {error}") from error
        dtype = resolve_dtype(config.dtype, devices[0].platform)
        self._params = load_params(self._model.param_specs(self.model_config), checkpoint, dtype, self._mesh)
        logger.info("weights loaded as %s in %.1f s", dtype, time.perf_counter() - started)

        self.layout = plan_layout(self._model.kv_specs(self.model_config), config.block_size)
        wanted_len = resolve_max_model_len(config, self.model_config.max_position_embeddings)
        self.num_blocks = resolve_num_blocks(config, self.layout, dtype, wanted_len, devices[0])
        fitting_len = max_request_tokens(self.layout, self.num_blocks - 1, config.max_step_tokens)
        self.max_model_len = min(wanted_len, fitting_len)
        if self.max_model_len < wanted_len:
            logger.warning(
                "max_model_len lowered from %d to %d: %d blocks (%d tokens each) hold no more; raise --num-blocks",
                *(wanted_len, self.max_model_len, self.num_blocks - 1, config.block_size),
            )
        replicated = NamedSharding(self._mesh, PartitionSpec())
        self._kv_cache: KVCache = on_device(lambda: empty_kv_cache(self.layout, self.num_blocks, dtype), replicated)
        num_groups = len(self.layout.groups)
        self._state: BatchState = on_device(
            lambda: empty_state(
                *(config.max_num_seqs, self.max_model_len, num_groups, config.block_size, MAX_STOP_TOKEN_IDS),
                rules_size=rules_layout(self.model_config.vocab_size).size,
                hidden=jnp.zeros((config.max_num_batched_tokens, self.model_config.hidden_size), dtype),
            ),
            replicated,
        )
        self._program_config = ProgramConfig(self.model_config, MAX_BEAM_CANDIDATES)
        self._buckets = make_buckets(config.max_num_seqs, config.max_num_batched_tokens)
        self._capacities = _admission_capacities(self.max_model_len)
        folder = Path(config.compile_cache_dir) if config.compile_cache_dir else cache_dir() / "programs"
        self._store = ProgramStore(folder, devices[0])
        self._scorer = Scorer(self._store, self._program_config)
        self._admit: dict[int, jax.stages.Compiled] = {}
        self._fork: jax.stages.Compiled | None = None
        self._set_rules: jax.stages.Compiled | None = None
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._background: threading.Thread | None = None
        self._closing = threading.Event()

    @property
    def stats(self) -> dict[str, float]:
        """Programs made ready so far, how many of them came from disk, and the seconds it took."""
        stats = self._store.stats
        return {
            "num_programs": stats.num_programs,
            "num_programs_wanted": 2 + Scorer.num_programs + len(self._capacities) + len(self._buckets),
            "num_programs_loaded": stats.num_loaded,
            "compile_seconds": round(stats.seconds, 3),
        }

    def warm_up(self, *, background: bool, progress: Callable[[int, int], None]) -> None:
        """Make programs ready, most useful first; `progress(done, total)` after each.

        With `background`, returns as soon as every step can run in some bucket: the rest become ready meanwhile, and
        until then their steps run in the next larger bucket.
        """
        first = first_buckets(self._buckets)
        rest = [bucket for bucket in self._buckets if bucket not in first]
        total = int(self.stats["num_programs_wanted"])
        # Shapes only: the arrays themselves are donated to steps while the background thread compiles.
        params, kv_cache, state = jax.tree.map(_shape_of, (self._params, self._kv_cache, self._state))

        def compile_bucket(bucket: Bucket) -> None:
            plan = empty_step(bucket, self.layout)
            args = (params, kv_cache, state, plan)
            self._steps[bucket] = self._store.get(
                "step",
                (self._program_config, bucket),
                args,
                lambda: compile_step(self._program_config, bucket, *args),
            )
            progress(self._store.stats.num_programs, total)

        def compile_admission(capacity: int) -> None:
            packed = np.zeros(admission_size(capacity, self.layout), np.int32)
            self._admit[capacity] = self._store.get(
                "admit", capacity, (state, packed), lambda: compile_admit(capacity, state, packed)
            )
            progress(self._store.stats.num_programs, total)

        def prepare(buckets: Sequence[Bucket], num_threads: int) -> None:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool:
                list(pool.map(compile_bucket, buckets))

        def compile_rest() -> None:
            for bucket in rest:
                if self._closing.is_set():
                    return
                compile_bucket(bucket)
            if not self._closing.is_set():
                self._scorer.warm_up(params, state.hidden)
                progress(self._store.stats.num_programs, total)

        for capacity in self._capacities:
            compile_admission(capacity)
        forks = pack_forks(SchedulerOutput([], [], [], [], [], [], []), self._state.num_rows, len(self.layout.groups))
        self._fork = self._store.get(
            "fork", None, (kv_cache, state, forks), lambda: compile_fork(kv_cache, state, forks)
        )
        rules = np.zeros(1 + rules_layout(self.model_config.vocab_size).size, np.int32)
        self._set_rules = self._store.get("rules", None, (state, rules), lambda: compile_rules(state, rules))
        # Much of XLA's compiling is serial: two programs at a time take little longer than one.
        num_threads = min(os.cpu_count() or 1, _MAX_COMPILE_THREADS)
        prepare(first, num_threads)
        if background:
            self._background = threading.Thread(target=compile_rest, name="compile", daemon=True)
            self._background.start()
        else:
            prepare(rest, num_threads)
            self._scorer.warm_up(params, state.hidden)
            progress(self._store.stats.num_programs, total)

    def close(self) -> None:
        """Stop compiling in the background; waits for the program that is being compiled."""
        self._closing.set()
        if self._background is not None:
            self._background.join()

    def dispatch(self, output: SchedulerOutput) -> DispatchedStep:
        """Send a step to the device and return at once."""
        if output.row_forks or output.block_copies:
            assert self._fork is not None, "warm_up comes first"
            forks = pack_forks(output, self._state.num_rows, len(self.layout.groups))
            self._kv_cache, self._state = self._fork(self._kv_cache, self._state, forks)
        for admitted in output.admitted:
            capacity = next(c for c in self._capacities if c >= len(admitted.token_ids))
            self._state = self._admit[capacity](self._state, pack_admission(admitted, capacity, self.layout))
            if admitted.request.has_rules:
                assert self._set_rules is not None, "warm_up comes first"
                rules = pack_rules(admitted.row, admitted.request, self.model_config.vocab_size)
                self._state = self._set_rules(self._state, rules)
        ready = tuple(self._steps)
        bucket = choose_bucket(ready, output.num_tokens, len(output.rows), max(output.query_lens))
        plan = pack_step(output, bucket, self.layout)
        self._kv_cache, self._state, result = self._steps[bucket](self._params, self._kv_cache, self._state, plan)
        for array in jax.tree.leaves(result if output.wants_logprobs else result.tokens):
            array.copy_to_host_async()
        scores = self._scorer.dispatch(self._params, self._state.hidden, output)
        return DispatchedStep(result, output.requests, output.wants_logprobs, scores)

    def fetch(
        self, step: DispatchedStep
    ) -> tuple[list[int], list[TokenLogprobs | None], list[PromptLogprobs | None] | None]:
        """Wait for a step's results, one per scheduled row: its token, -1 where its prompt goes on; what it asked for
        of log-probabilities at the token; and at its prompt, None if no row did.
        """
        num_rows = len(step.requests)
        tokens: list[int] = np.asarray(step.result.tokens)[:num_rows].tolist()
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        if step.wants_logprobs:
            found = jax.tree.map(np.asarray, step.result.logprobs)
            for row, wanted in enumerate(request.num_logprobs for request in step.requests):
                if wanted >= 0:
                    logprobs[row] = host_logprobs(found, row, wanted)
        if step.scores is None:
            return tokens, logprobs, None
        prompts, logprobs = fetch_scores(step.scores, step.requests, logprobs)
        return tokens, logprobs, prompts


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _admission_capacities(max_model_len: int) -> list[int]:
    """Padded prompt lengths that an admission is compiled for."""
    return sorted({min(capacity, max_model_len) for capacity in (128, 1024, max_model_len)})


def _keep_freed_memory() -> None:
    """Let the C library keep what XLA frees.

    XLA's CPU client allocates every temporary anew in each execution; by default glibc maps large ones afresh, and the
    page faults cost more than the arithmetic (measured: attention over 32 rows 1.5 s against 0.4 s).
    """
    m_mmap_threshold, m_trim_threshold, m_top_pad = -3, -1, -2
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((m_mmap_threshold, 1 << 30), (m_trim_threshold, (1 << 31) - 1), (m_top_pad, 1 << 26)):
            libc.mallopt(option, value)
