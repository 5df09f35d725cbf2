"""Weights, KV cache and batch on their devices, and the programs that change them, each run by its name.

All that one of several processes must do in step goes through `run`: what the leader runs, its followers run.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.weights import Params, load_params
from jaxpage.ops.attention.paged import KVCache
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.compiler import ProgramCompiler
from jaxpage.runner.draw import StepResult
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.plan import NO_EDITS, NUM_EDITS, pack_draws, pack_edits
from jaxpage.runner.state import BatchState

logger = logging.getLogger(__name__)

_CHANGE_WHAT_EDITS_DO = ("admit", "fork", "edit")
"""Programs that write where edits do: block tables and places."""
_SMALLEST_BYTES = 256
_ROOM_BYTES = [_SMALLEST_BYTES << size for size in range(5) for _ in range(4)]
"""What JAX's allocator gives is a multiple of the smallest. Tokens of 64 rows take as much, edits twice that."""


class DeviceBatch:
    """What lives on the devices of one engine. Not thread-safe: one thread runs programs."""

    def __init__(self, engine_plan: EnginePlan, checkpoint: Checkpoint, programs: ProgramCompiler) -> None:
        """Loads the weights. Raises `ModelLoadError`."""
        self._blueprint = engine_plan
        self._num_logits = engine_plan.program_config.num_logits
        self._programs = programs
        self._offloaded: Params | None = None
        """The weights while asleep."""
        self._last: Bucket | None = None
        """Of the last step."""
        self._no_masks: dict[int, jax.Array] = {}
        """What `SamplerKind.ANY` is told where there are none, by the rows of a step."""
        self._edits: jax.Array | None = None
        """Those of the last step."""
        self._edits_may_repeat = False
        """Whether they would change nothing if they were made once more."""
        with ThreadPoolExecutor(1, thread_name_prefix="kv cache") as pool:
            kv_cache = pool.submit(lambda: programs.empty("kv_cache")())
            started = time.perf_counter()
            self._params = load_params(engine_plan.specs, checkpoint, engine_plan.dtype, engine_plan.mesh)
            logger.info("weights loaded as %s in %.1f s", engine_plan.dtype, time.perf_counter() - started)
            self.state: BatchState = programs.empty("state")()
            self._logits: dict[int, jax.Array] = programs.empty("logits")()
            """Of the last step of each size: see `DeviceShapes.logits`."""
            self._kv_cache: KVCache = kv_cache.result()
        self._walls = self._make_room() if engine_plan.mesh.devices.flat[0].platform != "cpu" else []

    def run(self, program: str, packed: np.ndarray, variant: tuple[int, ...] = ()) -> Any:
        """Send a program of `runner.step` what it is told, and return at once, with what it gives besides the state.

        variant: the numbers of a step's `Bucket` and its `SamplerKind`, or an admission's capacity.
        """
        programs = self._programs
        told = self._edits_of(packed) if program == "step" else self._send(packed)
        if program in _CHANGE_WHAT_EDITS_DO:
            self._edits_may_repeat = False
        match program:
            case "step":
                *shape, kind = variant
                bucket = Bucket(*shape)
                step, number = programs.step(bucket), self._num_logits(bucket)
                self._kv_cache, self.state, self._logits[number] = step(
                    self._params, self._kv_cache, self.state, self._logits[number], told
                )
                self._last = bucket
                return self._draw(SamplerKind(kind), None)
            case "redraw":
                return self._draw(SamplerKind.ANY, told)
            case "admit":
                self.state = programs.admission(*variant)(self.state, told)
            case "fork":
                self._kv_cache, self.state = programs["fork"](self._kv_cache, self.state, told)
            case "edit" | "rules":
                self.state = programs[program](self.state, told)
            case "pool":
                return programs["pool"](self.state.hidden, told)
            case _:
                return programs[program](self._params, self.state.hidden, told)
        return None

    def _draw(self, kind: SamplerKind, told: jax.Array | None) -> StepResult:
        """Behind the last step."""
        assert self._last is not None
        bucket = self._last
        logits = self._logits[self._num_logits(bucket)]
        program = self._programs.draw(bucket, kind)
        if kind is SamplerKind.ANY and told is None:
            told = self._no_masks.get(bucket.num_rows)
            if told is None:
                told = self._send(pack_draws(bucket.num_rows, logits.shape[1]))
                self._no_masks[bucket.num_rows] = told
        result: StepResult
        self.state, result = program(logits, self.state, told)
        return result

    @property
    def is_sleeping(self) -> bool:
        return self._offloaded is not None

    def sleep(self, *, offload_weights: bool) -> None:
        """Free KV cache and logits, whose content is lost; with `offload_weights`, move the weights to host memory."""
        for buffer in (*self._kv_cache.buffers, *self._logits.values()):
            buffer.delete()
        self._offloaded = self._params
        if offload_weights:
            self._offloaded = jax.device_get(self._params)
            for weight in jax.tree.leaves(self._params):
                weight.delete()

    def wake_up(self) -> None:
        """Take the memory again: an empty KV cache, and the weights."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self._blueprint.shapes.params)
        self._params = jax.device_put(self._offloaded, shardings)
        self._offloaded = None
        self._kv_cache = self._programs.empty("kv_cache")()
        self._logits = self._programs.empty("logits")()

    def _edits_of(self, packed: np.ndarray) -> jax.Array:
        """What a step is told, for `NO_EDITS` the same as the last one, which changes nothing: nothing need be sent.

        All of them lie at the same address if memory is free as it was: a GPU's graph stays as it is.
        """
        if self._edits is None or packed.size or not self._edits_may_repeat:
            self._edits = None  # gives its memory to the next
            self._edits = self._send(packed if packed.size else pack_edits(NO_EDITS, NUM_EDITS))
            self._edits_may_repeat = True
        return self._edits

    def _make_room(self) -> list[jax.Array]:
        """Leave gaps in the devices' memory that only small arrays fit in. Returns what stands between them.

        An allocator takes the smallest gap that is large enough. So what is sent and drawn in each step, and is there
        for two, never lies where the scratch of a program was, nor one where the other was: each is at the same address
        again, and graphs stay.
        """
        rooms, walls = [], []
        for num_bytes in _ROOM_BYTES:
            rooms.append(self._send(np.zeros(num_bytes // 4, np.int32)))
            walls.append(self._send(np.zeros(_SMALLEST_BYTES // 4, np.int32)))
        return walls

    def _send(self, packed: np.ndarray) -> jax.Array:
        """To all devices of this process, which every process does: nobody compares what they send."""
        replicated, mesh = self._blueprint.replicated, self._blueprint.mesh
        if replicated.is_fully_addressable:
            return jax.device_put(packed, replicated)
        copies = [jax.device_put(packed, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(packed.shape, replicated, copies)
