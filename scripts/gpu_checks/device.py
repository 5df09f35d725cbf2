"""The device that parts run on, and the kernels for it."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from gpu_checks.child import Context
from jaxpage.aot.targets import TARGETS, GPUTarget
from jaxpage.ops.attention.kv_write import rotate_and_write_kv
from jaxpage.ops.attention.launch import GPU, AttentionLaunch
from jaxpage.ops.attention.paged_xla import paged_attention_xla


def gpu_of(context: Context) -> GPU | None:
    """The GPU that kernels are compiled for; None in a dry run, where plain XLA stands in for them.

    Raises `RuntimeError` where JAX finds no GPU.
    """
    device = jax.devices()[0]
    if context.is_dry:
        return None
    if device.platform != "gpu":
        raise RuntimeError(f"JAX finds {device.device_kind} and no GPU: is its CUDA plugin installed?")
    return GPU(device.core_count, int(device.compute_capability.replace(".", "")))


def target_name() -> str | None:
    """What `jaxpage compile --target` calls this GPU, if it knows it."""
    kind = jax.devices()[0].device_kind
    return next((name for name, target in TARGETS.items() if target.name == kind), None)


def data_sheet() -> GPUTarget | None:
    """Of this GPU, if there is one."""
    name = target_name()
    return None if name is None else TARGETS[name]


def l2_bytes() -> int:
    """Of this GPU, or enough for any."""
    sheet = data_sheet()
    return 2**26 if sheet is None else sheet.l2_bytes


def bytes_per_second() -> float:
    """By the data sheet, or about what a data center's GPU has: to choose how often something runs, no more."""
    sheet = data_sheet()
    return 2e12 if sheet is None else sheet.bytes_per_second


def flops_per_second() -> float:
    """The same of products."""
    sheet = data_sheet()
    return 300e12 if sheet is None else sheet.flops_per_second


def attention_of(gpu: GPU | None, launch: AttentionLaunch | None = None) -> Callable[..., jax.Array]:
    """The kernel that an engine runs here, in the launch that it would choose, or in another."""
    if gpu is None:
        return paged_attention_xla
    from jaxpage.ops.attention.paged_triton import paged_attention_triton

    return functools.partial(paged_attention_triton, gpu=gpu, launch=launch)


def kv_write_of(gpu: GPU | None) -> Callable[..., Any]:
    """The same of what writes keys and values."""
    if gpu is None:
        return rotate_and_write_kv
    from jaxpage.ops.attention.kv_write_triton import rotate_and_write_kv_triton

    return functools.partial(rotate_and_write_kv_triton, gpu=gpu)
