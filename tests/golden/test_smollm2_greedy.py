"""SmolLM2 against transformers in float32, token for token, however the requests are scheduled."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host import exchanged_host
from real_models import open_model

from jaxpage import LLM, PoolingParams, SamplingParams
from jaxpage.sampling_params import Pooling

PROMPTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "smollm2_greedy.json").read_text())["prompts"]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_model("smollm2-135m") as model:
        yield model.llm


def generate(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    outputs = llm.generate([prompt["prompt_token_ids"] for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def expected(prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [prompt["token_ids"] for prompt in prompts]


def test_the_goldens_are_twenty_prompts_of_5_to_600_tokens() -> None:
    lengths = [len(prompt["prompt_token_ids"]) for prompt in PROMPTS]
    assert len(lengths) == 20
    assert min(lengths) == 5
    assert max(lengths) == 600


def test_every_prompt_alone_equals_transformers(llm: LLM, full: bool) -> None:
    prompts = PROMPTS if full else PROMPTS[6::6]
    assert [generate(llm, [prompt])[0] for prompt in prompts] == expected(prompts)


def test_all_prompts_at_once_equal_transformers(llm: LLM) -> None:
    assert generate(llm, PROMPTS) == expected(PROMPTS)


def test_text_prompts_give_the_golden_token_ids(llm: LLM) -> None:
    for prompt in PROMPTS:
        assert llm.tokenizer.encode(prompt["text"]) == prompt["prompt_token_ids"]


def test_chunked_prefill_and_preemption_change_nothing(llm: LLM, full: bool) -> None:
    prompts, num_tokens = (PROMPTS, 64) if full else (PROMPTS[1::3], 32)  # steps of 32 run in a bucket of their size
    with exchanged_host(llm, max_num_batched_tokens=num_tokens, num_blocks=60) as scheduler:
        assert generate(llm, prompts) == expected(prompts)
        assert scheduler.num_preemptions > 0


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(llm: LLM) -> None:
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS[:6]]
    seeded = [SamplingParams(temperature=1, top_p=0.95, seed=seed, max_tokens=16) for seed in range(6)]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, seeded, use_tqdm=False)]
    again = [output.outputs[0].token_ids for output in llm.generate(prompts, seeded, use_tqdm=False)]
    alone = [llm.generate(*pair, use_tqdm=False)[0].outputs[0].token_ids for pair in zip(prompts, seeded, strict=True)]
    assert together == again == alone
    assert len({tuple(token_ids) for token_ids in together}) == 6


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_embeddings_equal_those_of_transformers(llm: LLM, kind: Pooling) -> None:
    cases = json.loads((Path(__file__).parent / "embeddings.json").read_text())["cases"]
    cases = [case for case in cases if case["model"] == "smollm2"]
    prompts = [case["prompt_token_ids"] for case in cases]
    outputs = llm.embed(prompts, PoolingParams(pooling=kind), use_tqdm=False)
    assert len(prompts) == 2
    for output, case in zip(outputs, cases, strict=True):
        assert output.outputs.embedding == pytest.approx(case[kind], abs=1e-4)
