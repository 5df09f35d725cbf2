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
from jaxpage.models.checkpoints.open import open_for_compiling
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.compiler import ProgramCompiler
from jaxpage.runner.devices import free_bytes, make_mesh
from jaxpage.runner.engine_plan import EnginePlan, check_memory, plan_engine
from jaxpage.runner.program_cache import ProgramCache

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
    engine_plan = plan_engine(config, open_for_compiling(config.model), mesh, lambda _: free)
    check_memory(engine_plan, free)
    print(_HEADER)
    store = _ReportingStore(out, mesh, free)
    programs = ProgramCompiler(
        *(store, engine_plan.program_config, engine_plan.shapes, engine_plan.buckets, engine_plan.makers),
        progress=lambda done, total: None,
    )
    try:
        for name in engine_plan.makers:
            programs.empty(name)
        programs.wait(background=False)
    except BaseException:
        programs.give_up()
        raise
    options = write_manifest(out, engine_plan)
    print(
        f"{store.stats.num_programs} programs for {mesh.size} x {mesh.devices.flat[0].device_kind} in "
        f"{time.perf_counter() - started:.0f} s, {_size_of(out) / 2**20:.1f} MiB; weights, cache and batch take "
        f"{engine_plan.kept_bytes / 2**30:.2f} of {free / 2**30:.2f} GiB of each, the largest program "
        f"{store.most_bytes / 2**30:.2f} with its scratch; serve with"
    )
    print(f"  jaxpage serve --model {config.model} --programs {out} {_flags(engine_plan, options)}")
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


class _ReportingStore(ProgramCache):
    """Prints a line for each program, and refuses one that does not fit."""

    def __init__(self, folder: Path, mesh: Mesh, memory_bytes: int) -> None:
        super().__init__(folder, mesh, must_keep=True)
        self._memory_bytes = memory_bytes
        self.most_bytes = 0
        """What the largest program so far needs of each device."""
        self._printing = threading.Lock()

    def get(
        self, name: str, config: object, args: Any, compile_program: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        started = time.perf_counter()
        program = super().get(name, config, args, compile_program)
        facts = facts_of(program)
        with self._printing:
            print(_line(_title(name, config), time.perf_counter() - started, facts), flush=True)
            self.most_bytes = max(self.most_bytes, facts.total_bytes)
        if facts.total_bytes > self._memory_bytes:
            raise ConfigError(
                f"{_title(name, config)} needs {facts.total_bytes / 2**30:.2f} GiB of each device, "
                f"{facts.scratch_bytes / 2**30:.2f} of it scratch, and there are {self._memory_bytes / 2**30:.2f}: "
                "raise --tensor-parallel-size, or lower --num-blocks, --max-num-batched-tokens or --max-num-seqs"
            )
        return program


def _title(name: str, config: object) -> str:
    match config:
        case (_, Bucket() as bucket):
            return f"{name} {bucket.num_tokens} tokens, {bucket.num_rows} rows"
        case (_, SamplerKind() as kind, int() as num_draws):
            return f"{name} {kind.name.lower()}, {num_draws} a row"
        case int() | str():
            return f"{name} {config}"
    return name


def _line(title: str, seconds: float, facts: ProgramFacts) -> str:
    collectives = ", ".join(f"{count} {kind}" for kind, count in facts.collectives.items()) or "none"
    return (
        f"{title:34} {seconds:8.1f} {facts.argument_bytes / 2**30:7.2f} GiB {facts.scratch_bytes / 2**20:6.1f} MiB "
        f"{facts.num_kernels:8} {facts.num_triton_kernels:7}  {collectives}"
    )


def _flags(engine_plan: EnginePlan, options: dict[str, Any]) -> str:
    """Options that differ from what an engine has by default, and that it would not take from the artifact."""
    default = EngineConfig()
    given = {name: value for name, value in options.items() if getattr(default, name) not in (None, "auto", value)}
    return " ".join(f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items())


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
