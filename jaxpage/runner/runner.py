"""Runs steps: loads the model, sizes the cache, makes programs ready, dispatches plans and fetches tokens."""

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from jaxpage.models.params import Params, load_params, param_shapes
from jaxpage.models.registry import resolve_model
from jaxpage.ops.attention import KVCache
from jaxpage.request import Request
from jaxpage.runner.buckets import make_buckets
from jaxpage.runner.compile_watch import num_compiles
from jaxpage.runner.own_processors import load_processors
from jaxpage.runner.plan import (
    NUM_EDITS,
    pack_admission,
    pack_edits,
    pack_forks,
    pack_redraws,
    pack_rules,
    rules_layout,
)
from jaxpage.runner.program_table import DeviceShapes, ProgramTable
from jaxpage.runner.programs import ProgramStore
from jaxpage.runner.resolve import resolve_dtype, resolve_max_model_len, resolve_num_blocks
from jaxpage.runner.scoring import Scores, dispatch_scores, fetch_scores, host_logprobs
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state
from jaxpage.runner.step import ProgramConfig, StepResult, on_device
from jaxpage.runner.step_table import Ints, StepTable
from jaxpage.sampling_params import MAX_BEAM_CANDIDATES, MAX_STOP_TOKEN_IDS
from jaxpage.scheduler import PromptLogprobs, SchedulerOutput
from jaxpage.wire import TokenLogprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DispatchedStep:
    """A step that runs on the device; its tokens are on their way to the host."""

    result: StepResult
    logits: jax.Array  # [places, vocab] float32
    places: Ints
    """Where the results of each scheduled request stand."""
    requests: list[Request]
    """Those scheduled."""
    wants_logprobs: bool
    scores: Scores | None
    """What a request asks for besides."""
    redrawn: tuple[dict[int, int], StepResult] | None = None
    """Requests whose tokens were drawn again, by index to place, and what was drawn."""


