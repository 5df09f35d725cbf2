"""GPUs that programs can be compiled for where there is none: XLA is told what they are like."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxpage.engine.gpu_memory import POOL_SHARE, share_of_jax
from jaxpage.ops.attention.paged import HEADS_AXIS
from jaxpage.ops.gemm_launch import GemmLaunch


@dataclass(frozen=True)
class GPUTarget:
    """A GPU by its data sheet."""

    name: str
    """As JAX calls it there (`device_kind`)."""
    compute_capability: int
    """Major version; the minor is 0."""
    num_sms: int
    fpus_per_sm: int
    clock_ghz: float
    shared_bytes: int
    """Shared memory of a multiprocessor."""
    l2_bytes: int
    memory_bytes: int
    bytes_per_second: float
    """Peak memory bandwidth."""
    flops_per_second: float
    """Peak dense bfloat16."""

    @property
    def pool_bytes(self) -> int:
        """What weights, KV cache and scratch may take: JAX's share in an engine's process."""
        return int(POOL_SHARE * self.memory_bytes)


TARGETS = {
    "b200": GPUTarget(
        name="NVIDIA B200",
        compute_capability=10,
        num_sms=148,
        fpus_per_sm=128,
        clock_ghz=1.965,
        shared_bytes=233472,
        l2_bytes=132120576,
        memory_bytes=190_000_000_000,
        bytes_per_second=8e12,
        flops_per_second=2.25e15,
    ),
    "h200": GPUTarget(
        name="NVIDIA H200",
        compute_capability=9,
        num_sms=132,
        fpus_per_sm=128,
        clock_ghz=1.98,
        shared_bytes=233472,
        l2_bytes=62914560,
        memory_bytes=150_000_000_000,
        bytes_per_second=4.8e12,
        flops_per_second=989e12,
    ),
    "h100": GPUTarget(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=9,
        num_sms=132,
        fpus_per_sm=128,
        clock_ghz=1.98,
        shared_bytes=233472,
        l2_bytes=52428800,
        memory_bytes=85_000_000_000,
        bytes_per_second=3.35e12,
        flops_per_second=989e12,
    ),
    "a100": GPUTarget(
        name="NVIDIA A100-SXM4-80GB",
        compute_capability=8,
        num_sms=108,
        fpus_per_sm=64,
        clock_ghz=1.41,
        shared_bytes=167936,
        l2_bytes=41943040,
        memory_bytes=85_000_000_000,
        bytes_per_second=2.039e12,
        flops_per_second=312e12,
    ),
}

# XLA's GpuTargetConfigProto.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  threads_per_core_limit: 2048  fpus_per_core: {it.fpus_per_sm}  registers_per_core_limit: 65536
  registers_per_block_limit: 65536  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  core_count: {it.num_sms}  shared_memory_per_core: {it.shared_bytes}
  shared_memory_per_block_optin: {shared_per_block}  memory_bandwidth: {bandwidth}  l2_cache_size: {it.l2_bytes}
  clock_rate_ghz: {it.clock_ghz}  device_memory_size: {it.memory_bytes}
  cuda_compute_capability {{ major: {it.compute_capability} minor: 0 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{it.name}"
"""


def described_mesh(target: GPUTarget, num_devices: int) -> Mesh:
    """So many of these GPUs in one machine: programs can be compiled for them, and not run. See `gpu_compiler`."""
    name = f"1x1x{num_devices}"
    description = _DESCRIPTION.format(
        it=target, bandwidth=int(target.bytes_per_second), shared_per_block=target.shared_bytes - 1024
    )
    topology = topologies.get_topology_desc(name, "cuda", topology=name, target_config=description)
    return Mesh(np.array(topology.devices), (HEADS_AXIS,))


def share_of(mesh: Mesh) -> str:
    """What an engine has of the memory of each GPU, in words; nothing for CPUs."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return ""
    return str(POOL_SHARE) if is_described(device) else share_of_jax()


_IN_GRAPHS = ("FUSION", "CUBLAS", "CUBLASLT", "CUDNN", "CUSTOM_CALL", "DYNAMIC_SLICE_FUSION", "COLLECTIVES")
"""What XLA puts into CUDA graphs: what it does by itself (jax 0.11.2), and collectives."""
_ON_GPUS = {
    # Without collectives in it, a step over several GPUs is cut in two at each of them: 139 launches for 32 layers, and
    # 2 with them. NCCL is captured anew in every step, as XLA wants all devices to do that together.
    "xla_gpu_enable_command_buffer": ",".join(_IN_GRAPHS),
    # XLA takes four fifths of a GPU for all of it, and computes products twice to stay below; an engine has 0.92.
    "xla_disable_hlo_passes": "rematerialization",
    # Where there is NVLink, XLA has kernels of its own for small sums, which it cannot put into graphs (jax 0.11.2).
    "xla_gpu_experimental_use_collective_kernels": "",
}
"""For GPUs here as for those that are described."""


def compiler_options(device: jax.Device, launches: Sequence[GemmLaunch] = (), num_tokens: int = 0) -> dict[str, Any]:
    """What XLA is told beside its flags when it compiles for a device.

    launches: how to cut the program's matrix products, which have `num_tokens` rows; best first. Only a device that is
    not here needs to be told: on one that is, XLA times what there is to choose from.
    """
    if device.platform == "cpu":
        return {}
    if not is_described(device):
        return dict(_ON_GPUS)
    options: dict[str, Any] = _ON_GPUS | {
        # It would compile every fusion once more to time it, and there is nothing to time it on.
        "xla_gpu_experimental_enable_fusion_autotuner": False,
        "xla_gpu_cuda_data_dir": _toolkit().name,
    }
    if launches:
        options["xla_gpu_gemm_autotuner_override_file"] = _override_file(
            "".join(f"config {{ {launch.override(num_tokens)} }}\n" for launch in launches)
        )
        if not launches[0].splits_sums:
            options["xla_gpu_experimental_force_split_k"] = 1
    return options


def is_described(device: jax.Device) -> bool:
    """Whether a device is not on this machine, so that programs are compiled for it and not run."""
    runtime: str = device.client.runtime_type
    return runtime == "compile_only_runtime"


@cache
def _override_file(configs: str) -> str:
    """A file that XLA reads them from."""
    name = hashlib.sha256(configs.encode()).hexdigest()[:16]
    file = Path(_toolkit().name, f"gemms-{name}.txt")
    file.write_text(configs, "utf-8")
    return str(file)


@cache
def _toolkit() -> tempfile.TemporaryDirectory[str]:
    """What XLA needs of the CUDA toolkit, where it looks for it: Triton brings both, so that no machine needs CUDA."""
    import triton

    brought = Path(triton.__file__).parent / "backends/nvidia"
    folder = tempfile.TemporaryDirectory(prefix="jaxpage-cuda-")
    for wanted, source in (("bin/ptxas", "bin/ptxas"), ("nvvm/libdevice/libdevice.10.bc", "lib/libdevice.10.bc")):
        link = Path(folder.name, wanted)
        link.parent.mkdir(parents=True)
        link.symlink_to(brought / source)
    # Where XLA asks for the assembler's version, it looks nowhere else.
    os.environ["PATH"] = os.pathsep.join((f"{folder.name}/bin", os.environ.get("PATH", os.defpath)))
    return folder
