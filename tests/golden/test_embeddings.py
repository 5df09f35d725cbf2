"""Embeddings of prompts on the tiny Llama: transformers' hidden states, however computed."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from host import exchanged_host

from jaxpage import LLM, PoolingParams, RequestError, SamplingParams
from jaxpage.config import LOOP_NAMES
from jaxpage.sampling_params import Pooling

pytestmark = pytest.mark.usefixtures("quick_compiles")
CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("embeddings.json").read_text())["cases"]
TOLERANCE = 1e-5
KINDS: tuple[Pooling, ...] = ("last", "mean")
MAX_MODEL_LEN = 128


@pytest.fixture(scope="module")
def llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False) as llm:
        yield llm


def embed(llm: LLM, prompts: Sequence[list[int]], kind: Pooling, **options: Any) -> np.ndarray:
    """[prompts, embed]."""
    outputs = llm.embed(prompts, PoolingParams(pooling=kind, **options), use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_those_of_transformers(llm: LLM, kind: Pooling) -> None:
    """Together, in chunks of 16 tokens, and alone."""
    cases = [case for case in CASES if case["model"] == "llama"]
    prompts, expected = [case["prompt_token_ids"] for case in cases], np.array([case[kind] for case in cases])
    assert sorted(map(len, prompts)) == [1, 33, 100]
    np.testing.assert_allclose(embed(llm, prompts, kind), expected, atol=TOLERANCE)
    for prompt, its in zip(prompts, expected, strict=True):
        np.testing.assert_allclose(embed(llm, [prompt], kind), [its], atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_many_prompts_of_one_step_each_have_their_own(llm: LLM, kind: Pooling) -> None:
    """More than one part of the sums, among requests that generate."""
    prompts = [
        tiny.prompt(length + shift)[shift:] for shift, length in enumerate((1, 2, 3, 1, 2, 1, 17, 1, 2, 3, 1, 40))
    ]
    alone = np.concatenate([embed(llm, [prompt], kind) for prompt in prompts])
    np.testing.assert_allclose(embed(llm, prompts, kind), alone, atol=TOLERANCE)
    assert len({tuple(row.round(3)) for row in alone}) == len(prompts)


@pytest.mark.parametrize("mode", LOOP_NAMES)
def test_a_prompt_that_was_preempted_on_the_way_has_the_same_embedding(llm: LLM, mode: str) -> None:
    """Others generate beside it until there is no room for it, when a part of it is computed."""
    prompts = [tiny.prompt(20 + shift)[shift:] for shift in range(3)]
    long = tiny.prompt(104)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = {kind: embed(llm, [long], kind)[0] for kind in KINDS}
    for kind in KINDS:
        with exchanged_host(llm, num_blocks=47, mode=mode, caching=False) as small:
            requests = [llm._open(prompt, greedy) for prompt in prompts]
            requests.append(llm._open(long, PoolingParams(pooling=kind)))
            output = llm._run(requests, use_tqdm=False)[-1]
            assert small.num_preemptions > 0
        np.testing.assert_allclose(output.outputs[0].embedding, expected[kind], atol=TOLERANCE)


def test_the_last_state_reads_the_prefix_cache_and_the_mean_computes_all(llm: LLM) -> None:
    assert llm.reset_prefix_cache()
    prompt = tiny.prompt(33)
    cold = {kind: embed(llm, [prompt], kind) for kind in KINDS}
    hits = []
    for kind in KINDS:
        before = llm.stats["prefix_cache_hits"]
        np.testing.assert_allclose(embed(llm, [prompt], kind), cold[kind], atol=TOLERANCE)
        hits.append(llm.stats["prefix_cache_hits"] - before)
    assert hits == [32, 0]
    [generated] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert generated.num_cached_tokens == 32


def test_dimensions_are_the_first_ones_with_length_one_again(llm: LLM) -> None:
    prompt = tiny.prompt(9)
    raw = embed(llm, [prompt], "mean", normalize=False)[0]
    assert abs(np.linalg.norm(raw) - 1) > 0.1
    np.testing.assert_allclose(embed(llm, [prompt], "mean")[0], raw / np.linalg.norm(raw), atol=1e-6)
    short = embed(llm, [prompt], "mean", dimensions=5)[0]
    np.testing.assert_allclose(short, raw[:5] / np.linalg.norm(raw[:5]), atol=1e-6)
    np.testing.assert_allclose(embed(llm, [prompt], "mean", dimensions=5, normalize=False)[0], raw[:5], atol=1e-6)


def test_a_prompt_may_fill_the_whole_context(llm: LLM) -> None:
    prompt = tiny.prompt(MAX_MODEL_LEN)
    [output] = llm.embed([prompt], use_tqdm=False)
    assert len(output.outputs.embedding) == 64
    assert output.prompt_token_ids == prompt
    with pytest.raises(RequestError, match="the prompt has 129 tokens, and max_model_len is 128: shorten it"):
        llm.embed([tiny.prompt(MAX_MODEL_LEN + 1)])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dimensions": 65}, "dimensions is 65, and the model's embeddings have 64"),
        ({"dimensions": 0}, "dimensions is 0: it must be at least 1"),
        ({"pooling": "max"}, "pooling is 'max': it must be 'last' or 'mean'"),
        ({"normalize": 1}, "normalize is 1"),
    ],
)
def test_what_makes_no_embedding_is_refused_by_value(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.embed([[5, 6]], PoolingParams(**options))


def test_embedding_compiles_nothing(llm: LLM) -> None:
    embed(llm, [tiny.prompt(40)], "mean")
    assert llm.stats["num_recompiles"] == 0
