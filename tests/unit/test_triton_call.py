"""The door to jax-triton: its rule of dead-code elimination, called as each JAX calls it."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import triton
import triton.language as tl
from jax.interpreters import partial_eval
from jax_triton.triton_lib import triton_kernel_call_p
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from jaxpage.ops.attention.launch import GPU
from jaxpage.ops.triton_call import backend_options, of_any_jax, triton_call

EQUATION = SimpleNamespace(invars=["x", "y"])


def rule_of_two(used_outs: list[bool], eqn: Any) -> tuple[list[bool], Any]:
    return used_outs * len(eqn.invars), eqn


@pytest.mark.parametrize("arguments", [([True], EQUATION), ([True], [True, False], EQUATION)], ids=["0.11", "0.12"])
@pytest.mark.parametrize("rule", [of_any_jax(rule_of_two), partial_eval.dce_rules[triton_kernel_call_p]])
def test_a_rule_of_two_takes_the_arguments_of_either_jax(rule: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """jax-triton's own as well, as this package leaves it: every argument of a kernel is used."""
    assert rule(*arguments) == ([True, True], EQUATION)


def test_a_rule_of_three_arguments_is_left_alone() -> None:
    def rule(used_outs: list[bool], live_ins: list[bool], eqn: Any) -> tuple[list[bool], Any]:
        return live_ins, eqn

    assert of_any_jax(rule) is rule


@JITFunction  # whatever other tests have told `triton.jit` to make of it
def _kernel(x_ptr, out_ptr, N: tl.constexpr):  # noqa: N803
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def test_dead_code_goes_from_around_a_kernel_and_the_kernel_stays() -> None:
    def traced(x: jax.Array, dead: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        copied = triton_call(_kernel, (x,), out_type=out, grid=(1,), gpu=GPU(132, 90), num_warps=4, constants={"N": 16})
        return copied, dead + 1

    x = jnp.zeros(16)
    whole = jax.make_jaxpr(traced)(x, x).jaxpr
    left, used = partial_eval.dce_jaxpr(whole, [True, False])
    assert used == [True, False]
    assert [eqn.primitive.name for eqn in left.eqns] == [triton_kernel_call_p.name]


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 103, 120, 121])
def test_a_gpu_gets_ptx_that_knows_it_and_that_the_assembler_of_cuda_12_9_takes(
    capability: int, tmp_path: Path
) -> None:
    compiled = triton.compile(
        ASTSource(_kernel, {"x_ptr": "*fp32", "out_ptr": "*fp32", "N": "constexpr"}, {"N": 16}),
        target=GPUTarget("cuda", capability, 32),
        options=backend_options(capability),
    )
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    target = re.findall(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assert target == [f"sm_{capability}{'a' if capability >= 90 else ''}"]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    subprocess.run([assembler, f"-arch={target[0]}", source, "-o", tmp_path / "kernel.cubin"], check=True)
    assert int("".join(re.findall(r"^\.version (\d)\.(\d)", compiled.asm["ptx"], re.MULTILINE)[0])) <= 88
