"""The one door to jax-triton: calls a Triton kernel on JAX arrays."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jax.interpreters import partial_eval
from triton.backends.nvidia import driver

from jaxpage.ops.attention.launch import GPU

if not hasattr(driver, "TMA_TF32"):
    # Triton 3.6, which GPU machines have: jax-triton asks for the name, for a kind of argument that is not used here.
    driver.TMA_TF32 = 11
import jax_triton
from jax_triton.triton_lib import triton_kernel_call_p

DeadCodeRule = Callable[..., tuple[list[bool], Any]]


def of_any_jax(rule: DeadCodeRule) -> DeadCodeRule:
    """A primitive's rule of dead-code elimination that takes JAX 0.11's arguments and JAX 0.12's, which are one more.

    JAX 0.11 calls `rule(used_outs, eqn)`, JAX 0.12 `rule(used_outs, live_ins, eqn)`, and jax-triton 0.4.1 knows the
    former alone. A rule that takes three arguments is given back as it is.
    """
    if len(inspect.signature(rule).parameters) != 2:
        return rule
    return lambda used_outs, *rest: rule(used_outs, rest[-1])


partial_eval.dce_rules[triton_kernel_call_p] = of_any_jax(partial_eval.dce_rules[triton_kernel_call_p])

_PTX_VERSIONS = {0: 84, 100: 86, 103: 88, 110: 90, 120: 87, 121: 88}
"""By the least compute capability that it holds for: 84, of CUDA 12.4, or the first that knows the GPU.

No newer one, as the assembler is XLA's or the driver's: left to itself, Triton writes for the newest in its package.
https://docs.nvidia.com/cuda/parallel-thread-execution/#release-notes
"""


def backend_options(compute_capability: int) -> dict[str, Any]:
    """What Triton is told about a GPU besides the launch."""
    known = max(since for since in _PTX_VERSIONS if since <= compute_capability)
    return {
        "enable_fp_fusion": True,  # Triton 3.9 asks for a decision
        "ptx_version": _PTX_VERSIONS[known],
    }


def triton_call(
    kernel: Any,
    args: Sequence[Any],
    *,
    out_type: Any,
    grid: tuple[int, ...],
    gpu: GPU,
    num_warps: int,
    num_stages: int = 3,
    constants: dict[str, Any],
) -> Any:
    """Run `kernel` over `grid` and return what `out_type` describes; `constants` are its compile-time arguments.

    args: arrays, numbers, and `jax.Ref`s that the kernel writes in place.
    """
    return jax_triton.triton_call(
        *args,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        # Given, so that programs can be compiled for a GPU that this machine has not.
        compute_capability=gpu.compute_capability,
        backend_options=backend_options(gpu.compute_capability),
        **constants,
    )
