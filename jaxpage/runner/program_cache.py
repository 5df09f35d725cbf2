"""Compiled programs, kept on disk: what has been compiled once on a machine is loaded, not traced or compiled again.

An entry is a serialized executable. Its key holds everything that a program depends on: shapes and config, the source
of the code that is traced, versions, device and host CPU. A damaged entry is compiled anew.
"""

import hashlib
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding

import jaxpage.models
import jaxpage.ops
import jaxpage.runner
import jaxpage.speculative
from jaxpage.errors import ConfigError
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Program, arguments, compile_program

logger = logging.getLogger(__name__)


@dataclass
class CompileStats:
    """What making programs ready has cost so far in this engine."""

    num_programs: int = 0
    num_loaded: int = 0
    """Of these, taken from disk."""
    seconds: float = 0.0


class ProgramCache:
    """Compiles programs, or loads them from `folder`."""

    def __init__(self, folder: Path, mesh: Mesh, *, compiles: bool = True, must_keep: bool = False) -> None:
        """With `compiles` false, what `folder` lacks is an error; with `must_keep`, what cannot be written there."""
        self._folder = folder
        self._compiles = compiles
        self._must_keep = must_keep
        self._devices = list(mesh.devices.flat)
        self._environment = environment(mesh)
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._unsaved: list[tuple[Path, jax.stages.Compiled]] = []
        self.stats = CompileStats()

    def get(
        self, program: Program[Any], plan: EnginePlan, variant: Any, when_traced: Callable[[], None] = lambda: None
    ) -> jax.stages.Compiled:
        """A program for the devices of a plan; `when_traced` is called once no more Python runs for it.

        What was compiled is kept at the next `save`: half a second for a large one, which serving need not wait for.
        Raises `ConfigError` for one that would have to be compiled and may not.
        """
        started = time.perf_counter()
        path = self._path_of(program, plan, variant)
        compiled = self._load(path)
        loaded = compiled is not None
        if compiled is None:
            if not self._compiles:
                raise ConfigError(
                    f"{self._folder} holds no program {program.title(variant)!r} for {plan.program_config} that can be "
                    "loaded: compile it again with the options that it is served with"
                )
            compiled = compile_program(program, plan, variant, when_traced)
        seconds = time.perf_counter() - started
        with self._lock:
            if not loaded:
                self._unsaved.append((path, compiled))
            self.stats.num_programs += 1
            self.stats.num_loaded += loaded
            self.stats.seconds += seconds
        logger.debug("%s %s in %.2f s", "loaded" if loaded else "compiled", program.title(variant), seconds)
        return compiled

    def has(self, program: Program[Any], plan: EnginePlan, variant: Any) -> bool:
        """Whether `get` need not compile it, if its file is sound."""
        return self._path_of(program, plan, variant).exists()

    def _path_of(self, program: Program[Any], plan: EnginePlan, variant: Any) -> Path:
        involved = arguments(program, plan, variant), program.other_shapes(plan, variant)
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype), _spec_of(leaf)), involved)
        parts = (program.name, repr(plan.program_config), repr(variant), repr(shapes), repr(self._environment))
        return self._folder / (hashlib.sha256("\n".join(parts).encode()).hexdigest() + ".program")

    def save(self) -> None:
        """Write what was compiled since the last time.

        A folder that cannot be written to, a disk that is full, or a program that XLA cannot write costs the next start
        its time and no request its answer. Raises such an error with `must_keep` alone. One thread saves at a time.
        """
        with self._saving:
            with self._lock:
                unsaved, self._unsaved = self._unsaved, []
            for path, program in unsaved:
                try:
                    _save(path, program)
                except Exception as error:
                    if self._must_keep:
                        raise
                    logger.warning(
                        "compiled programs cannot be kept, and the next start compiles them again: %s: %s",
                        *(type(error).__name__, error),
                    )
                    return

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        if not path.exists():
            return None
        try:
            program, in_tree, out_tree = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(
                program, in_tree, out_tree, self._devices[0].client, self._devices
            )
        except Exception as error:  # whatever is wrong with the file, compiling again makes it right
            logger.warning("compiled program %s is damaged (%s): compiling again", path, error)
            return None


def _save(path: Path, program: jax.stages.Compiled) -> None:
    """Write through a temporary file, so that no reader ever sees half a program."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete_on_close=False) as file:
        file.write(pickle.dumps(serialize_executable.serialize(program)))
        file.close()
        os.replace(file.name, path)


def environment(mesh: Mesh) -> dict[str, str]:
    """What a program depends on besides its config and shapes, by what a person would call it."""
    device = mesh.devices.flat[0]
    ids = ",".join(f"{each.process_index}.{each.id}" for each in mesh.devices.flat)
    options = ("jax_disable_most_optimizations", "jax_default_matmul_precision", "jax_enable_x64")
    found = {
        "devices": f"{mesh.size} x {device.device_kind}",
        "device ids": ids,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "options of JAX": ", ".join(f"{name}={jax.config.values[name]}" for name in options),
        "source code of jaxpage": _code_digest(),
    }
    if device.platform == "cpu":
        return found | {"instruction sets": _host_cpu()}
    packages = ("triton", "jax-triton", "jax-cuda12-plugin", "jax-cuda13-plugin")
    return found | {package: _version_of(package) for package in packages}


@cache
def _code_digest() -> str:
    """Of every source file that a traced function may come from, and of what kernels were tuned to."""
    digest = hashlib.sha256()
    for package in (jaxpage.ops, jaxpage.models, jaxpage.runner, jaxpage.speculative):
        folder = Path(package.__path__[0])
        for source in sorted((*folder.rglob("*.py"), *folder.glob("tuned/*.json"))):
            digest.update(source.relative_to(folder).as_posix().encode() + source.read_bytes())
    return digest.hexdigest()


def _spec_of(leaf: Any) -> str:
    """How an argument is divided among the devices; whatever comes from the host is whole on each."""
    sharding = getattr(leaf, "sharding", None)
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else ""


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


@cache
def _host_cpu() -> str:
    """The instruction sets of this machine: code compiled for one CPU may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
