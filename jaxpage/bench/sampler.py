"""Bench of the sampler: what its options cost a batch that generates, and the sampler alone on a large vocabulary."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from jaxpage.llm import LLM
from jaxpage.sampling_params import SamplingParams

Result = dict[str, float | int | str]

_LARGE_VOCAB = 262_144
_FILTERS = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}


def sampler(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Milliseconds per step with every option in use, against a plain draw; and of the sampler alone.

    The kinds of requests take turns, so that a machine that slows down slows them all. A step's time is the mean gap
    between two tokens, of the median run.
    """
    sized = {"max_model_len": input_len + output_len, "max_num_seqs": num_prompts, "background_compile": False}
    with LLM(**(sized | options)) as llm:
        vocab_size = llm.tokenizer.vocab_size
        rng = random.Random(0)
        prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
        plain = SamplingParams(seed=1, max_tokens=output_len, ignore_eos=True)
        filtered = msgspec.structs.replace(plain, **_FILTERS)
        everything = msgspec.structs.replace(
            filtered,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.2,
            logit_bias={rng.randrange(vocab_size): rng.uniform(-2, 2) for _ in range(100)},
            allowed_token_ids=tuple(range(vocab_size // 2)),
            bad_words=("sampler", "a phrase of several words"),
            min_tokens=output_len,
            stop_token_ids=(5, 7),
        )
        kinds = {
            "greedy": msgspec.structs.replace(plain, temperature=0),
            "plain": plain,
            "filtered": filtered,
            "everything": everything,
            "everything_and_logprobs": msgspec.structs.replace(everything, logprobs=20),
        }
        llm.generate(prompts, kinds["plain"], use_tqdm=False)  # the first run pays for page faults and caches
        step_ms: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(repeat):
            for name, kind in kinds.items():
                step_ms[name].append(_step_ms(llm, prompts, kind))
    median = {name: statistics.median(found) for name, found in step_ms.items()}
    return {
        "num_prompts": num_prompts,
        "output_len": output_len,
        **{f"{name}_step_ms": found for name, found in median.items()},
        "everything_over_plain": median["everything"] / median["plain"],
        **_alone(num_prompts, _LARGE_VOCAB, max(repeat, 3)),
    }


def _step_ms(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    first = max(output.metrics.first_token_time or 0.0 for output in outputs)
    last = min(output.metrics.finished_time or 0.0 for output in outputs)
    return 1e3 * (last - first) / (params.max_tokens or 1)


def _alone(num_rows: int, vocab_size: int, repeat: int) -> Result:
    """The sampler's program on random logits with top-k, top-p and min-p, and what sorting the same logits takes."""
    import jax
    import jax.numpy as jnp

    from jaxpage.ops.sampling.sampling import SamplingState
    from jaxpage.runner.programs.sample import compile_sampler

    logits = jax.random.normal(jax.random.key(0), (num_rows, vocab_size)) * 3

    def state(*, filters: bool) -> SamplingState:
        def column(value: float, off: float, dtype: Any) -> jax.Array:
            return jnp.full(num_rows, value if filters else off, dtype)

        return SamplingState(
            temperature=jnp.ones(num_rows, jnp.float32),
            top_k=column(_FILTERS["top_k"], 0, jnp.int32),
            top_p=column(_FILTERS["top_p"], 1, jnp.float32),
            min_p=column(_FILTERS["min_p"], 0, jnp.float32),
            seed=jnp.zeros((num_rows, 2), jnp.uint32),
            position=jnp.arange(num_rows, dtype=jnp.int32),
        )

    program = compile_sampler(logits, state(filters=True))
    works: dict[str, Callable[[], jax.Array]] = {
        "draw": lambda: program(logits, state(filters=False)),
        "filtered_draw": lambda: program(logits, state(filters=True)),
        "sort": lambda: jnp.sort(logits, axis=-1),
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(1 + repeat):
        for name, work in works.items():
            started = time.perf_counter()
            work().block_until_ready()
            if turn:  # the first one compiles
                found[name].append(1e3 * (time.perf_counter() - started))
    medians = {f"large_vocab_{name}_ms": statistics.median(ms) for name, ms in found.items()}
    return {"large_vocab": vocab_size, **medians}
