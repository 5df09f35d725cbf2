"""The one door to jax-triton: calls a Triton kernel on JAX arrays."""

from collections.abc import Sequence
from typing import Any

from triton.backends.nvidia import driver

from jaxpage.ops.launch import GPU

if not hasattr(driver, "TMA_TF32"):
    # Triton 3.6, which GPU machines have: jax-triton asks for the name, for a kind of argument that is not used here.
    driver.TMA_TF32 = 11
import jax_triton

BACKEND_OPTIONS = {
    "enable_fp_fusion": True,  # Triton 3.9 asks for a decision
    "ptx_version": 84,  # of CUDA 12.4; by default it is that of the newest assembler in Triton, which XLA does not use
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
        backend_options=BACKEND_OPTIONS,
        **constants,
    )
