"""What speculation gains on texts that repeat themselves: the same requests without and with it."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from jaxpage.llm import LLM
from jaxpage.sampling_params import SamplingParams

Result = dict[str, float | int | str]
DEFAULT = {"method": "ngram", "num_speculative_tokens": 5}
_REPEATS = 4
"""Times that a prompt says the same."""


def speculation(
    options: dict[str, Any],
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    repeat: int,
    make_llm: Callable[[dict[str, Any], int, int], LLM],
) -> Result:
    """Seconds per token of prompts that say the same again and again, one batch of them at a time, off and on."""
    seconds: list[float] = []
    outputs: list[list[list[int]]] = []
    given = options.get("speculative_config") or DEFAULT
    for config in (None, given):
        with make_llm(options | {"speculative_config": config}, input_len + output_len, num_prompts) as llm:
            params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
            prompts = _prompts(num_prompts, input_len, llm.tokenizer.vocab_size)
            llm.generate(prompts[:1], params, use_tqdm=False)
            runs = []
            for _ in range(repeat):
                started = time.perf_counter()
                found = llm.generate(prompts, params, use_tqdm=False)
                runs.append(time.perf_counter() - started)
            seconds.append(statistics.median(runs))
            outputs.append([output.outputs[0].token_ids for output in found])
            stats = llm.stats
    off, on = seconds
    return {
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "off_tokens_per_s": num_prompts * output_len / off,
        "on_tokens_per_s": num_prompts * output_len / on,
        "speedup": off / on,
        "accepted_of_drafts": stats["spec_decode_num_accepted_tokens"] / max(stats["spec_decode_num_draft_tokens"], 1),
        "tokens_per_check": 1 + stats["spec_decode_num_accepted_tokens"] / max(stats["spec_decode_num_drafts"], 1),
        "same_tokens": int(outputs[0] == outputs[1]),
    }


def _prompts(num_prompts: int, input_len: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(0)
    texts = [[rng.randrange(vocab_size) for _ in range(max(input_len // _REPEATS, 1))] for _ in range(num_prompts)]
    return [(text * (_REPEATS + 1))[:input_len] for text in texts]
