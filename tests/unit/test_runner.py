"""The engine core in this process: the same tokens whatever the batch, and no compiling once it is warm."""

import dataclasses
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore
from jaxpage.requests.request import Request
from jaxpage.runner.programs.program import trace_counts
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.scheduler.step_plan import SchedulerOutput
from jaxpage.wire import AddRequest, SequenceOutput, TokenOutput, sequence_id

pytestmark = pytest.mark.usefixtures("quick_compiles")
BLOCK_SIZE = 16
CHUNK = 64
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the tiny Llama as "model" and compiled programs as "programs"."""
    path = tmp_path_factory.mktemp("runner")
    tiny.write_checkpoint(path / "model", tiny.TINY["llama"], tiny.make_weights(tiny.TINY["llama"]))
    return path


def make_engine(folder: Path, **options: Any) -> EngineCore:
    defaults: dict[str, Any] = {
        "max_model_len": 192,
        "num_blocks": 80,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "compile_cache_dir": str(folder / "programs"),
        "strict_shapes": True,
    }
    return EngineCore(EngineConfig(model=str(folder / "model"), background_compile=False, **defaults | options))


@pytest.fixture(scope="module")
def engine(folder: Path) -> EngineCore:
    """Room for everything: no prompt of these tests is chunked in it, nothing preempted."""
    return make_engine(folder)


def request(
    request_id: str, length: int, max_tokens: int = 8, *, seed: int = 0, start: int = 0, **params: Any
) -> AddRequest:
    """A request whose prompt is `length` of the tiny prompt's tokens from `start` on; greedy unless told otherwise."""
    options = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | params)
    return AddRequest(request_id, tiny.prompt(start + length)[start:], options, seed, max_tokens)


def serve(engine: EngineCore, requests: Sequence[AddRequest], *, stagger: int = 0) -> tuple[Tokens, dict[str, str]]:
    """Run requests to their end. Returns tokens and finish reasons by request id.

    With `stagger`, a new request comes after every so many steps; otherwise all come at once.
    """
    waiting = list(requests)
    tokens: Tokens = {message.request_id: [] for message in requests}
    reasons: dict[str, str] = {}
    for step in range(10_000):
        while waiting and (not stagger or step >= stagger * (len(requests) - len(waiting))):
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_requests:
            break
        for output in engine.step():
            tokens[output.sequence_id].extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.sequence_id not in reasons
                reasons[output.sequence_id] = output.finish_reason
        engine.scheduler.kv_cache.check_integrity()
    assert reasons.keys() == tokens.keys()
    assert engine.scheduler.kv_cache.pool.usage == 0
    return tokens, reasons


def serve_alone(engine: EngineCore, requests: Sequence[AddRequest]) -> Tokens:
    """Each request by itself."""
    return {name: tokens for message in requests for name, tokens in serve(engine, [message])[0].items()}


def beams(request_id: str, length: int, max_tokens: int, **params: Any) -> AddRequest:
    search = BeamSearchParams(max_tokens=max_tokens, ignore_eos=True, **params)
    options = SamplingParams(temperature=0, stop_token_ids=search.stop_token_ids, ignore_eos=True)
    return AddRequest(request_id, tiny.prompt(length), options, 0, max_tokens, beam=search)


def serve_any(engine: EngineCore, requests: Sequence[AddRequest]) -> list[SequenceOutput]:
    """Run requests to their end, those with several sequences and beam searches, too."""
    for message in requests:
        engine.add(message)
    outputs = []
    while engine.has_requests:
        outputs += engine.step()
        engine.scheduler.kv_cache.check_integrity()
    assert engine.scheduler.kv_cache.pool.usage == 0
    return outputs


SAMPLED = [
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "seed": -3},
    {"temperature": 1.5, "top_k": 10, "seed": 2**40},
    {"temperature": 1.0, "min_p": 0.05, "seed": 5, "min_tokens": 6, "ignore_eos": False},
]
"""Options of seeded requests."""


