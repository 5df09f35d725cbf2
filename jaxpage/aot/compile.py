"""`jaxpage compile`: every program of an engine, for GPUs that need not be here, into a folder to serve from."""

import logging
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpage.aot.artifact import write_manifest
from jaxpage.aot.facts import ProgramFacts, facts_of
from jaxpage.aot.targets import TARGETS, described_mesh
from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.runner.compiler import ProgramCompiler
from jaxpage.runner.devices import free_bytes, make_mesh
from jaxpage.runner.engine_plan import EnginePlan, check_memory, plan_engine
from jaxpage.runner.model import model_to_compile
from jaxpage.runner.program_cache import ProgramCache
from jaxpage.runner.programs.empty import EMPTY
from jaxpage.runner.programs.program import Program

logger = logging.getLogger(__name__)

HERE = "cpu"
"""The target that is this machine's CPU."""


def compile_programs(config: EngineConfig, target: str, out: Path) -> int:
    """Compile for `tensor_parallel_size` of a target, print what each program is, and write the folder `out`.

    Raises `ModelLoadError` or `ConfigError`, also for programs that do not fit the target's memory.
    """
    started = time.perf_counter()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out is {out}, which is not empty: name a new folder, or clear it")
    mesh, free = _devices_of(config, target)
    plan = plan_engine(config, model_to_compile(config, mesh), lambda _: free)
    check_memory(plan, free)
    print(_HEADER)
    cache = _ReportingCache(out, mesh, free)
    programs = ProgramCompiler(cache, plan, progress=lambda done, total: None)
    try:
        for group in EMPTY.variants(plan):
            programs.get(EMPTY.name, group)
        programs.wait(background=False)
    except BaseException:
        programs.give_up()
        raise
    options = write_manifest(out, plan)
    print(
        f"{cache.stats.num_programs} programs for {mesh.size} x {mesh.devices.flat[0].device_kind} in "
        f"{time.perf_counter() - started:.0f} s, {_size_of(out) / 2**20:.1f} MiB; weights, cache and batch take "
        f"{plan.kept_bytes / 2**30:.2f} of {free / 2**30:.2f} GiB of each, the largest program "
        f"{cache.most_bytes / 2**30:.2f} with its scratch; serve with"
    )
    print(f"  jaxpage serve --model {config.model} --programs {out} {_flags(plan, options)}")
    return 0


def _devices_of(config: EngineConfig, target: str) -> tuple[Mesh, int]:
    """Devices to compile for, and the bytes that each has for an engine."""
    if target == HERE:
        mesh = make_mesh(config)
        return mesh, free_bytes(mesh)
    if config.num_processes > 1:
        raise ConfigError(f"--num-processes is {config.num_processes}: programs are compiled for one machine")
    gpu = TARGETS[target]
    return described_mesh(gpu, config.tensor_parallel_size), gpu.pool_bytes


_HEADER = f"{'program':34} {'seconds':>8} {'arguments':>11} {'scratch':>10} {'kernels':>8} {'Triton':>7}  collectives"


class _ReportingCache(ProgramCache):
    """Prints a line for each program, and refuses one that does not fit."""

    def __init__(self, folder: Path, mesh: Mesh, memory_bytes: int) -> None:
        super().__init__(folder, mesh, must_keep=True)
        self._memory_bytes = memory_bytes
        self.most_bytes = 0
        """What the largest program so far needs of each device."""
        self._printing = threading.Lock()

    def get(
        self, program: Program[Any], plan: EnginePlan, variant: Any, when_traced: Callable[[], None] = lambda: None
    ) -> jax.stages.Compiled:
        started = time.perf_counter()
        compiled, title = super().get(program, plan, variant, when_traced), program.title(variant)
        facts = facts_of(compiled)
        with self._printing:
            print(_line(title, time.perf_counter() - started, facts), flush=True)
            self.most_bytes = max(self.most_bytes, facts.total_bytes)
        if facts.total_bytes > self._memory_bytes:
            raise ConfigError(
                f"{title} needs {facts.total_bytes / 2**30:.2f} GiB of each device, "
                f"{facts.scratch_bytes / 2**30:.2f} of it scratch, and there are {self._memory_bytes / 2**30:.2f}: "
                "raise --tensor-parallel-size, or lower --num-blocks, --max-num-batched-tokens or --max-num-seqs"
            )
        return compiled


def _line(title: str, seconds: float, facts: ProgramFacts) -> str:
    collectives = ", ".join(f"{count} {kind}" for kind, count in facts.collectives.items()) or "none"
    return (
        f"{title:34} {seconds:8.1f} {facts.argument_bytes / 2**30:7.2f} GiB {facts.scratch_bytes / 2**20:6.1f} MiB "
        f"{facts.num_kernels:8} {facts.num_triton_kernels:7}  {collectives}"
    )


def _flags(plan: EnginePlan, options: dict[str, Any]) -> str:
    """Options that differ from what an engine has by default, and that it would not take from the artifact."""
    default = EngineConfig()
    given = {name: value for name, value in options.items() if getattr(default, name) not in (None, "auto", value)}
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
