"""The asynchronous engine with a real engine process on a tiny model."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import tiny

from jaxpage import LLM, BeamSearchParams, EngineDeadError, RequestOutput, SamplingParams
from jaxpage.async_engine import AsyncEngine, RequestStream
from jaxpage.config import EngineConfig

pytestmark = pytest.mark.usefixtures("quick_compiles")
GUARD_SECONDS = 120
PROMPT = tiny.prompt(18)


@pytest.fixture(scope="module")
def llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    """The same engine in this process: what is to be expected. Compiles the programs of both."""
    with LLM(**tiny_options, multiprocess=False, enable_prefix_caching=False) as llm:
        yield llm


Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a test's coroutine; all of them in one event loop, as the engine belongs to one."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, GUARD_SECONDS))


@pytest.fixture(scope="module")
def engine(llm: LLM, run: Run, tiny_options: dict[str, Any]) -> Iterator[AsyncEngine]:
    engine = run(started(tiny_options))
    yield engine
    run(engine.shutdown())


async def started(options: dict[str, Any]) -> AsyncEngine:
    engine = AsyncEngine(EngineConfig(**options))
    await engine.start()
    await engine.wait_ready()
    return engine


async def last_of(stream: RequestStream) -> RequestOutput:
    last = None
    async for output in stream:
        assert last is None or not last.finished
        last = output
    assert last is not None
    assert last.finished
    return last


def sampled(max_tokens: int = 12, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.outputs]


def test_streams_of_several_sequences_end_as_those_of_the_offline_engine(
    run: Run, engine: AsyncEngine, llm: LLM
) -> None:
    params = [sampled(n=3, seed=5, logprobs=1), sampled(n=10, seed=9), sampled(seed=2)]
    expected = llm.generate([PROMPT] * 3, params)

    async def all_at_once() -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(engine.add_request(PROMPT, its)) for its in params))

    outputs = run(all_at_once())
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]
    for sequence, other in zip(outputs[0].outputs, expected[0].outputs, strict=True):
        assert sequence.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_a_beam_search_gives_one_output_with_all_its_sequences(run: Run, engine: AsyncEngine, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=9)

    async def search() -> list[RequestOutput]:
        return [output async for output in engine.add_request(PROMPT, params)]

    (output,) = run(search())
    (expected,) = llm.beam_search(PROMPT, params)
    assert tokens_of(output) == tokens_of(expected)
    assert [sequence.text for sequence in output.outputs] == [sequence.text for sequence in expected.outputs]
    scores = [sequence.score for sequence in output.outputs]
    assert scores == pytest.approx([sequence.score for sequence in expected.outputs], abs=1e-3)


def test_utilities_answer_each_caller_while_requests_run(run: Run, engine: AsyncEngine) -> None:
    async def together() -> tuple[RequestOutput, list[Any]]:
        stream = engine.add_request(PROMPT, sampled(40, n=3, seed=1))
        calls = [engine.kv_cache_snapshot(), engine.reset_prefix_cache(), engine.kv_cache_snapshot()]
        return await last_of(stream), await asyncio.gather(*calls)

    output, (first, reset, second) = run(together())
    assert [len(tokens) for tokens in tokens_of(output)] == [40, 40, 40]
    assert isinstance(reset, bool)
    for snapshot in (first, second):
        assert snapshot["num_used"] + snapshot["num_free"] == snapshot["num_blocks"] == 80


def test_cached_prefixes_are_found_until_they_are_reset(run: Run, engine: AsyncEngine) -> None:
    async def again() -> list[int]:
        assert await engine.reset_prefix_cache()
        found = [(await last_of(engine.add_request(PROMPT, sampled()))).num_cached_tokens for _ in range(2)]
        salted = await last_of(engine.add_request(PROMPT, sampled(), cache_salt="mine"))
        assert await engine.reset_prefix_cache()
        after = await last_of(engine.add_request(PROMPT, sampled()))
        return [*found, salted.num_cached_tokens, after.num_cached_tokens]

    assert run(again()) == [0, 16, 0, 0]


@pytest.mark.parametrize("by", ["engine", "stream"])
def test_an_abort_ends_all_sequences_and_frees_what_they_held(run: Run, engine: AsyncEngine, by: str) -> None:
    async def aborted() -> tuple[list[RequestOutput], dict[str, Any]]:
        stream = engine.add_request(PROMPT, sampled(100, n=12, seed=1))  # eight run, four wait
        outputs = [await anext(stream)]
        if by == "engine":
            engine.abort(stream.request_id)
        else:
            stream.abort()
        outputs += [output async for output in stream]
        # The engine takes messages in order: this one comes after the abort.
        return outputs, await engine.kv_cache_snapshot()

    (first, last), snapshot = run(aborted())
    assert not first.finished
    assert last.finished
    assert [sequence.finish_reason for sequence in last.outputs] == ["abort"] * 12
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)


def test_an_aborted_beam_search_frees_all_beams(run: Run, engine: AsyncEngine) -> None:
    async def aborted() -> tuple[list[RequestOutput], dict[str, Any]]:
        stream = engine.add_request(PROMPT, BeamSearchParams(beam_width=8, max_tokens=20, ignore_eos=True))
        while not (await engine.kv_cache_snapshot())["requests"]:
            pass
        stream.abort()
        return [output async for output in stream], await engine.kv_cache_snapshot()

    (output,), snapshot = run(aborted())
    assert [sequence.finish_reason for sequence in output.outputs] == ["abort"]
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)


def test_a_stop_string_ends_sequences_in_the_engine_too(run: Run, engine: AsyncEngine, llm: LLM) -> None:
    """They would go on for 80 tokens and more."""
    plain = llm.generate(PROMPT, sampled(90, n=2, seed=3))[0].outputs
    stops = tuple(sequence.text[5:8] for sequence in plain)

    async def stopped() -> tuple[RequestOutput, dict[str, Any]]:
        output = await last_of(engine.add_request(PROMPT, sampled(90, n=2, seed=3, stop=stops)))
        return output, await engine.kv_cache_snapshot()

    output, snapshot = run(stopped())
    assert [sequence.text for sequence in output.outputs] == [sequence.text[:5] for sequence in plain]
    assert [sequence.stop_reason for sequence in output.outputs] == list(stops)
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)


def test_death_ends_requests_and_utilities_that_are_under_way(run: Run, llm: LLM, tiny_options: dict[str, Any]) -> None:
    async def killed() -> list[Any]:
        engine = await started(tiny_options)
        assert engine._process is not None
        os.kill(engine._process.pid, signal.SIGSTOP)  # it answers nothing any more
        stream = engine.add_request(PROMPT, sampled(n=3))
        waiting = [
            asyncio.create_task(coroutine)
            for coroutine in (last_of(stream), engine.kv_cache_snapshot(), engine.reset_prefix_cache())
        ]
        await asyncio.sleep(0)  # they begin, and wait
        os.kill(engine._process.pid, signal.SIGKILL)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        await engine.shutdown()
        return results

    results = run(killed())
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert all("SIGKILL" in str(result) for result in results)


def test_a_call_that_is_given_up_disturbs_no_other(run: Run, engine: AsyncEngine) -> None:
    async def given_up() -> dict[str, Any]:
        call = asyncio.create_task(engine.reset_prefix_cache())
        await asyncio.sleep(0)
        call.cancel()
        snapshot = await engine.kv_cache_snapshot()
        assert call.cancelled()
        return snapshot

    assert "num_blocks" in run(given_up())
    assert not engine._calls


# The offline API with its engine in a process of its own: what differs from one in the caller's.


@pytest.fixture(scope="module")
def remote(llm: LLM, tiny_options: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**tiny_options) as remote:
        yield remote


def test_offline_utilities_between_the_steps_of_a_stream_lose_nothing(remote: LLM, llm: LLM) -> None:
    outputs = []
    for output in remote.stream(PROMPT, sampled(30, n=2, seed=7)):
        outputs.append(output)
        snapshot = remote.kv_cache_snapshot()
        assert snapshot["num_used"] + snapshot["num_free"] == 80
    assert tokens_of(outputs[-1]) == tokens_of(llm.generate(PROMPT, sampled(30, n=2, seed=7))[0])
    assert remote.reset_prefix_cache()


def test_offline_streams_may_take_turns_and_end_early(remote: LLM, llm: LLM) -> None:
    left, first, second = (remote.stream(PROMPT, sampled(25, n=2, seed=seed)) for seed in (1, 2, 3))
    next(left)
    pairs = list(zip(first, second, strict=False))
    left.close()  # type: ignore[attr-defined]
    *_, (_, last) = pairs
    *_, last = [last, *second]
    assert tokens_of(last) == tokens_of(llm.generate(PROMPT, sampled(25, n=2, seed=3))[0])
    snapshot = remote.kv_cache_snapshot()
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)