def seeded(request_id: str, length: int, max_tokens: int = 8, *, kind: int, start: int = 0) -> AddRequest:
    options = dict(SAMPLED[kind])
    return request(request_id, length, max_tokens, seed=options.pop("seed"), start=start, **options)


def varied() -> list[AddRequest]:
    """Greedy and seeded requests of many lengths, more than there are rows."""
    greedy = [request(f"greedy-{n}", n, 12, start=n % 7) for n in (1, 5, 16, 17, 33, 48, 64, 100)]
    return greedy + [seeded(f"seeded-{i}", n, 15, kind=i) for i, n in enumerate((3, 20, 47, 90))]


@pytest.fixture(scope="module")
def varied_alone(engine: EngineCore) -> Tokens:
    """What each of `varied` gives by itself."""
    return serve_alone(engine, varied())


def test_serving_after_warm_up_traces_and_compiles_nothing(
    engine: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(trace_counts)
    assert before["step"] > 0
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        serve(engine, varied(), stagger=2)
        serve(engine, [request("stopped", 150, 40, ignore_eos=False, stop_token_ids=(7, 9))])
    assert dict(trace_counts) == before
    assert [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()] == []


@pytest.mark.parametrize("speculates", [False, True])
def test_programs_that_run_with_nothing_in_them_change_nothing(folder: Path, speculates: bool) -> None:
    """As all do on a GPU before it serves: they leave cache and batch bit for bit, but for a step's hidden states."""
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}} if speculates else {}
    runner = make_engine(folder, max_num_seqs=4, max_num_batched_tokens=64, **speculative).runner
    batch = runner._batch
    rng = np.random.default_rng(0)

    def fill(array: jax.Array) -> jax.Array:
        numbers = rng.integers(0, 2 if array.dtype == bool else 60, array.shape)
        return jax.device_put(numbers.astype(array.dtype), array.sharding)

    def everything() -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path((batch["state"], batch["kv_cache"]))
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}

    scheduled = batch["state"].scheduled
    state, kv_cache = jax.tree.map(fill, (batch["state"], batch["kv_cache"]))
    batch._pieces |= {"state": dataclasses.replace(state, scheduled=scheduled), "kv_cache": kv_cache}
    before = everything()
    assert len(before) > 20
    assert {name for name, _ in runner._programs.rehearsal()} == {
        *("step", "sample", "admit", "edit", "fork", "rules", "score", "score_rows", "pool")
    }
    runner._rehearse()
    for name, array in everything().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)


def test_strict_shapes_makes_an_implicit_transfer_an_error(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.runner._batch, "_send", lambda packed: packed)
    engine.add(request("implicit", 5, 1))
    with pytest.raises(RuntimeError, match="host-to-device"):
        engine.step()
    engine.abort("implicit")


def test_strict_shapes_makes_a_compile_while_serving_an_error(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def schedule_and_compile() -> SchedulerOutput:
        jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), "float32")).compile()
        return original()

    original = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", schedule_and_compile)
    before = engine.stats()["num_recompiles"]
    with pytest.raises(RuntimeError, match="1 programs were compiled while serving"):
        engine.step()
    assert engine.stats()["num_recompiles"] == before + 1


