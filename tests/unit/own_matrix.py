"""Serves a user's own model in this process in every way that must not matter, and prints what differed, as JSON.

Arguments: the import path, a folder of compiled programs, and a `speculative_config` or null, as JSON. A process of its
own, which has two devices.
"""

import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from host import exchanged_host

from jaxpage import LLM, BeamSearchParams, SamplingParams

Tokens = list[list[list[int]]]
"""Of each request, of each of its sequences."""
LENGTHS = (1, 15, 16, 17, 40, 63, 90)
FEW_BLOCKS = 9


def prompts() -> list[list[int]]:
    """Of every kind of length; the longer ones begin alike, and repeat themselves now and then."""
    rng = random.Random(3)
    common = [rng.randrange(2, 64) for _ in range(20)] * 3
    return [[*common, *(rng.randrange(2, 64) for _ in range(100))][-n if n < 20 else 0 :][:n] for n in LENGTHS]


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=16, ignore_eos=True)
THREE = SamplingParams(temperature=0.9, seed=11, n=3, max_tokens=16, ignore_eos=True)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=9, ignore_eos=True)
KINDS: dict[str, SamplingParams | BeamSearchParams] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "three": THREE,
    "beams": BEAMS,
}


def serve(llm: LLM, params: SamplingParams | BeamSearchParams, given: list[list[int]]) -> Tokens:
    if isinstance(params, BeamSearchParams):
        outputs = llm.beam_search(given, params, use_tqdm=False)
    else:
        outputs = llm.generate(given, params, use_tqdm=False)
    return [[sequence.token_ids for sequence in output.outputs] for output in outputs]


def alone(llm: LLM, params: SamplingParams | BeamSearchParams) -> Tokens:
    return [tokens for prompt in prompts() for tokens in serve(llm, params, [prompt])]


def ways(llm: LLM, params: SamplingParams | BeamSearchParams) -> Iterator[tuple[str, Tokens]]:
    """Each by what it is, and what it gives."""
    for mode in ("sync", "overlap", "resident"):
        for caching in (False, True):
            with exchanged_host(llm, mode=mode, caching=caching):
                yield f"in company, {mode}, {caching=}", serve(llm, params, prompts())
                yield f"once more, {mode}, {caching=}", serve(llm, params, prompts())
        with exchanged_host(llm, mode=mode, max_num_batched_tokens=16):
            yield f"in chunks, {mode}", serve(llm, params, prompts())
        for caching in (False, True):
            few = FEW_BLOCKS if not isinstance(params, BeamSearchParams) else 3 * FEW_BLOCKS
            with exchanged_host(llm, mode=mode, num_blocks=few, caching=caching) as scheduler:
                yield f"preempted, {mode}, {caching=}", serve(llm, params, prompts())
                grows = bool(scheduler.kv_cache.layout.groups)
                assert scheduler.num_preemptions > 0 or caching or not grows or isinstance(params, BeamSearchParams)
    with exchanged_host(llm, caching=True):
        yield "one after the other", alone(llm, params)
        yield "from the cache", alone(llm, params)


def main(model: str, folder: str, speculative: dict[str, Any] | None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tokenizer": "smollm2-135m",
        "max_model_len": 128,
        "num_blocks": 80,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "background_compile": False,
        "compile_cache_dir": folder,
        "strict_shapes": True,
    }
    different, count, expected = [], 0, {}
    with LLM(model, multiprocess=False, **options) as llm:
        for kind, params in KINDS.items():
            with exchanged_host(llm, mode="sync", caching=False):
                expected[kind] = alone(llm, params)
    separate = [SamplingParams(temperature=0.9, seed=11 + i, max_tokens=16, ignore_eos=True) for i in range(3)]
    options |= {"speculative_config": speculative} if speculative is not None else {}
    with LLM(model, multiprocess=False, **options) as llm:
        parts = [alone(llm, one) for one in separate]
        stats = llm.stats
        singles = [[of[index][0] for of in parts] for index in range(len(LENGTHS))]
        if singles != expected["three"]:
            different.append("sequences of a prompt are not those of requests")
        for kind, params in KINDS.items():
            for way, tokens in ways(llm, params):
                count += 1
                if tokens != expected[kind]:
                    different.append(f"{kind}, {way}")
        with exchanged_host(llm, caching=True):
            alone(llm, GREEDY)
            found = llm.generate(prompts(), GREEDY, use_tqdm=False)
            cached = [output.num_cached_tokens for output in found]
    distinct = len({tuple(sequence) for of in expected.values() for one in of for sequence in one})
    drafts, kept = (int(stats[f"spec_decode_num_{kind}_tokens"]) for kind in ("draft", "accepted"))
    counts = {"count": count, "distinct": distinct, "drafts": drafts, "kept": kept, "cached": cached}
    return {"different": different, **counts}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))))
