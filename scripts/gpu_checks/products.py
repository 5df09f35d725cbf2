"""The matrix products of Llama-3.1-8B, one by one, and which kernel XLA made of each."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from gpu_checks.child import Context, Row
from gpu_checks.device import bytes_per_second, flops_per_second, l2_bytes
from gpu_checks.timing import num_inside, num_sets, time_program
from jaxpage.runner.buckets import choose_bucket, make_buckets

SHARES = {1: 0.8, 32: 0.8, 256: 0.65, 2048: 0.75}
"""Of a peak, what a product of so many rows, or fewer than the next, should reach."""
LAUNCH_SECONDS = 2e-6


@dataclass(frozen=True)
class Product:
    """A kernel of a compiled program that multiplies matrices."""

    name: str
    shape: str
    """What it gives, as XLA writes it."""
    config: str
    """Of Triton's kernel: tile, stages, warps; of a library's: which."""


def products(context: Context) -> Iterator[Row]:
    """Each shape at growing numbers of rows. Its weights take turns, so that none of them is in the L2 cache."""
    model = context.sizes.model
    embed, ffn, heads = model["hidden_size"], model["intermediate_size"], model["num_attention_heads"]
    head_dim = model.get("head_dim", embed // heads)
    qkv = (heads + 2 * model["num_key_value_heads"]) * head_dim
    shapes = {
        "qkv": (embed, qkv),
        "o": (heads * head_dim, embed),
        "gate and up": (embed, 2 * ffn),
        "down": (ffn, embed),
        "logits": (embed, model["vocab_size"]),
    }
    most = max(context.sizes.batches)
    table = make_buckets(most, max(context.sizes.token_budget, most))
    for name, (inner, outer) in shapes.items():
        for rows in context.sizes.product_rows:
            if name == "logits" and rows > max(context.sizes.batches):
                continue  # a step draws from so many rows, and no more
            padded = choose_bucket(table, rows, rows, rows if rows > most else 1).num_tokens  # as in an engine
            yield {"case": f"{name} {rows} x {inner} x {outer}", "rows": padded, **_time(context, padded, inner, outer)}
            if not context.has_time:
                raise TimeoutError("there was no time for the other shapes")


def _time(context: Context, rows: int, inner: int, outer: int) -> Row:
    weight_bytes, flops = 2 * inner * outer, 2 * rows * inner * outer
    moved = weight_bytes + 2 * rows * (inner + outer)
    expected = max(moved / bytes_per_second(), flops / flops_per_second())
    inside = min(num_inside(expected, context.sizes.most_inside), max(1, 2**31 // (2 * rows * outer)))
    keys = jax.random.split(jax.random.key(rows), 1 + num_sets(weight_bytes, l2_bytes(), inside))
    x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    weights = [jax.random.normal(key, (inner, outer), jnp.bfloat16) for key in keys[1:]]

    def program(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        """One product after the other: each waits for the one before, or XLA would join them."""
        given = []
        for run in range(inside):
            given.append(x @ weights[run % len(weights)])
            x, given[-1] = jax.lax.optimization_barrier((x, given[-1]))
        return given

    compiled = jax.jit(program).lower(x, *weights).compile()
    timing = time_program(compiled, (x, *weights), inside, context.sizes.seconds_per_case)
    found = products_of(compiled.as_text() or "")
    row = {"seconds": timing.seconds, "bytes": moved, "flops": flops, "share": _share(rows), "spread": timing.spread}
    return row | {"fixed": LAUNCH_SECONDS, "config": found[0].config if found else "no kernel for products"}


def _share(rows: int) -> float:
    return SHARES[max((most for most in SHARES if most <= rows), default=1)]


def products_of(text: str) -> list[Product]:
    """Those of a compiled program, read from XLA's text."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?) (?:fusion|custom-call)\(", line)
        if match and (config := _config_of(line)):
            found.append(Product(match.group(1), re.sub(r"\{[^}]*\}", "", match.group(2)), config))
    return found


def _config_of(line: str) -> str | None:
    if library := re.search(r'custom_call_target="(__cublas\$[^"]*|__cudnn\$[^"]*)"', line):
        algorithm = re.search(r'"selected_algorithm":"?(\d+)', line)
        return library.group(1) + (f" algorithm {algorithm.group(1)}" if algorithm else "")
    kind = re.search(r'"kind":"(__triton_gemm|__triton_nested_gemm_fusion|__cublas_fusion|__cudnn\$fusion)"', line)
    if kind is None:
        return None
    for name in ("triton_gemm_config", "block_level_fusion_config"):
        if (at := line.find(f'"{name}":')) >= 0:
            config: dict[str, Any] = json.JSONDecoder().raw_decode(line, at + len(name) + 3)[0]
            # What is off, is not told.
            return " ".join(
                f"{key} {_short(value)}" for key, value in sorted(config.items()) if value not in (0, False)
            )
    return kind.group(1)


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")).replace('"', "")
