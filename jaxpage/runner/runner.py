"""Runs steps: loads the model, sizes the cache, makes programs ready, dispatches plans and fetches tokens."""

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpage.aot.artifact import check_model
from jaxpage.config import EngineConfig
from jaxpage.engine.loops import Results
from jaxpage.errors import RequestError
from jaxpage.models.checkpoints.packaged import cache_dir
from jaxpage.models.served_model import ServedModel
from jaxpage.requests.request import Request, SamplerKind
from jaxpage.runner.buckets import Bucket, choose_bucket
from jaxpage.runner.compile_watch import num_compiles
from jaxpage.runner.compiler import Job, ProgramCompiler
from jaxpage.runner.device_batch import DeviceBatch
from jaxpage.runner.devices import free_bytes, send_back
from jaxpage.runner.engine_plan import plan_engine
from jaxpage.runner.followers import Followers, Launch, Leader, join_leader_or_followers
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.programs.admit import ADMIT, pack_admission
from jaxpage.runner.programs.checkpoint import LOAD, SAVE, pack_states
from jaxpage.runner.programs.edit import EDIT, MANY_EDITS, NUM_EDITS, pack_edits
from jaxpage.runner.programs.fork import FORK, pack_forks
from jaxpage.runner.programs.pool import POOL, Pools, dispatch_pools, fetch_pools
from jaxpage.runner.programs.propose import PROPOSE
from jaxpage.runner.programs.registry import PROGRAMS
from jaxpage.runner.programs.rules import RULES, pack_rules
from jaxpage.runner.programs.sample import SAMPLE, StepResult, pack_redraws
from jaxpage.runner.programs.score import SCORE, SCORE_ROWS, Scores, dispatch_scores, fetch_scores, host_logprobs
from jaxpage.runner.programs.step import STEP
from jaxpage.runner.state import rules_layout
from jaxpage.runner.step_table import Ints, StepTable
from jaxpage.scheduler.step_plan import PromptPiece, SchedulerOutput
from jaxpage.wire import TokenLogprobs

logger = logging.getLogger(__name__)

_WANTS_SCORES, _POOLING = attrgetter("wants_scores"), attrgetter("pooling")


@dataclass(frozen=True)
class DispatchedStep:
    """A step that runs on the device; its tokens are on their way to the host."""

    result: StepResult
    bucket: Bucket
    step_rows: Ints
    """Where the results of each scheduled request stand."""
    requests: list[Request]
    """Those scheduled."""
    wants_logprobs: bool
    scores: Scores | None
    """What a request asks for besides."""
    pools: Pools | None
    """Hidden states of prompts that are to be pooled."""
    redrawn: tuple[dict[int, int], StepResult] | None = None
    """Requests whose tokens were drawn again, by index to step row, and what was drawn."""


