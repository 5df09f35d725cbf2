"""Compiles the kernels, as a step would launch them, to machine code of sm_80 and sm_90, and prints what each needs.

A process of its own: Triton compiles or interprets, as it was imported.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxpage.ops.attention import paged_triton
from jaxpage.ops.attention.launch import GPU
from jaxpage.ops.triton_call import backend_options

GPUS = tuple(GPU(num_sms, capability) for num_sms, capability in ((108, 80), (132, 90), (148, 100)))
ASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "float8_e4m3fn": "fp8e4nv"}
DECODE, MIXED, DRAFTS = (8, 8, 1), (512, 64, 512), (32, 8, 4)
"""num_tokens, num_rows and max_query_len."""


def calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every kernel call to compile, and a name for it: a step's shape, head_dim and what is special."""
    recorded: list[dict[str, Any]] = []

    def record(kernel: Any, args: Sequence[Any], *, out_type: Any, **launch: Any) -> Any:
        recorded.append({"kernel": kernel, "args": args, "out_type": out_type, **launch})
        return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), out_type)

    paged_triton.triton_call = record
    shape = jax.ShapeDtypeStruct
    int32, bfloat16 = partial(shape, dtype=jnp.int32), partial(shape, dtype=jnp.bfloat16)
    for gpu in GPUS:
        for step, head_dim, group, options, kv_dtype in (
            (DECODE, 128, 4, {}, jnp.bfloat16),
            (MIXED, 128, 4, {"window": 4096, "softcap": 50.0}, jnp.bfloat16),
            (MIXED, 256, 4, {"window": 512}, jnp.bfloat16),
            (DRAFTS, 64, 3, {"sinks": shape((24,), jnp.float32)}, jnp.bfloat16),
            (MIXED, 80, 1, {"chunk": 8192}, jnp.bfloat16),
            (MIXED, 128, 8, {"kv_scales": shape((2, 8), jnp.float32)}, jnp.float8_e4m3fn),
        ):
            if kv_dtype != jnp.bfloat16 and gpu.compute_capability < 89:
                continue  # no such numbers
            num_tokens, num_rows, max_query_len = step
            recorded.clear()
            lengths = {"query_start": int32((num_rows + 1,)), "query_lens": int32((num_rows,))}
            statics = {name: value for name, value in options.items() if not hasattr(value, "shape")}
            jax.eval_shape(
                partial(
                    paged_triton.paged_attention_triton, max_query_len=max_query_len, scale=0.1, gpu=gpu, **statics
                ),
                bfloat16((num_tokens, 8 * group, head_dim)),
                shape((1024, 2, 16, 8, head_dim), kv_dtype),
                block_tables=int32((num_rows, 512)),
                kv_lens=int32((num_rows,)),
                **lengths,
                **{name: value for name, value in options.items() if name not in statics},
            )
            for call in recorded:
                rows = call["constants"].get("BLOCK_M")
                part = "reduced" if rows is None else f"{rows} rows"
                yield f"sm_{gpu.compute_capability} {step} x {head_dim} {', '.join(options)}, {part}", call


def compile_call(call: dict[str, Any]) -> dict[str, Any]:
    """Registers, spilled bytes and shared memory; the instructions that multiply."""
    constants = dict(call["constants"])
    operands = iter([*call["args"], *jax.tree.leaves(call["out_type"])])
    signature, attributes = {}, {}
    for index, parameter in enumerate(call["kernel"].params):
        operand = None if parameter.name in constants else next(operands)
        if operand is None:
            signature[parameter.name] = "constexpr"
            constants.setdefault(parameter.name, None)
        elif isinstance(operand, int):
            signature[parameter.name] = "i32"
        else:
            signature[parameter.name] = "*" + TYPES[operand.dtype.name]
            attributes[(index,)] = [["tt.divisibility", 16]]  # as jax-triton says
    arch = call["gpu"].compute_capability
    compiled = triton.compile(
        ASTSource(call["kernel"], signature, constants, attributes),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": call["num_warps"], "num_stages": call.get("num_stages", 3), **backend_options(arch)},
    )
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        arguments = ("-v", f"-arch=sm_{arch}{'a' if arch >= 90 else ''}", source, "-o", source.with_suffix(".cubin"))
        assembler = ASSEMBLER.with_name("ptxas-blackwell") if arch >= 100 else ASSEMBLER
        log = subprocess.run([assembler, *arguments], check=True, capture_output=True, text=True).stderr
    return read_machine_code(compiled, arch) | {
        "registers": int(re.findall(r"Used (\d+) registers", log)[0]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", log)[0]),
        "shared": compiled.metadata.shared,
        "products": sorted(set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)", ptx))),
        "num_warps": call["num_warps"],
    }


def read_machine_code(compiled: Any, arch: int) -> dict[str, Any]:
    """The products of each loop's body in a warp, and how many copies it lets be on their way when it waits for some.

    "waits" counts groups of copies: a tile of keys is one, and a tile of values.
    """
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        text = subprocess.run(
            [ASSEMBLER.with_name("nvdisasm"), "-c", binary], check=True, capture_output=True, text=True
        )
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in text.stdout.splitlines():
        if label := re.match(r"\.(L_x_\d+):", line.strip()):
            labels[label.group(1)] = len(instructions)
        elif instruction := re.match(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line.strip()):
            instructions.append(instruction.group(1))
            back = re.search(r"BRA.*\(\.(L_x_\d+)\)", instructions[-1])
            if back and labels.get(back.group(1), len(instructions)) < len(instructions) - 1:
                loops.append(instructions[labels[back.group(1)] :])
    bodies = [body for body in loops if any(re.search(r"H?G?MMA", it) for it in body)]
    return {
        "loops": [
            {
                "products": sum(bool(re.search(r"\bHG?MMA", it)) for it in body),
                "copies": sum("LDGSTS" in it for it in body),
                "waits": [int(it.split(", ")[-1], 16) for it in body if it.startswith("DEPBAR.LE SB0")],
                "instructions": len(body),
            }
            for body in bodies
        ]
    }


if __name__ == "__main__":
    print(json.dumps({name: compile_call(call) for name, call in calls()}))
