"""The devices of an engine: a mesh of one axis, over which heads, MLPs and vocabulary are divided."""

import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.ops.attention.paged import HEADS_AXIS

logger = logging.getLogger(__name__)


def join_processes(config: EngineConfig) -> None:
    """Find the other processes, if there are to be any. Must come before anything that looks for devices."""
    if config.num_processes == 1 or jax.distributed.is_initialized():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # for where all devices are CPUs
    logger.info("process %d of %d waits for the others", config.process_id, config.num_processes)
    jax.distributed.initialize(config.coordinator_address, config.num_processes, config.process_id)


def make_mesh(config: EngineConfig) -> Mesh:
    """The first devices of each process, equally many. Raises `ConfigError` that tells how many there are."""
    wanted = config.tensor_parallel_size // config.num_processes
    devices: list[jax.Device] = []
    for process in range(config.num_processes):
        found = jax.local_devices(process_index=process)
        if len(found) < wanted:
            where = f"process {process} of {config.num_processes}" if config.num_processes > 1 else "this machine"
            raise ConfigError(
                f"--tensor-parallel-size is {config.tensor_parallel_size}, and {where} has {len(found)} of the "
                f"{wanted} devices ({found[0].device_kind}) that this takes there: lower it, or add devices"
            )
        devices += found[:wanted]
    if config.tensor_parallel_size > 1:
        logger.info("the model is divided among %d devices (%s)", len(devices), devices[0].device_kind)
    return Mesh(np.array(devices), (HEADS_AXIS,))


def free_bytes(mesh: Mesh) -> int:
    """Memory that each device of the mesh has left, in every process."""
    local = list(mesh.local_devices)
    if local[0].platform == "cpu":
        free = available_host_memory() // len(local)
    else:
        stats = [device.memory_stats() for device in local]
        free = min(each["bytes_limit"] - each["bytes_in_use"] for each in stats)
    if jax.process_count() > 1:
        # JAX has no 64-bit integers unless it is told to: bytes would wrap.
        free = int(multihost_utils.process_allgather(np.int32(free >> 20)).min()) << 20
    return free


def send_back[T](arrays: T) -> T:
    """Let all arrays of a pytree start on their way to the host. Returns them at once.

    JAX takes this for a transfer in passing, which it is not: under `strict_shapes`, whatever else starts one fails.
    """
    with jax.transfer_guard_device_to_host("allow"):
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()
    return arrays


def available_host_memory() -> int:
    """Bytes that this process could use without swapping (Linux), within what its container may use.

    Raises `ConfigError` where nothing tells.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min([int(line.split()[1]) * 1024, *container_room()])
    raise ConfigError("/proc/meminfo does not say MemAvailable: set --num-blocks")


def container_room(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[int]:
    """Bytes that each control group around this process may still use, where it has a limit.

    What a group has read from files counts as used, and can be given back.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory
    """
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        version = _MEMORY_FILES[controllers == ""]
        mount = root / controllers
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            limit, used = (_number(folder / name) for name in version[:2])
            if limit is not None and used is not None:
                entries = (line.split() for line in _lines(folder / "memory.stat"))
                cached = next((int(size) for name, size in entries if name == version[2]), 0)
                yield max(limit - used + cached, 0)


_MEMORY_FILES = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
"""Limit, use, and the entry of memory.stat that can be given back; of control groups v1 and v2."""


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _number(file: Path) -> int | None:
    found = _lines(file)
    return int(found[0]) if found and found[0].isdigit() else None