def test_a25_a_request_that_cannot_be_queued_ends_alone(
    engine: EngineCore, varied_alone: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(request: Request) -> None:
        original(request)
        if request.request_id.startswith("bad"):
            raise ValueError("a policy that cannot make up its mind, say")

    original = engine.scheduler.add
    monkeypatch.setattr(engine.scheduler, "add", add)
    good = varied()[0]
    assert engine.try_add(good) == []
    failed = engine.try_add(request("bad", 9, n=2, temperature=1.0))
    assert failed == [TokenOutput(name, [], "error") for name in ("bad", "bad#1")]
    tokens = [token for output in serve_any(engine, []) for token in output.token_ids]  # type: ignore[union-attr]
    assert tokens == varied_alone[good.request_id]


def test_sequences_beams_log_probabilities_and_rules_trace_and_compile_nothing(
    engine: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(trace_counts)
    assert before["fork"] > 0
    requests = [
        request("several", 40, 12, n=5, temperature=1.0),
        request("two", 16, 12, n=2, temperature=1.0, logprobs=3),
        request("alternatives", 50, 12, logprobs=20),
        request("vocabulary", 50, 12, logprobs=-1),
        request("prompt", 100, 2, prompt_logprobs=5),
        request("whole prompt", 70, 2, prompt_logprobs=-1),
        request("penalties", 30, 12, repetition_penalty=1.2, presence_penalty=1, frequency_penalty=-1),
        request("rules", 30, 12, logit_bias={5: 3}, allowed_token_ids=(5, 6, 7)),
        beams("narrow", 33, 10, beam_width=1),
        beams("wide", 20, 10, beam_width=8),
        beams("many ends", 5, 10, beam_width=4, stop_token_ids=tuple(range(3, 31))),
    ]
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        for message in requests:
            serve_any(engine, [message])
        serve_any(engine, requests)
    assert dict(trace_counts) == before
    assert [record.getMessage() for record in caplog.records if "ompil" in record.getMessage()] == []


def test_requests_give_the_same_tokens_together_as_alone(engine: EngineCore, varied_alone: Tokens) -> None:
    assert serve(engine, varied())[0] == varied_alone
    assert serve(engine, varied(), stagger=3)[0] == varied_alone


def test_requests_give_the_same_tokens_in_any_row(engine: EngineCore, varied_alone: Tokens) -> None:
    for shift in (3, 7):
        messages = varied()[::-1]
        assert serve(engine, messages[shift:] + messages[:shift])[0] == varied_alone


def test_seeds_decide_what_is_sampled(engine: EngineCore) -> None:
    tokens = serve(engine, [request(f"{i}", 5, 20, temperature=2.0, seed=i % 6) for i in range(8)])[0]
    assert tokens["0"] == tokens["6"]
    assert tokens["1"] == tokens["7"]
    assert len({tuple(sequence) for sequence in tokens.values()}) == 6


def test_minimum_tokens_hold_back_the_end_of_the_text(engine: EngineCore) -> None:
    """The third greedy token, made a stop token, ends the text there; before the minimum it is masked."""
    plain = serve(engine, [request("plain", 9, 30)])[0]["plain"]
    stop = plain[2]
    assert stop not in plain[:2]
    stopped, reasons = serve(engine, [request("stopped", 9, 30, stop_token_ids=(stop,))])
    assert (stopped["stopped"], reasons["stopped"]) == (plain[:3], "stop")
    held, _ = serve(engine, [request("held", 9, 30, stop_token_ids=(stop,), min_tokens=6)])
    assert len(held["held"]) >= 6
    assert held["held"][:2] == plain[:2]
    assert stop not in held["held"][:6]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4, 5])
def test_b23_padded_batches_equal_solo_runs(engine: EngineCore, num_requests: int) -> None:
    requests = [
        request("five", 5),
        seeded("sampled", 21, kind=0),
        request("seventeen", 17),
        request("thirty-three", 33),
        seeded("filtered", 16, kind=2),
    ]
    chosen = requests[:num_requests]
    assert serve(engine, chosen)[0] == serve_alone(engine, chosen)


@pytest.fixture(scope="module")
def chunking_engine(folder: Path) -> EngineCore:
    """Whose steps compute no more than a chunk."""
    return make_engine(folder, max_num_batched_tokens=CHUNK)


