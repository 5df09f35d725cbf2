"""Runs an engine from an artifact on devices that `described_driver/` describes, and prints what came of it, as JSON.

Arguments: options of the engine, as JSON, and which kinds of requests it is to serve.
A process of its own, for which those are CUDA's libraries. Nothing is computed, and every token is 0. What is real is
JAX's client for GPUs, what it loads, and what it and the engine ask of a driver.
"""

import ctypes
import faulthandler
import json
import sys
from typing import Any
from unittest.mock import patch

import jax
from jax._src import hardware_utils

from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore
from jaxpage.errors import ConfigError
from jaxpage.runner.programs.program import trace_counts
from jaxpage.runner.programs.step import STEP
from jaxpage.sampling_params import SamplingParams
from jaxpage.wire import AddRequest, TokenOutput

COUNTS = (
    *("modules", "functions", "launches", "graphs", "in_graphs", "collectives"),
    *("copies_in", "copies_out", "copies_within", "waits", "graphs_made", "graphs_dropped"),
    *("kernel_updates", "child_updates", "copy_updates", "fill_updates"),
)
NUM_STEPS, MAX_TOKENS = 7, 16
PATIENCE_SECONDS = 120
"""After so long, a host that waits for a device which lags will wait for ever: it is told where."""
COMPILED = "/jax/core/compile/backend_compile_duration"
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 0.7, "top_p": 0.9},
    "any": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 3},
    "forked": {"n": 2},
}
"""Of each kind of request: every way to draw, and two sequences of a prompt."""
ARRIVING = "arriving"
"""Greedy requests, while programs become ready."""


class Driver:
    """The stand-in that this process runs on."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._library.described_num_waiting.restype = ctypes.c_long

    def counts(self) -> dict[str, int]:
        return {name: ctypes.c_long.in_dll(self._library, f"described_{name}").value for name in COUNTS}

    def lag(self, num_launches: int) -> None:
        """Let the devices run a launch only when the host has made so many more."""
        self._library.described_lag(ctypes.c_long(num_launches))

    def num_waiting(self) -> int:
        """Launches that no device has begun."""
        return int(self._library.described_num_waiting())


class Steps:
    """What the host asks of the driver for each step that the engine takes."""

    def __init__(self, core: EngineCore, driver: Driver) -> None:
        self._core, self._driver = core, driver
        self.tokens: list[int] = []
        self.num_logprobs = 0

    def take(self) -> dict[str, int]:
        before, runner = self._driver.counts(), self._core.runner
        with patch.object(runner, "dispatch", wraps=runner.dispatch) as dispatch:
            for output in self._core.step():
                assert isinstance(output, TokenOutput)
                self.tokens += output.token_ids
                self.num_logprobs += len(output.logprobs or ())
        asked = {name: count - before[name] for name, count in self._driver.counts().items()}
        return asked | {"block_copies": sum(len(call.args[0].block_copies) for call in dispatch.call_args_list)}


def decode(core: EngineCore, driver: Driver, params: dict[str, Any]) -> dict[str, Any]:
    """The steps of three requests: the first, one whose programs have run, one for which devices lag a step behind."""
    found: dict[str, Any] = {}
    for name in ("first", "later", "lagging"):
        steps, before, num_before = Steps(core, driver), driver.counts(), core.loop.num_steps
        options = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **params)
        core.add(AddRequest(name, [5, 6, 7], options, 0, MAX_TOKENS))
        taken = [steps.take() for _ in range(2)]  # the prompt, and a step in flight; with the next, sequences fork
        if name == "lagging":
            later = found["later"]["steps"][-1]
            driver.lag(later["launches"] + later["graphs"])
        waiting = []
        for _ in range(NUM_STEPS):
            taken.append(steps.take())
            waiting.append(driver.num_waiting())
        driver.lag(0)
        rest = []
        while core.has_work:
            rest.append(steps.take())
        found[name] = {
            "steps": taken,
            "rest": rest,
            "waiting": waiting,
            "num_steps": core.loop.num_steps - num_before,
            "num_tokens": len(steps.tokens),
            "num_logprobs": steps.num_logprobs,
            "all": {name: count - before[name] for name, count in driver.counts().items()},
        }
    return found


def arrive(core: EngineCore, driver: Driver) -> dict[str, Any]:
    """A program becomes ready while a request decodes, and once more while the engine is idle: what steps then ask."""
    programs = core.runner._programs
    bucket = min(bucket for bucket in programs.ready(STEP) if bucket.max_query_len > 1)

    def load_again() -> None:
        del programs._ready[STEP.name][bucket]
        programs._num_rehearsed -= 1
        programs.get(STEP.name, bucket)

    found = {}
    for name in ("busy", "idle"):
        if name == "idle":
            load_again()
            core.use_quiet_moment()
        steps, options = Steps(core, driver), SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, temperature=0.0)
        core.add(AddRequest(name, [5, 6, 7], options, 0, MAX_TOKENS))
        taken = [steps.take() for _ in range(4)]
        if name == "busy":
            load_again()
        taken += [steps.take() for _ in range(4)]
        while core.has_work:
            steps.take()
        found[name] = {"steps": taken, "num_tokens": len(steps.tokens)}
    return found


def see_devices() -> None:
    """JAX looks for device files before it asks a driver."""
    hardware_utils.has_visible_nvidia_gpu = lambda: True


def main(options: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    see_devices()
    num_compiles = 0

    def count(event: str, *_: Any, **__: Any) -> None:
        nonlocal num_compiles
        num_compiles += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        core = EngineCore(EngineConfig(strict_shapes=True, **options))
    except ConfigError as error:
        return {"refused": str(error)}
    driver = Driver()
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    found: dict[str, Any] = {
        "devices": [[it.device_kind, it.compute_capability, it.core_count] for it in jax.devices()],
        "bytes_limit": jax.devices()[0].memory_stats()["bytes_limit"],
        "num_compiles": num_compiles,
        "stats": core.stats(),
        "traces": dict(trace_counts),
        "ready": driver.counts(),
    }
    found |= {kind: decode(core, driver, PARAMS[kind]) for kind in kinds if kind != ARRIVING}
    return found | ({ARRIVING: arrive(core, driver)} if ARRIVING in kinds else {})


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2:])))
