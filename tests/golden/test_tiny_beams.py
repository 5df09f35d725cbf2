"""Beam search on the tiny Llama finds what transformers' `generate` does, in its order and with its scores."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tiny_engine import MAX_STEP_TOKENS, open_engine

from jaxpage.engine.core import EngineCore
from jaxpage.engine.loops import ResidentLoop
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.wire import AddRequest, BeamOutput, BeamSequence

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("beam_search.json").read_text("utf-8"))["cases"]
TOLERANCE = 1e-4
MAX_NUM_SEQS = 16


@pytest.fixture(scope="module")
def core(quick_compiles: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    folder = tmp_path_factory.mktemp("tiny_llama")
    core = open_engine(folder, "llama", max_model_len=64, num_blocks=200, max_num_seqs=MAX_NUM_SEQS)
    yield core
    core.close()


def search(core: EngineCore, cases: list[dict[str, Any]]) -> list[list[BeamSequence]]:
    """What is found for each case, all of them at once."""
    for index, case in enumerate(cases):
        ending = [case["eos_token_id"]]
        beam = BeamSearchParams(
            beam_width=case["num_beams"],
            max_tokens=case["max_new_tokens"],
            length_penalty=case["length_penalty"],
            early_stopping=case["early_stopping"],
            stop_token_ids=tuple(ending),
            ignore_eos=True,
        )
        params = SamplingParams(temperature=0, stop_token_ids=tuple(ending), ignore_eos=True)
        prompt = tiny.prompt(case["prompt_length"])
        core.add(AddRequest(str(index), prompt, params, seed=0, max_tokens=case["max_new_tokens"], beam=beam))
    found: dict[str, list[BeamSequence]] = {}
    while core.has_requests:
        for output in core.step():
            assert isinstance(output, BeamOutput)
            found[output.sequence_id] = output.sequences
        core.scheduler.kv_cache.check_integrity()
    assert core.scheduler.kv_cache.pool.usage == 0
    return [found[str(index)] for index in range(len(cases))]


def check(case: dict[str, Any], found: list[BeamSequence]) -> None:
    expected = case["outputs"]
    assert [beam.token_ids for beam in found] == [output["token_ids"] for output in expected]
    for name in ("score", "cumulative_logprob"):
        got, golden = [getattr(beam, name) for beam in found], [output[name] for output in expected]
        np.testing.assert_allclose(got, golden, rtol=0, atol=TOLERANCE, err_msg=name)
    is_stop = [output["token_ids"][-1] == case["eos_token_id"] for output in expected]
    assert [beam.finish_reason == "stop" for beam in found] == is_stop


def name_of(case: dict[str, Any]) -> str:
    keys = ("prompt_length", "eos_token_id", "num_beams", "length_penalty", "early_stopping")
    return "-".join(str(case[key]) for key in keys)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_b21_beams_and_scores_equal_those_of_transformers(core: EngineCore, case: dict[str, Any]) -> None:
    check(case, search(core, [case])[0])


def test_b21_searches_that_share_a_batch_find_the_same(core: EngineCore) -> None:
    for case, found in zip(CASES, search(core, CASES), strict=True):
        check(case, found)


@pytest.mark.parametrize("caching", [True, False])
def test_b21_searches_that_are_preempted_find_the_same(core: EngineCore, caching: bool) -> None:
    ample = core.loop
    kv_cache = KVCacheManager(
        16, core.runner.plan.layout, max_step_tokens=MAX_STEP_TOKENS, enable_prefix_caching=caching
    )
    scheduler = Scheduler(kv_cache, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS)
    core.loop = ResidentLoop(scheduler, core.runner)
    cases = sorted(CASES, key=lambda case: case["num_beams"])  # the widest beside each other
    try:
        results = search(core, cases)
        assert core.scheduler.num_preemptions > 0
    finally:
        core.loop = ample
    for case, found in zip(cases, results, strict=True):
        check(case, found)
