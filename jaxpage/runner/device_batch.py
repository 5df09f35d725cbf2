"""Weights, KV cache and batch on their devices, and the programs that change them, each run by its name.

All that one of several processes must do in step goes through `run`: what the leader runs, its followers run.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxpage.runner.compiler import ProgramCompiler
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.empty import EMPTY
from jaxpage.runner.programs.program import Piece, Program
from jaxpage.runner.programs.registry import PROGRAMS

logger = logging.getLogger(__name__)

_SMALLEST_BYTES = 256
_ROOM_BYTES = [_SMALLEST_BYTES << size for size in range(5) for _ in range(4)]
"""What JAX's allocator gives is a multiple of the smallest. Tokens of 64 rows take as much, edits twice that."""


class DeviceBatch:
    """What lives on the devices of one engine, piece by piece. Not thread-safe: one thread runs programs."""

    def __init__(self, plan: EnginePlan, programs: ProgramCompiler) -> None:
        """Loads the weights. Raises `ModelLoadError`."""
        self._plan = plan
        self._programs = programs
        self._offloaded: Any = None
        """The weights while asleep."""
        self._calls: dict[tuple[str, Any], tuple[list[Piece], list[Piece]]] = {}
        """What programs take and change, once they have run."""
        self._inputs: dict[tuple[str, Any], jax.Array] = {}
        """The inputs of programs where there is nothing for them to do."""
        self._last_inputs: dict[str, jax.Array] = {}
        """Of programs that `repeat`: their last."""
        self._unsettled: set[str] = set()
        """Programs whose last input may not come again."""
        with ThreadPoolExecutor(1, thread_name_prefix="kv cache") as pool:
            kv_cache = pool.submit(self._empty, "kv_cache")
            started = time.perf_counter()
            self._pieces: dict[Piece, Any] = {"params": plan.model.load_params()}
            logger.info("weights loaded as %s in %.1f s", plan.model.dtype, time.perf_counter() - started)
            for group in plan.empty_groups:
                self._pieces |= kv_cache.result() if group == "kv_cache" else self._empty(group)
        self._walls = self._make_room() if plan.target.gpu is not None else []

    def run(self, name: str, packed: np.ndarray | None, variant: Any = None) -> Any:
        """Run a program, and return at once, with its result.

        packed: its input; None where there is nothing for it to do but what it always does.
        """
        compiled, pieces = self._programs.get(name, variant), self._pieces
        call = self._calls.get((name, variant))
        if call is None:
            program, plan = PROGRAMS[name], self._plan
            call = list(program.takes(plan, variant)), list(program.changes(plan, variant))
            self._calls[name, variant] = call
        takes, changes = call
        given = self._input(PROGRAMS[name], variant, packed)
        arguments = [pieces[piece] for piece in takes]
        updated, result = compiled(*arguments) if given is None else compiled(*arguments, given)
        for piece, value in zip(changes, updated, strict=True):
            pieces[piece] = value
        return result

    def wait(self) -> None:
        """Return when the devices have run everything."""
        jax.block_until_ready(self._pieces["state"])

    def __getitem__(self, piece: Piece) -> Any:
        """What lies on the devices now."""
        return self._pieces[piece]

    @property
    def is_sleeping(self) -> bool:
        return self._offloaded is not None

    def sleep(self, *, offload_weights: bool) -> None:
        """Free KV cache and logits, whose content is lost; with `offload_weights`, move the weights to host memory."""
        scratch = [piece for group in self._plan.scratch for piece in self._plan.empty_groups[group]]
        for array in jax.tree.leaves([self._pieces[piece] for piece in scratch]):
            array.delete()
        self._offloaded = self._pieces["params"]
        if offload_weights:
            self._offloaded = jax.device_get(self._pieces["params"])
            for weight in jax.tree.leaves(self._pieces["params"]):
                weight.delete()

    def wake_up(self) -> None:
        """Take the memory again: an empty KV cache, and the weights."""
        shardings = jax.tree.map(lambda shape: shape.sharding, self._plan.shapes["params"])
        self._pieces["params"] = jax.device_put(self._offloaded, shardings)
        self._offloaded = None
        for group in self._plan.scratch:
            self._pieces |= self._empty(group)

    def _empty(self, group: str) -> dict[Piece, Any]:
        """Pieces that hold nothing."""
        _, made = self._programs.get(EMPTY.name, group)()
        return dict(zip(self._plan.empty_groups[group], made, strict=True))

    def _input(self, program: Program[Any], variant: Any, packed: np.ndarray | None) -> jax.Array | None:
        """What a program is packed, on the devices.

        What has an effect only once may come a second time in place of nothing, and nothing need be sent. All inputs
        of such a program lie at the same address if memory is free as it was: a GPU's graph stays as it is.
        """
        if program.unsettles:
            self._unsettled.update(self._last_inputs)
        name, key = program.name, (program.name, variant)
        if program.repeats:
            if packed is None and name in self._last_inputs and name not in self._unsettled:
                return self._last_inputs[name]
            self._last_inputs.pop(name, None)  # gives its memory to the next
            packed = packed if packed is not None else program.nothing(self._plan, variant)
            assert packed is not None, "what repeats has an input"
            self._last_inputs[name] = self._send(packed)
            self._unsettled.discard(name)
            return self._last_inputs[name]
        if packed is not None:
            return self._send(packed)
        if key not in self._inputs:
            nothing = program.nothing(self._plan, variant)
            if nothing is None:
                return None
            self._inputs[key] = self._send(nothing)
        return self._inputs[key]

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
        replicated, mesh = self._plan.replicated, self._plan.mesh
        if replicated.is_fully_addressable:
            return jax.device_put(packed, replicated)
        copies = [jax.device_put(packed, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(packed.shape, replicated, copies)
