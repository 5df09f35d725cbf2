"""Runs Triton kernels on the CPU: Triton's interpreter, over numpy instead of torch."""

from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from triton import language as tl
from triton.runtime import interpreter

NUMPY_TYPES = {"bf16": ml_dtypes.bfloat16, "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2}
"""By Triton's name, those that numpy lacks."""


class HostTensor:
    """An array with the tensor methods that Triton's interpreter calls; kernels write it in place."""

    def __init__(self, array: np.ndarray):
        self.array = array
        # Triton's names of types are numpy's, but for 8-bit floats.
        self.dtype = {"float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}.get(array.dtype.name, array.dtype.name)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> "HostTensor":
        return self

    def cpu(self) -> "HostTensor":
        return self

    def new_empty(self, *_: object, **__: object) -> "HostTensor":
        return self

    def set_(self, *_: object) -> "HostTensor":
        return self

    def copy_(self, _: object) -> None:
        pass


def _floats(handle: Any) -> np.ndarray:
    """What the interpreter holds; types that numpy lacks it keeps as integers."""
    return handle.data.view(NUMPY_TYPES.get(handle.dtype.scalar.name, handle.data.dtype))


def _dot(_: object, a: Any, b: Any, accumulator: Any, *__: object) -> Any:
    """A product in float32; the interpreter's own multiplies the integers that it keeps bfloat16 as."""
    product = _floats(a).astype(np.float32) @ _floats(b).astype(np.float32)
    return interpreter.TensorHandle(product + accumulator.data, accumulator.dtype.scalar)


def _convert(data: np.ndarray, source: Any, target: Any, _: object) -> np.ndarray:
    """Rounds to nearest as a GPU does; the interpreter's own cuts off, or loses the carry into the exponent."""
    of_source, of_target = (NUMPY_TYPES.get(of.name, interpreter._get_np_dtype(of)) for of in (source, target))
    return data.view(of_source).astype(of_target)


def interpret(
    kernel: Any,
    args: Sequence[Any],
    *,
    out_type: Any,
    grid: tuple[int, ...],
    constants: dict[str, Any],
    **_: object,
) -> Any:
    """Stands in for `jaxpage.ops.triton_call.triton_call`. Outputs are NaN before the kernel writes them."""
    types, tree = jax.tree.flatten(out_type)
    outputs = [np.full(of.shape, np.nan, of.dtype) for of in types]
    inputs = [np.array(arg[...] if isinstance(arg, jax.Ref) else arg) if hasattr(arg, "shape") else arg for arg in args]
    wrapped = [HostTensor(arg) if isinstance(arg, np.ndarray) else arg for arg in inputs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_convert_float", _convert)
        # Triton patches its language in every call of every function, most of a kernel's time: once is enough.
        scopes = [interpreter._patch_lang(function) for function in (tl.zeros.fn, kernel.fn)]
        patch.setattr(interpreter, "_patch_lang", lambda _: interpreter._LangPatchScope())
        try:
            kernel[grid](*wrapped, *map(HostTensor, outputs), **constants)
        finally:
            for scope in reversed(scopes):
                scope.restore()
    for arg, array in zip(args, inputs, strict=True):
        if isinstance(arg, jax.Ref):
            arg[...] = array
    return jax.tree.unflatten(tree, outputs)