def test_b05_prompts_around_chunk_borders_equal_unchunked_ones(engine: EngineCore, chunking_engine: EngineCore) -> None:
    lengths = [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * BLOCK_SIZE]
    requests = [request(f"{n}", n) for n in lengths]
    expected = serve(engine, requests)[0]
    assert serve_alone(chunking_engine, requests) == expected
    # Four at a time, a decode running beside them.
    decode = seeded("decode", 3, 40, kind=1)
    beside = serve_alone(engine, [decode])
    for batch in (requests[:4], requests[3:]):
        names = [message.request_id for message in batch]
        got = serve(chunking_engine, [decode, *batch], stagger=2)[0]
        assert got == {name: expected[name] for name in names} | beside


def test_varied_requests_are_the_same_in_chunks(chunking_engine: EngineCore, varied_alone: Tokens) -> None:
    assert serve(chunking_engine, varied())[0] == varied_alone


@pytest.fixture(scope="module")
def small_engine(folder: Path) -> EngineCore:
    """Nine usable blocks: 144 tokens."""
    return make_engine(folder, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=16)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_b06_preempted_requests_give_the_same_tokens(
    engine: EngineCore, small_engine: EngineCore, sampled: bool
) -> None:
    if sampled:
        requests = [seeded(f"{i}", 5, 100, kind=i, start=i) for i in range(3)]
    else:
        requests = [request(f"{i}", 5, 100, start=i) for i in range(3)]
    before = small_engine.stats()["num_preemptions"]
    tokens, reasons = serve(small_engine, requests)
    assert small_engine.stats()["num_preemptions"] > before
    assert {len(sequence) for sequence in tokens.values()} == {100}
    assert set(reasons.values()) == {"length"}
    assert tokens == serve_alone(engine, requests)


def test_b07_context_is_clamped_to_the_pool_with_a_warning(
    folder: Path, small_engine: EngineCore, caplog: pytest.LogCaptureFixture
) -> None:
    assert small_engine.ready.max_model_len == 9 * BLOCK_SIZE
    with caplog.at_level(logging.WARNING):
        make_engine(folder, num_blocks=10, max_num_seqs=4, max_num_batched_tokens=16)
    assert any("max_model_len lowered from 192 to 144" in record.getMessage() for record in caplog.records)


def test_b07_request_that_fills_the_pool_ends_with_length(engine: EngineCore, small_engine: EngineCore) -> None:
    room = small_engine.ready.max_model_len - 40
    before = small_engine.stats()["num_preemptions"]
    tokens, reasons = serve(small_engine, [request("long", 40, room), request("short", 5, 4)])
    assert reasons == {"long": "length", "short": "length"}
    assert (len(tokens["long"]), len(tokens["short"])) == (room, 4)
    assert tokens == serve_alone(engine, [request("long", 40, room), request("short", 5, 4)])
    tokens, reasons = serve(small_engine, [request("alone", 40, room)])
    assert (len(tokens["alone"]), reasons["alone"]) == (room, "length")
    assert small_engine.stats()["num_preemptions"] <= before + 1  # nothing goes round in circles


def test_aborted_requests_leave_their_rows_and_blocks_to_others(engine: EngineCore, varied_alone: Tokens) -> None:
    for i in range(8):
        engine.add(request(f"aborted-{i}", 30 + i, 50))
    for _ in range(3):
        engine.step()
    for i in range(8):
        engine.abort(f"aborted-{i}")
    assert not engine.has_requests
    assert serve(engine, varied())[0] == varied_alone


def test_a_search_aborted_between_two_steps_leaves_its_rows_to_sequences_that_fork(engine: EngineCore) -> None:
    """What it was about to copy is called off: its rows and blocks already belong to others."""
    several = request("several", 37, 20, n=6, temperature=1.0, seed=3)
    expected = serve_any(engine, [several])
    for num_steps in range(1, 6):
        engine.add(beams("search", 21, 30, beam_width=7))
        for _ in range(num_steps):
            engine.step()
        engine.add(several)
        outputs = engine.step()  # the prompt of the first sequence
        engine.abort("search")
        outputs += serve_any(engine, [])
        for index in range(6):
            name = sequence_id("several", index)
            tokens = [output.token_ids for output in outputs if output.sequence_id == name]
            assert tokens == [output.token_ids for output in expected if output.sequence_id == name]


