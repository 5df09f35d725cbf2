"""The asynchronous engine with a real engine process on a tiny model."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from frontends import LIMITS, TOKENIZER, opened

import jaxpage
from jaxpage import (
    LLM,
    BeamSearchParams,
    EngineDeadError,
    GenerationError,
    RequestError,
    RequestOutput,
    SamplingParams,
    wire,
)
from jaxpage.async_engine import AsyncEngine, RequestStream
from jaxpage.client import Client
from jaxpage.config import EngineConfig
from jaxpage.metrics import Metrics
from jaxpage.outputs import RequestDelta
from jaxpage.requests.open_request import OpenRequest

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
def engine(
    llm: LLM, run: Run, tiny_options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsyncEngine]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{{ tools | length }} {{ mood }} {{ messages[0].content }}")
    engine = run(started(tiny_options | {"chat_template": str(template)}))
    yield engine
    run(engine.close())


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


def test_a_chat_goes_through_the_given_template_with_tools_and_variables(engine: AsyncEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    token_ids = engine.encode_chat(messages, tools=[{}], chat_template_kwargs={"mood": "calm"})
    assert engine.decode(token_ids) == "1 calm Hi"
    assert engine.chat_templates.takes_tools


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


def test_deltas_joined_are_the_output_whoever_reads_them_late(run: Run, engine: AsyncEngine, llm: LLM) -> None:
    params = sampled(n=2, seed=5, logprobs=0)
    (expected,) = llm.generate(PROMPT, params)

    async def read() -> list[RequestDelta]:
        found = engine.add_request(PROMPT, params).deltas()
        deltas = [await anext(found)]
        while len((await engine.kv_cache_snapshot())["requests"]):
            pass
        return deltas + [delta async for delta in found]

    deltas = run(read())
    assert len(deltas) < 12
    whole = RequestDelta.joined(deltas)
    assert whole.finished
    for one, other in zip(whole.outputs, expected.outputs, strict=True):
        assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
        assert len(one.logprobs or ()) == 12


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
        await engine.close()
        return results

    results = run(killed())
    assert [type(result) for result in results] == [EngineDeadError] * 3
    assert all("SIGKILL" in str(result) for result in results)


@pytest.mark.parametrize("said", [b"\xc1", wire.encode(wire.Outputs([], {"num_steps": "many"}))])  # type: ignore[dict-item]
def test_an_engine_that_cannot_be_understood_is_dead(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Or whoever waits for it would wait for ever, and /health say that all is well."""

    class Socket:
        async def recv(self) -> bytes:
            return said

    async def heard() -> AsyncEngine:
        engine = AsyncEngine(EngineConfig())
        engine._process = SimpleNamespace(outputs=Socket())  # type: ignore[assignment]
        await engine._receive()
        return engine

    engine = asyncio.run(asyncio.wait_for(heard(), GUARD_SECONDS))
    assert engine.is_dead
    assert "cannot process engine output" in caplog.text
    with pytest.raises(EngineDeadError, match="cannot process engine output"):
        engine.add_request(PROMPT, sampled())


@pytest.mark.parametrize("options", [{"max_tokens": 2**70}, {"stop": ("\ud800",)}])
def test_a_request_that_cannot_be_sent_is_not_open(options: dict[str, Any]) -> None:
    """Nobody would ever end it, and a pause would wait for it."""
    engine = AsyncEngine(EngineConfig())
    engine._tokenizer = TOKENIZER
    engine._client.take(LIMITS)
    engine._process = SimpleNamespace(requests=SimpleNamespace(send_multipart=None))  # type: ignore[assignment]
    with pytest.raises((OverflowError, UnicodeEncodeError)):
        engine.add_request("Hi", SamplingParams(**options))
    assert not engine._client.open_ids
    assert not engine._client._by_sequence


def test_a_stop_string_on_the_last_token_counts_as_stop_in_the_metrics() -> None:
    """The engine has said that the request ends by its length."""
    metrics = Metrics("smollm2-135m")
    client = Client(lambda message: None, metrics)
    client.take(LIMITS)
    request = opened(params=SamplingParams(stop=("B",), max_tokens=2)).request
    client.open(request, RequestStream(client, request))
    client.take(wire.Outputs([wire.TokenOutput("r", TOKENIZER.encode("AB"), "length")], {}))
    assert request.finished
    ended = [line for line in metrics.render().decode().splitlines() if "request_success_total{" in line]
    assert ended == ['jaxpage:request_success_total{finished_reason="stop",model_name="smollm2-135m"} 1.0']


def test_a_call_that_is_given_up_disturbs_no_other(run: Run, engine: AsyncEngine) -> None:
    async def given_up() -> dict[str, Any]:
        call = asyncio.create_task(engine.reset_prefix_cache())
        await asyncio.sleep(0)
        call.cancel()
        snapshot = await engine.kv_cache_snapshot()
        assert call.cancelled()
        return snapshot

    assert "num_blocks" in run(given_up())
    assert not engine._client._answers


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