class Runner:
    """One model on its devices. Not thread-safe: one thread dispatches."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        """Loads the weights while the first programs compile; `warm_up` must follow.

        `progress(done, total)` counts programs. Raises `ModelLoadError` or `ConfigError`.
        """
        device = jax.devices()[0]
        if device.platform == "cpu":
            _keep_freed_memory()
        mesh = Mesh(np.array([device]), ("tp",))
        try:
            model, self.model_config = resolve_model(checkpoint)
        except UnsupportedModelError as error:
            raise ModelLoadError(f"{checkpoint.path}: {error}") from error
        self.processors = load_processors(config.logits_processors, self.model_config.vocab_size)
        dtype = resolve_dtype(config.dtype, device.platform)
        specs = model.param_specs(self.model_config)
        params = param_shapes(specs, dtype, mesh)
        weight_bytes = sum(leaf.size * dtype.itemsize for leaf in jax.tree.leaves(params))
        self.layout = plan_layout(model.kv_specs(self.model_config), config.block_size)
        wanted_len = resolve_max_model_len(config, self.model_config.max_position_embeddings)
        self.num_blocks = resolve_num_blocks(config, self.layout, dtype, wanted_len, device, weight_bytes)
        fitting_len = max_request_tokens(self.layout, self.num_blocks - 1, config.max_step_tokens)
        self.max_model_len = min(wanted_len, fitting_len)
        if self.max_model_len < wanted_len:
            logger.warning(
                "max_model_len lowered from %d to %d: %d blocks (%d tokens each) hold no more; raise --num-blocks",
                *(wanted_len, self.max_model_len, self.num_blocks - 1, config.block_size),
            )
        self._background = config.background_compile
        self._strict = config.strict_shapes
        self._num_recompiles = 0
        self._offloaded: Params | None = None
        """The weights while asleep."""
        self._param_shapes = params
        self._replicated = NamedSharding(mesh, PartitionSpec())
        num_rows, num_groups = config.max_num_seqs, len(self.layout.groups)

        def make_state() -> BatchState:
            return empty_state(
                *(num_rows, self.max_model_len, num_groups, config.block_size, MAX_STOP_TOKEN_IDS),
                rules_size=rules_layout(self.model_config.vocab_size).size,
                hidden=jnp.zeros((config.max_num_batched_tokens, self.model_config.hidden_size), dtype),
            )

        def make_kv_cache() -> KVCache:
            return empty_kv_cache(self.layout, self.num_blocks, dtype)

        folder = Path(config.compile_cache_dir) if config.compile_cache_dir else cache_dir() / "programs"
        self._store = ProgramStore(folder, device)
        self._programs = ProgramTable(
            self._store,
            ProgramConfig(self.model_config, MAX_BEAM_CANDIDATES, self.processors),
            DeviceShapes(params, *(self._shapes_of(make) for make in (make_kv_cache, make_state))),
            make_buckets(num_rows, config.max_num_batched_tokens),
            progress,
        )
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="kv cache") as pool:
                kv_cache = pool.submit(on_device, make_kv_cache, self._replicated)
                started = time.perf_counter()
                self._params = load_params(specs, checkpoint, dtype, mesh)
                logger.info("weights loaded as %s in %.1f s", dtype, time.perf_counter() - started)
                self._state: BatchState = on_device(make_state, self._replicated)
                self._kv_cache: KVCache = kv_cache.result()
        except BaseException:
            self._programs.give_up()
            raise
        self._make_kv_cache = make_kv_cache
        self._table = StepTable(num_rows, num_groups, self._state.block_tables.shape[2])

    @property
    def stats(self) -> dict[str, float]:
        """Programs made ready so far, how many of them came from disk, the seconds it took; compiles while serving."""
        stats = self._store.stats
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
        return self._programs.token_budget

    def warm_up(self) -> None:
        """Return when every step of `token_budget` tokens can run; with `background_compile`, the rest follow."""
        self._programs.wait(background=self._background)

    @property
    def is_sleeping(self) -> bool:
        return self._offloaded is not None

    def sleep(self, *, offload_weights: bool) -> None:
        """Free the KV cache, whose content is lost; with `offload_weights`, move the weights to host memory."""
        for buffer in self._kv_cache.buffers:
            buffer.delete()
        self._offloaded = self._params
        if offload_weights:
            self._offloaded = jax.device_get(self._params)
            for weight in jax.tree.leaves(self._params):
                weight.delete()

    def wake_up(self) -> None:
        """Take the memory again: an empty KV cache, and the weights."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self._param_shapes)
        self._params = jax.device_put(self._offloaded, shardings)
        self._offloaded = None
        self._kv_cache = on_device(self._make_kv_cache, self._replicated)

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
        programs = self._programs
        if output.row_forks or output.block_copies:
            forks = self._send(pack_forks(output, self._state.num_rows, len(self.layout.groups)))
            self._kv_cache, self._state = programs["fork"](self._kv_cache, self._state, forks)
        for admitted in output.admitted:
            admit, capacity = programs.admit(len(admitted.token_ids))
            self._state = admit(self._state, self._send(pack_admission(admitted, capacity, self.layout)))
            if admitted.request.has_rules:
                rules = pack_rules(admitted.row, admitted.request, self.model_config.vocab_size)
                self._state = programs["rules"](self._state, self._send(rules))
        edits, places = self._table.advance(output)
        while edits.shape[1] > NUM_EDITS:
            edits, ahead = edits[:, programs.edit_capacity :], edits[:, : programs.edit_capacity]
            self._state = programs["edit"](self._state, self._send(pack_edits(ahead, programs.edit_capacity)))
        step = programs.step(output.num_tokens, len(output.rows), max(output.query_lens))
        self._kv_cache, self._state, result, logits = step(
            self._params, self._kv_cache, self._state, self._send(pack_edits(edits, NUM_EDITS))
        )
        _send_back(result, output.wants_logprobs)
        scores = None
        if any(request.wants_scores for request in output.requests):
            scores = dispatch_scores(
                output,
                self._table.first_tokens(places),
                score=lambda packed: programs["score"](self._params, self._state.hidden, self._send(packed)),
                score_rows=lambda packed: programs["score_rows"](self._params, self._state.hidden, self._send(packed)),
            )
        return DispatchedStep(result, logits, places, output.requests, output.wants_logprobs, scores)

    def draw_again(self, step: DispatchedStep, masks: dict[int, np.ndarray | None]) -> DispatchedStep:
        """Draw again for some requests of the newest step, each by its mask, or undo the draw without one.

        masks: by the request's index in the step, [ceil(vocab / 32)] int32. Returns the step at once.
        """
        places = {index: int(step.places[index]) for index in masks}
        packed = pack_redraws(
            {places[index]: mask for index, mask in masks.items()}, len(step.logits), self.model_config.vocab_size
        )
        redraw = self._programs.redraw(len(step.logits))
        self._state, result = redraw(step.logits, self._state, self._send(packed))
        _send_back(result, step.wants_logprobs)
        return dataclasses.replace(step, redrawn=(places, result))

    def has_ended(self, step: DispatchedStep) -> bool:
        """Whether the device has run a step."""
        return step.result.tokens.is_ready()  # type: ignore[attr-defined]

    def fetch(
        self, step: DispatchedStep
    ) -> tuple[list[int], list[TokenLogprobs | None], list[PromptLogprobs | None] | None]:
        """Wait for a step's results, one per scheduled request: its token, -1 where its prompt goes on; what it asked
        for of log-probabilities at the token; and at its prompt, None if no request did.
        """
        with jax.transfer_guard_device_to_host("allow"):
            tokens: list[int] = np.asarray(step.result.tokens)[step.places].tolist()
            logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
            if step.wants_logprobs:
                self._take_logprobs(step, step.result, dict(enumerate(step.places.tolist())), logprobs)
            if step.redrawn is not None:
                places, result = step.redrawn
                drawn = np.asarray(result.tokens)
                for index, place in places.items():
                    tokens[index] = int(drawn[place])
                if step.wants_logprobs:
                    self._take_logprobs(step, result, places, logprobs)
            self._programs.go_on()
            if step.scores is None:
                return tokens, logprobs, None
            prompts, logprobs = fetch_scores(step.scores, step.requests, logprobs)
            return tokens, logprobs, prompts

    def _take_logprobs(
        self, step: DispatchedStep, result: StepResult, places: dict[int, int], logprobs: list[TokenLogprobs | None]
    ) -> None:
        """Fill in what requests ask for; places: by index in the step."""
        found = jax.tree.map(np.asarray, result.logprobs)
        for index, place in places.items():
            if (wanted := step.requests[index].num_logprobs) >= 0:
                logprobs[index] = host_logprobs(found, place, wanted)

    def _send(self, packed: np.ndarray) -> jax.Array:
        return jax.device_put(packed, self._replicated)

    def _shapes_of(self, make: Callable[[], Any]) -> Any:
        def placed(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=self._replicated)

        return jax.tree.map(placed, jax.eval_shape(make))


def _send_back(result: StepResult, with_logprobs: bool) -> None:
    """Let a result start on its way to the host."""
    for array in jax.tree.leaves(result if with_logprobs else result.tokens):
        array.copy_to_host_async()


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