class Runner:
    """One model on its devices. Not thread-safe: one thread dispatches."""

    def __init__(
        self, config: EngineConfig, model: ServedModel, progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Loads the weights while the first programs compile; `warm_up` must follow.

        `progress(done, total)` counts programs. Raises `ModelLoadError` or `ConfigError`.
        """
        self._others = join_leader_or_followers(config)
        device = model.mesh.local_devices[0]
        if device.platform == "cpu":
            _keep_freed_memory()
        self.plan = plan = plan_engine(config, model, free_bytes)
        folder = Path(config.compile_cache_dir) if config.compile_cache_dir else cache_dir() / "programs"
        if config.programs is not None:
            folder = Path(config.programs)
            check_model(config.programs, plan)
        # Other processes must have what this one runs, and what an artifact lacks must be said before serving.
        self._background = config.background_compile and config.num_processes == 1 and config.programs is None
        self._rehearses = device.platform != "cpu"
        self._strict = config.strict_shapes
        self._num_recompiles = 0
        self._cache = ProgramCache(folder, model.mesh, compiles=config.programs is None)
        self._programs = ProgramCompiler(self._cache, plan, progress)
        self._programs.wait_traced()
        try:
            self._batch = DeviceBatch(plan, self._programs)
        except BaseException:
            self._programs.give_up()
            raise
        self._num_rows = plan.config.max_num_seqs
        self._rules_layout = rules_layout(model.vocab_size)
        self._proposes = bool(PROPOSE.variants(plan))
        self._complete: dict[tuple[int, SamplerKind], list[Bucket]] = {}
        """Buckets that steps may run in, by how many programs are ready and what draws behind them."""
        table_width = plan.shapes["state"].block_tables.shape[2]
        self._table = StepTable(self._num_rows, len(plan.layout.groups), table_width)

    @property
    def stats(self) -> dict[str, float]:
        """Programs made ready so far, how many of them came from disk, the seconds it took; compiles while serving."""
        stats = self._cache.stats
        return {
            "num_programs": stats.num_programs,
            "num_programs_wanted": self._programs.num_wanted,
            "num_programs_loaded": stats.num_loaded,
            "compile_seconds": round(stats.seconds, 3),
            "num_recompiles": self._num_recompiles,
        }

    @property
    def token_budget(self) -> int:
        """Most tokens that a step may carry now: less than there will be while programs still compile."""
        return max(bucket.num_tokens for bucket in self._programs.ready(STEP) if bucket.takes_any_query)

    def warm_up(self) -> None:
        """Return when every step of `token_budget` tokens can run; with `background_compile`, the rest follow.

        Of several processes, all must have all programs: a step in one of them waits for the others. What is ready has
        then run on a GPU.
        """
        self._programs.wait(background=self._background)
        if isinstance(self._others, Followers):
            self._others.wait_ready()
        if self._rehearses and not isinstance(self._others, Leader):
            self._rehearse()

    def use_quiet_moment(self) -> bool:
        """Run on a GPU what has become ready while it served, with nothing in it; nothing may be in flight.

        XLA drops all CUDA graphs whenever a program is made. Those are made again here, and the code of new programs is
        loaded, which the next requests would have to wait for. Returns whether there may be more of that later.
        """
        if not self._rehearses or self.is_sleeping or isinstance(self._others, Leader):
            return False
        is_complete = self._programs.is_complete
        if self._programs.has_unrehearsed:
            self._clear_step_rows()
            self._rehearse()
        return not is_complete

    def _clear_step_rows(self) -> None:
        """Let the next step have no rows."""
        edits, _ = self._table.advance(SchedulerOutput([], [], [], [], [], [], []))
        for first in range(0, edits.shape[1], MANY_EDITS):
            self._run(EDIT.name, pack_edits(edits[:, first : first + MANY_EDITS], MANY_EDITS))

    def _rehearse(self) -> None:
        """Run every program that is ready twice, in every process, with nothing in it, and wait for all.

        A GPU takes a program's code, and what its collectives need, only when it runs for the first time, and XLA makes
        its CUDA graph the second time: the first requests would wait for that. What cannot run is reported before
        anything is served.
        """
        started = time.perf_counter()
        ready = list(self._programs.rehearsal())
        given = [self._run(name, None, variant) for name, variant in (*ready, *ready)]
        jax.block_until_ready(given)
        self._batch.wait()
        seconds = time.perf_counter() - started
        logger.info("%d runs of programs with nothing in them took %.1f s", len(given), seconds)

    def follow(self) -> None:
        """Run what the leading process runs; ends with it."""
        assert isinstance(self._others, Leader)
        for launch in self._others.launches():
            match launch.program:
                case "sleep":
                    self._batch.sleep(offload_weights=False)
                case "wake_up":
                    self._batch.wake_up()
                case name:
                    variant = msgspec.convert(launch.variant, PROGRAMS[name].variant_type)
                    self._batch.run(name, launch.array, variant)

    @property
    def is_sleeping(self) -> bool:
        return self._batch.is_sleeping

    def sleep(self, *, offload_weights: bool) -> None:
        """Free the KV cache, whose content is lost; with `offload_weights`, move the weights to host memory.

        Raises `RequestError` for weights of several processes.
        """
        if isinstance(self._others, Followers):
            if offload_weights:
                raise RequestError("weights are not moved to the host in several processes: sleep at level 0")
            self._others.send(Launch("sleep"))
        self._batch.sleep(offload_weights=offload_weights)

    def wake_up(self) -> None:
        """Take the memory again: an empty KV cache, and the weights."""
        if isinstance(self._others, Followers):
            self._others.send(Launch("wake_up"))
        self._batch.wake_up()

    def check_params(self, params: Any) -> dict[str, jax.Array]:
        """The arrays of other weights by their names. Raises `RequestError` unless each fits the model's own."""
        if isinstance(self._others, Followers):
            raise RequestError("weights of several processes are not updated: use one process")
        return self._batch.check_params(params)

    def update_params(self, arrays: dict[str, jax.Array]) -> None:
        """Go on with other weights, as `check_params` gives them; nothing may be in flight."""
        self._batch.update_params(arrays)

    def start_trace(self, folder: str) -> None:
        """Begin a profile that is written to `folder`."""
        jax.profiler.start_trace(folder)

    def stop_trace(self) -> None:
        """End and write it."""
        jax.profiler.stop_trace()

    def close(self) -> None:
        """Stop compiling in the background; waits for the program that is being compiled."""
        self._programs.close()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Around whatever serves: counts compiles. With `strict_shapes` they are errors, as are implicit transfers."""
        before = num_compiles()
        with jax.transfer_guard("disallow") if self._strict else contextlib.nullcontext():
            yield
        if (count := num_compiles() - before) > 0:
            self._num_recompiles += count
            if self._strict:
                raise RuntimeError(f"{count} programs were compiled while serving, and --strict-shapes is on")

    def dispatch(self, output: SchedulerOutput) -> DispatchedStep:
        """Send a step to the device and return at once."""
        run, plan, programs = self._run, self.plan, self._programs
        if (checkpoint := plan.layout.checkpoint) is not None:
            for packed in pack_states(output.saves, checkpoint):
                run(SAVE.name, packed)
            for packed in pack_states(output.loads, checkpoint):
                run(LOAD.name, packed)
        if output.row_forks or output.block_copies:
            run(FORK.name, pack_forks(output, self._num_rows, len(plan.layout.groups)))
        for admitted in output.admitted:
            capacity = ADMIT.choose(programs.ready(ADMIT), len(admitted.token_ids))
            drafts = plan.proposer is not None
            run(ADMIT.name, pack_admission(admitted, capacity, plan.layout, drafts=drafts), capacity)
            if admitted.request.has_rules:
                run(RULES.name, pack_rules(admitted.row, admitted.request, self._rules_layout))
        edits, step_rows = self._table.advance(output)
        while edits.shape[1] > NUM_EDITS:
            edits, ahead = edits[:, MANY_EDITS:], edits[:, :MANY_EDITS]
            run(EDIT.name, pack_edits(ahead, MANY_EDITS))
        requests, wants_logprobs = output.requests, output.wants_logprobs
        size = output.num_tokens, len(output.rows), max(output.query_lens)
        bucket = choose_bucket(self._complete_buckets(self._kind_of(output)), *size)
        programs.hold(bucket == choose_bucket(plan.buckets, *size))
        run(STEP.name, pack_edits(edits, NUM_EDITS) if edits.size else None, bucket)
        result = self._sample(bucket, output.sampler_kind, None)
        _send_back(result, wants_logprobs)
        scores = None
        if any(map(_WANTS_SCORES, requests)):
            scores = dispatch_scores(
                output,
                self._table.first_tokens(step_rows),
                score=partial(run, SCORE.name),
                score_rows=partial(run, SCORE_ROWS.name),
            )
        pools = None
        if any(map(_POOLING, requests)):
            pools = dispatch_pools(output, self._table.first_tokens(step_rows), partial(run, POOL.name))
        return DispatchedStep(result, bucket, step_rows, requests, wants_logprobs, scores, pools)

    def programs_for(self, request: Request) -> list[Future[Any]]:
        """What a request needs beside what all do, as far as it is not ready; it is made next."""
        jobs: list[Job] = []
        if request.sampler_kind is SamplerKind.ANY or request.constraint is not None:
            jobs.append((SAMPLE, SAMPLE.behind(self.plan, self.plan.buckets[0], SamplerKind.ANY)))
        if request.has_rules:
            jobs.append((RULES, None))
        if request.wants_scores:
            jobs += [(SCORE, None), (SCORE_ROWS, None)]
        if request.pooling is not None:
            jobs.append((POOL, None))
        if request.forks or request.group is not None:
            jobs.append((FORK, None))
        return list(self._programs.want(jobs))

    def _kind_of(self, output: SchedulerOutput) -> SamplerKind:
        """How a step draws, or will draw again."""
        is_masked = any(request.constraint is not None for request in output.requests)
        return SamplerKind.ANY if is_masked else output.sampler_kind

    def _complete_buckets(self, kind: SamplerKind) -> list[Bucket]:
        """Those whose steps, and all that follows them, are ready."""
        plan, programs = self.plan, self._programs
        key = programs.num_ready, kind
        if key not in self._complete:
            draws, proposals = programs.ready(SAMPLE), programs.ready(PROPOSE)
            self._complete[key] = [
                bucket
                for bucket in programs.ready(STEP)
                if SAMPLE.behind(plan, bucket, kind) in draws and (not self._proposes or bucket.num_rows in proposals)
            ]
        return self._complete[key]

    def draw_again(self, step: DispatchedStep, masks: dict[int, np.ndarray | None]) -> DispatchedStep:
        """Draw again for some requests of the newest step, each by its mask, or undo the draw without one.

        masks: by the request's index in the step, [ceil(vocab / 32)] int32. Returns the step at once.
        """
        step_rows = {index: int(step.step_rows[index]) for index in masks}
        by_step_row = {step_rows[index]: mask for index, mask in masks.items()}
        packed = pack_redraws(by_step_row, step.bucket.num_rows, self.plan.model.vocab_size)
        result = self._sample(step.bucket, SamplerKind.ANY, packed)
        _send_back(result, step.wants_logprobs)
        return dataclasses.replace(step, redrawn=(step_rows, result))

    def has_ended(self, step: DispatchedStep) -> bool:
        """Whether the device has run a step."""
        return step.result.tokens.is_ready()  # type: ignore[attr-defined]

    def _sample(self, bucket: Bucket, kind: SamplerKind, packed: np.ndarray | None) -> StepResult:
        """Draw behind the newest step, which ran in `bucket`, and propose drafts behind that."""
        result: StepResult = self._run(SAMPLE.name, packed, SAMPLE.behind(self.plan, bucket, kind))
        if self._proposes:
            num_drafts = self._run(PROPOSE.name, None, bucket.num_rows)
            result = dataclasses.replace(result, num_drafts=num_drafts)
        return result

    def _run(self, name: str, packed: np.ndarray | None, variant: Any = None) -> Any:
        """`DeviceBatch.run`, in every process."""
        if isinstance(self._others, Followers):
            self._others.send(Launch.of(name, packed, variant))
        return self._batch.run(name, packed, variant)

    def fetch(self, step: DispatchedStep) -> Results:
        """Wait for a step's results, one per scheduled request: its tokens, none where its prompt goes on; what it
        asked for of log-probabilities at these; what of its prompt, None if no request did; and how many drafts it has
        now, None without speculation.
        """
        with jax.transfer_guard_device_to_host("allow"):
            drawn = np.asarray(step.result.tokens)[step.step_rows].tolist()
            tokens: list[list[int]] = [[token_id for token_id in of_place if token_id >= 0] for of_place in drawn]
            num_drafts = None
            if step.result.num_drafts is not None:
                num_drafts = np.asarray(step.result.num_drafts)[step.step_rows].tolist()
            logprobs: list[list[TokenLogprobs] | None] = [None] * len(tokens)
            if step.wants_logprobs:
                self._take_logprobs(step, step.result, dict(enumerate(step.step_rows.tolist())), tokens, logprobs)
            if step.redrawn is not None:
                step_rows, result = step.redrawn
                again = np.asarray(result.tokens)
                for index, step_row in step_rows.items():
                    tokens[index] = [token_id for token_id in again[step_row].tolist() if token_id >= 0]
                if step.wants_logprobs:
                    self._take_logprobs(step, result, step_rows, tokens, logprobs)
            if step.scores is None and step.pools is None:
                return tokens, logprobs, None, num_drafts
            pieces: list[PromptPiece | None] = [None] * len(tokens)
            if step.scores is not None:
                logprobs = fetch_scores(step.scores, step.requests, logprobs, pieces)
            if step.pools is not None:
                fetch_pools(step.pools, pieces)
            return tokens, logprobs, pieces, num_drafts

    def _take_logprobs(
        self,
        step: DispatchedStep,
        result: StepResult,
        step_rows: dict[int, int],
        tokens: list[list[int]],
        logprobs: list[list[TokenLogprobs] | None],
    ) -> None:
        """Fill in what requests ask for at their tokens; step_rows: by index in the step."""
        found, (_, num_draws) = jax.tree.map(np.asarray, result.logprobs), result.tokens.shape
        for index, step_row in step_rows.items():
            if (wanted := step.requests[index].num_logprobs) >= 0:
                first = step_row * num_draws
                draws = range(first, first + len(tokens[index]))
                logprobs[index] = [host_logprobs(found, draw, wanted) for draw in draws]


def _send_back(result: StepResult, with_logprobs: bool) -> None:
    """Let a result start on its way to the host."""
    send_back(result if with_logprobs else (result.tokens, result.num_drafts))


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
