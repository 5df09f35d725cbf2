"""Weights, KV cache and batch on their devices, and the programs that change them, each run by its name.

All that one of several processes must do in step goes through `run`: what the leader runs, its followers run.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpage.models.checkpoint import Checkpoint
from jaxpage.models.params import Params, load_params
from jaxpage.ops.attention import KVCache
from jaxpage.request import Draw
from jaxpage.runner.blueprint import Blueprint
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.draw import StepResult
from jaxpage.runner.plan import pack_draws
from jaxpage.runner.program_table import ProgramTable
from jaxpage.runner.state import BatchState

logger = logging.getLogger(__name__)


class DeviceBatch:
    """What lives on the devices of one engine. Not thread-safe: one thread runs programs."""

    def __init__(self, blueprint: Blueprint, checkpoint: Checkpoint, programs: ProgramTable) -> None:
        """Loads the weights. Raises `ModelLoadError`."""
        self._blueprint = blueprint
        self._programs = programs
        self._offloaded: Params | None = None
        """The weights while asleep."""
        self._last: tuple[Bucket, jax.Array] | None = None
        """The last step, and its logits."""
        self._no_masks: dict[int, jax.Array] = {}
        """What `Draw.ANY` is told where there are none, by the rows of a step."""
        with ThreadPoolExecutor(1, thread_name_prefix="kv cache") as pool:
            kv_cache = pool.submit(lambda: programs.empty("kv_cache")())
            started = time.perf_counter()
            self._params = load_params(blueprint.specs, checkpoint, blueprint.dtype, blueprint.mesh)
            logger.info("weights loaded as %s in %.1f s", blueprint.dtype, time.perf_counter() - started)
            self.state: BatchState = programs.empty("state")()
            self._kv_cache: KVCache = kv_cache.result()

    def run(self, program: str, packed: np.ndarray, variant: tuple[int, ...] = ()) -> Any:
        """Send a program of `runner.step` what it is told, and return at once, with what it gives besides the state.

        variant: the numbers of a step's `Bucket` and its `Draw`, or an admission's capacity.
        """
        programs, told = self._programs, self._send(packed)
        match program:
            case "step":
                *shape, kind = variant
                bucket = Bucket(*shape)
                step = programs.step(bucket)
                self._kv_cache, self.state, logits = step(self._params, self._kv_cache, self.state, told)
                self._last = bucket, logits
                return self._draw(Draw(kind), None)
            case "redraw":
                return self._draw(Draw.ANY, told)
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

    def _draw(self, kind: Draw, told: jax.Array | None) -> StepResult:
        """Behind the last step."""
        assert self._last is not None
        bucket, logits = self._last
        program = self._programs.draw(bucket, kind)
        if kind is Draw.ANY and told is None:
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
        shardings = jax.tree.map(lambda shape: shape.sharding, self._blueprint.shapes.params)
        self._params = jax.device_put(self._offloaded, shardings)
        self._offloaded = None
        self._kv_cache = self._programs.empty("kv_cache")()

    def _send(self, packed: np.ndarray) -> jax.Array:
        """To all devices of this process, which every process does: nobody compares what they send."""
        replicated, mesh = self._blueprint.replicated, self._blueprint.mesh
        if replicated.is_fully_addressable:
            return jax.device_put(packed, replicated)
        copies = [jax.device_put(packed, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(packed.shape, replicated, copies)