def test_second_engine_takes_every_program_from_disk(folder: Path, engine: EngineCore, varied_alone: Tokens) -> None:
    before = dict(trace_counts)
    second = make_engine(folder)
    stats = second.stats()
    assert stats["num_programs_loaded"] == stats["num_programs"] == engine.stats()["num_programs"] > 0
    assert dict(trace_counts) == before
    assert serve(second, varied())[0] == varied_alone


def test_damaged_programs_are_compiled_again_with_a_warning(
    folder: Path, engine: EngineCore, varied_alone: Tokens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs = tmp_path / "programs"
    shutil.copytree(folder / "programs", programs)
    # The smallest are admissions, of this engine and of others: quick to compile.
    damaged = sorted(programs.glob("*.program"), key=lambda path: path.stat().st_size)[:4]
    for i, path in enumerate(damaged):
        path.write_bytes((b"", path.read_bytes()[:100], b"no program at all", b"\x80")[i])
    with caplog.at_level(logging.WARNING):
        second = make_engine(folder, compile_cache_dir=str(programs))
    warnings = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    stats = second.stats()
    num_compiled = stats["num_programs"] - stats["num_programs_loaded"]
    assert num_compiled == len(warnings) > 0
    assert all(any(str(path) in warning for path in damaged) for warning in warnings)
    assert serve(second, varied())[0] == varied_alone
    # They were written anew.
    third = make_engine(folder, compile_cache_dir=str(programs)).stats()
    assert third["num_programs_loaded"] == third["num_programs"]


def test_what_runs_in_a_quiet_moment_changes_nothing(folder: Path, varied_alone: Tokens) -> None:
    """Programs that became ready run with nothing in them, after a step that had rows: KV that prompts share stays."""
    engine = make_engine(folder)
    runner = engine.runner
    assert not engine.use_quiet_moment()
    serve(engine, varied()[:6])
    while engine.has_work:
        engine.step()
    runner._rehearses = True  # as on a GPU
    batch = runner._batch
    before = [np.asarray(buffer) for buffer in batch["kv_cache"].buffers], np.asarray(batch["state"].token_ids)
    assert runner._programs.has_unrehearsed
    assert not engine.use_quiet_moment()  # all programs are there
    assert not runner._programs.has_unrehearsed
    after = [np.asarray(buffer) for buffer in batch["kv_cache"].buffers], np.asarray(batch["state"].token_ids)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    tokens, _ = serve(engine, varied())
    assert tokens == varied_alone


def test_a_request_that_needs_a_program_of_its_own_waits_alone_and_fails_alone(
    tiny_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(EngineConfig(**tiny_options))
    awaited: Future[Any] = Future()
    broken: Future[Any] = Future()
    asked: dict[str, list[Future[Any]]] = {"waits": [awaited], "fails": [broken]}
    monkeypatch.setattr(core.runner, "programs_for", lambda request: asked.get(request.request_id.split("#")[0], []))
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True, n=2)
    for name in ("waits", "fails", "plain"):
        core.add(AddRequest(name, tiny.prompt(5), params, 0, 4))
    found: dict[str, list[int]] = {}
    reasons: dict[str, str | None] = {}

    def step() -> None:
        for output in core.step():
            assert isinstance(output, TokenOutput)
            found.setdefault(output.sequence_id, []).extend(output.token_ids)
            reasons[output.sequence_id] = output.finish_reason

    while reasons.get("plain#1") is None or core.loop.has_steps_in_flight:
        step()
    assert set(found) == {"plain", "plain#1"}
    assert core.has_work
    broken.set_exception(ValueError("no such instruction"))
    step()
    assert reasons["fails"] == reasons["fails#1"] == "error"
    awaited.set_result(None)
    while core.has_work:
        step()
    assert found["waits"] == found["plain"]
    assert reasons["waits#1"] == "length"
    core.close()