@pytest.mark.parametrize("door", ["llm", "remote"])
def test_a_request_that_makes_us_fail_ends_alone_offline_too(
    door: str, request: pytest.FixtureRequest, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `AsyncEngine`: with what it has so far, and the others go on."""
    target: LLM = request.getfixturevalue(door)
    bad, good = [sampled(20, seed=7), sampled(20, seed=8)]
    expected = [tokens_of(output)[0] for output in llm.generate([PROMPT] * 2, [bad, good])]
    take = OpenRequest.take

    def poisoned(self: OpenRequest, output: Any, *version: int) -> Any:
        if self.message.seed == 7 and self.num_generated_tokens >= 2:
            raise ValueError("this text is more than we can bear")
        return take(self, output, *version)

    monkeypatch.setattr(OpenRequest, "take", poisoned)
    with pytest.raises(GenerationError, match=r"1 of 2 requests failed, those of prompts 0 \(request \d+\)") as caught:
        target.generate([PROMPT] * 2, [bad, good])
    outputs = [output.outputs[0] for output in caught.value.outputs]
    assert [(output.token_ids, output.finish_reason) for output in outputs] == [
        (expected[0][:2], "error"),
        (expected[1], "length"),
    ]
    snapshot = target.kv_cache_snapshot()
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)


def test_a_kept_pause_stops_between_two_tokens_and_changes_none(run: Run, engine: AsyncEngine, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPT, sampled(60, seed=4))

    async def paused() -> tuple[int, int, RequestOutput]:
        stream = engine.add_request(PROMPT, sampled(60, seed=4))
        await anext(stream)
        await engine.pause("keep")
        assert await engine.is_paused()
        before = (await engine.kv_cache_snapshot())["requests"]
        late = engine.add_request(PROMPT, sampled(3, seed=1))
        after = (await engine.kv_cache_snapshot())["requests"]
        assert before == after
        assert not stream._request.finished
        await engine.resume()
        return len(before), len((await last_of(late)).outputs[0].token_ids), await last_of(stream)

    num_kept, num_late, output = run(paused())
    assert (num_kept, num_late) == (1, 3)
    assert tokens_of(output) == tokens_of(expected)


def test_a_pause_that_waits_returns_when_all_have_ended_and_holds_what_comes(run: Run, engine: AsyncEngine) -> None:
    async def paused() -> tuple[bool, int, RequestOutput]:
        streams = [engine.add_request(PROMPT, sampled(20, seed=seed)) for seed in range(3)]
        await engine.pause("wait")
        all_ended = all(stream._request.finished for stream in streams)
        late = engine.add_request(PROMPT, sampled(3))
        held = (await engine.kv_cache_snapshot())["num_used"]
        await engine.resume()
        return all_ended, held, await last_of(late)

    all_ended, held, late = run(paused())
    assert all_ended
    assert held == 0
    assert late.outputs[0].finish_reason == "length"


def test_a_pause_ends_what_is_open_unless_told_otherwise(run: Run, engine: AsyncEngine) -> None:
    async def paused() -> list[str | None]:
        streams = [engine.add_request(PROMPT, sampled(90, seed=seed)) for seed in range(10)]
        await anext(streams[0])
        await engine.pause()
        held = engine.add_request(PROMPT, sampled(3))
        held.abort()
        await engine.resume()
        ended = [await last_of(stream) for stream in (*streams, held)]
        return [output.outputs[0].finish_reason for output in ended]

    assert run(paused()) == ["abort"] * 11
    with pytest.raises(RequestError, match="mode is 'later'"):
        run(engine.pause("later"))


@pytest.mark.parametrize("offload_weights", [False, True])
def test_requests_survive_the_engines_sleep(run: Run, engine: AsyncEngine, llm: LLM, offload_weights: bool) -> None:
    expected = llm.generate([PROMPT] * 2, [sampled(40, seed=4, n=2), sampled(40, temperature=0)])

    async def slept() -> tuple[int, list[RequestOutput]]:
        streams = [
            engine.add_request(PROMPT, sampled(40, seed=4, n=2)),
            engine.add_request(PROMPT, sampled(40, temperature=0)),
        ]
        await anext(streams[0])
        await engine.sleep(offload_weights=offload_weights)
        assert await engine.is_sleeping()
        with pytest.raises(RequestError, match="asleep"):
            await engine.resume()
        num_used = (await engine.kv_cache_snapshot())["num_used"]
        await engine.wake_up()
        return num_used, [await last_of(stream) for stream in streams]

    num_used, outputs = run(slept())
    assert num_used == 0
    assert [tokens_of(output) for output in outputs] == [tokens_of(output) for output in expected]


def test_a_profile_leaves_a_trace(run: Run, engine: AsyncEngine, tmp_path: Path) -> None:
    async def profiled() -> None:
        stream = engine.add_request(PROMPT, sampled(30))
        await engine.profile(0.2, str(tmp_path))
        await last_of(stream)

    run(profiled())
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_profile_that_cannot_be_written_ends_no_request(run: Run, llm: LLM, tiny_options: dict[str, Any]) -> None:
    """In an engine of its own: JAX's profiler is of no more use in it."""

    async def profiled() -> RequestOutput:
        engine = await started(tiny_options)
        try:
            stream = engine.add_request(PROMPT, sampled(30))
            with pytest.raises(RequestError, match="the profile cannot be written"):
                await engine.profile(0.1, "/proc/nowhere")
            with pytest.raises(RequestError, match="no profile can be taken"):
                await engine.profile(0.1, "/proc/nowhere")
            return await last_of(stream)
        finally:
            await engine.close()

    assert [len(tokens) for tokens in tokens_of(run(profiled()))] == [30]


@pytest.mark.parametrize("num_before", [0, 2])
def test_a25_a_request_that_makes_us_fail_ends_alone(
    run: Run, engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """Before its first token, or after two."""
    (expected,) = llm.generate(PROMPT, sampled(20, seed=8))
    take = OpenRequest.take

    def poisoned(self: OpenRequest, output: Any, *version: int) -> Any:
        if self.request_id.startswith("poisoned") and self.num_generated_tokens >= num_before:
            raise ValueError("this text is more than we can bear")
        return take(self, output, *version)

    monkeypatch.setattr(OpenRequest, "take", poisoned)

    async def together() -> tuple[RequestOutput, RequestOutput, dict[str, Any]]:
        bad = engine.add_request(PROMPT, sampled(20, seed=7), request_id="poisoned")
        good = engine.add_request(PROMPT, sampled(20, seed=8))
        outputs = [await last_of(stream) for stream in (bad, good)]
        return *outputs, await engine.kv_cache_snapshot()

    bad, good, snapshot = run(together())
    assert bad.outputs[0].finish_reason == "error"
    assert len(bad.outputs[0].token_ids) == num_before
    assert tokens_of(good) == tokens_of(expected)
    assert (snapshot["requests"], snapshot["num_used"]) == ([], 0)


def test_the_metrics_tell_what_was_served(run: Run, tiny_options: dict[str, Any], llm: LLM) -> None:
    async def served() -> str:
        engine = await started(tiny_options)
        try:
            outputs = [await last_of(engine.add_request(PROMPT, sampled(12, n=2, seed=seed))) for seed in range(3)]
            assert all(output.metrics.queue_time is not None for output in outputs)
            return engine.metrics.render().decode()
        finally:
            await engine.close()

    lines = dict(line.rsplit(" ", 1) for line in run(served()).splitlines() if not line.startswith("#"))
    name = f'{{model_name="{tiny_options["model"]}"}}'
    assert float(lines[f"jaxpage:generation_tokens_total{name}"]) == 72
    assert float(lines[f"jaxpage:prompt_tokens_total{name}"]) == 3 * len(PROMPT)
    assert float(lines[f"jaxpage:request_queue_time_seconds_count{name}"]) == 3
    assert float(lines[f"jaxpage:inter_token_latency_seconds_count{name}"]) == 66
    assert float(lines[f"jaxpage:prefix_cache_hits_total{name}"]) > 0
    assert float(lines[f"jaxpage:num_recompiles_total{name}"]) == 0
    assert float(lines[f"jaxpage:dispatch_seconds_total{name}"]) > 0


def test_whoever_leaves_a_loop_or_is_cancelled_in_it_ends_the_request(run: Run, engine: AsyncEngine) -> None:
    async def leave() -> None:
        async for _ in engine.add_request(PROMPT, sampled(90)):
            return

    async def leave_and_look() -> list[Any]:
        await leave()
        reading = asyncio.create_task(last_of(engine.add_request(PROMPT, sampled(90))))
        waiting = asyncio.create_task(anext(engine.add_request(PROMPT, sampled(90))))
        while (await engine.kv_cache_snapshot())["requests"] == []:
            await asyncio.sleep(0)
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        await asyncio.sleep(0)  # the loop that was left is finalized by the event loop
        return [(await engine.kv_cache_snapshot())["requests"], engine._client.open_ids]

    assert run(leave_and_look()) == [[], set()]


def test_an_engine_is_ready_within_its_context_and_gone_behind_it(run: Run, tiny_options: dict[str, Any]) -> None:
    async def use() -> tuple[RequestOutput, AsyncEngine]:
        async with jaxpage.AsyncEngine(EngineConfig(**tiny_options)) as engine:
            return await last_of(engine.add_request(PROMPT, sampled(4))), engine

    output, engine = run(use())
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(EngineDeadError, match="the engine was closed"):
        engine.add_request(PROMPT, sampled())
