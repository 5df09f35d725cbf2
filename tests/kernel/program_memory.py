"""Compiles the programs of several engines that take most memory, and prints what each takes, as JSON.

A process of its own, as `gpu_programs.py`. The engines have what a GPU's have by default: 256 rows, 2,048 tokens.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from gpu_programs import LARGE, SMALL, SPECULATIVE, Structure, plan_of

from jaxpage.aot.facts import facts_of
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.engine_plan import EnginePlan, bytes_per_device
from jaxpage.runner.programs.fork import FORK
from jaxpage.runner.programs.program import compile_program
from jaxpage.runner.programs.sample import SAMPLE, Draws
from jaxpage.runner.programs.score import SCORE
from jaxpage.runner.programs.step import STEP
from jaxpage.runner.resolve import program_bytes, scratch_bytes

# Of the first, a step takes most, of the second a fork, of the others a draw.
WIDE = LARGE | {"vocab_size": 8192, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
DEEP = SMALL | {"num_hidden_layers": 32}
GEMMA = LARGE | {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262144,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "large x 8": (LARGE, {}, 8),
    "wide x 1": (WIDE, {}, 1),
    "deep x 1": (DEEP, {}, 1),
    "gemma x 1": (GEMMA, {}, 1),
    "small x 1, drafts": (SMALL, {"speculative_config": SPECULATIVE}, 1),
}


def largest_programs(it: EnginePlan) -> Iterator[tuple[str, Any]]:
    """Those that could take the most, each by a name and what compiles it."""
    num_rows, num_draws = it.config.max_num_seqs, 1 + it.config.max_drafts
    buckets = {max(it.buckets), max(bucket for bucket in it.buckets if bucket.max_query_len == 1)}
    if num_draws > 1:
        buckets.add(Bucket(num_rows * num_draws, num_rows, num_draws))
    assert buckets <= set(it.buckets)
    for bucket in buckets:
        yield STEP.title(bucket), partial(compile_program, STEP, it, bucket)
    for kind in (SamplerKind.FILTERED, SamplerKind.ANY):
        variant = Draws(kind, num_rows, num_draws)
        yield SAMPLE.title(variant), partial(compile_program, SAMPLE, it, variant)
    yield FORK.name, partial(compile_program, FORK, it, None)
    yield SCORE.name, partial(compile_program, SCORE, it, None)


def memory_of(compiles: Callable[[], jax.stages.Compiled]) -> dict[str, int]:
    program = compiles()
    facts = facts_of(program)
    return {"scratch": facts.scratch_bytes, "result": facts.result_bytes}


def bounds_of(it: EnginePlan) -> dict[str, int]:
    batch = bytes_per_device([it.shapes["state"], it.shapes["hidden"]])
    arguments = it.config, it.model, it.layout, batch
    return {"scratch": scratch_bytes(*arguments), "programs": program_bytes(*arguments)}


if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool, Structure():
        its = {name: plan_of(hf, options, "h200", num_gpus) for name, (hf, options, num_gpus) in ENGINES.items()}
        waiting = {
            name: {title: pool.submit(memory_of, compiles) for title, compiles in largest_programs(it)}
            for name, it in its.items()
        }
        found = {
            name: {
                "bounds": bounds_of(its[name]),
                "programs": {title: program.result() for title, program in programs.items()},
            }
            for name, programs in waiting.items()
        }
    print(json.dumps(found))
