"""Artifacts for GPUs, loaded and run by JAX's own client for GPUs, on devices that `described_driver/` describes.

Nothing is computed there, and no test here says that a number is right or that anything is fast: for that there is
`scripts/gpu_check`, on a GPU. What is shown is that an artifact which was compiled without a GPU is taken by a client
that has one, every program of it, and what the host asks of a driver from one step to the next: how many launches and
copies, and that it waits for nothing.
"""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from described import A_LITTLE_MEMORY, Found, compile_artifact, run_engine
from described_machine import HEADERS, WITHOUT_TUNING, build_libraries, environment_there, why_not

from jaxpage.aot.targets import TARGETS, GPUTarget
from jaxpage.engine.gpu_memory import POOL_SHARE
from jaxpage.ops.attention.launch import GPU
from jaxpage.ops.gemm_launch import choose_gemms, tuned_gemms

SHAPES = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
LATER = {"max_model_len": 64, "num_blocks": 20}
NUM_LAYERS, MANY_LAYERS = 2, 32
KINDS = ("greedy", "random", "any", "forked")
UPDATES = ("kernel_updates", "child_updates", "copy_updates", "fill_updates")


@pytest.fixture(scope="module", autouse=True)
def _has_what_it_takes() -> None:
    if reason := why_not():
        pytest.skip(reason)


def make_model(folder: Path, num_layers: int) -> Path:
    # Of its 2 KV heads, 8 GPUs have 4 copies each.
    config = tiny.TINY["llama"] | {"num_attention_heads": 8, "num_hidden_layers": num_layers}
    tiny.write_checkpoint(folder, config, tiny.make_weights(config))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("described") / "model", NUM_LAYERS)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("described") / "deep", MANY_LAYERS)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> Callable[[GPUTarget], Path]:
    """A folder with CUDA libraries of a machine that has such GPUs."""
    return lambda target: build_libraries(target, tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def h200(described: Callable[[GPUTarget], Path]) -> Path:
    return described(TARGETS["h200"])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, int], Path]:
    """What `jaxpage compile` makes of a model for so many H200."""

    def make(model: Path, num_gpus: int) -> Path:
        out = tmp_path_factory.mktemp("artifact") / "programs"
        return compile_artifact(out, model, "h200", SHAPES | LATER | {"tensor_parallel_size": num_gpus})

    return make


def run(
    libraries: Path,
    options: dict[str, Any],
    num_gpus: int = 1,
    kinds: tuple[str, ...] = (),
    **variables: str,
) -> Found:
    """What `described_engine.py` prints where these libraries are CUDA's.

    options: the engine's; variables: of the environment. JAX takes an engine's share of each GPU's memory by default.
    """
    options = {"tensor_parallel_size": num_gpus} | options
    return run_engine(libraries, options, kinds, **{"XLA_CLIENT_MEM_FRACTION": str(POOL_SHARE)} | variables)


def from_artifact(model: Path, programs: Path) -> dict[str, Any]:
    """Options of an engine that compiles nothing."""
    return SHAPES | {"model": str(model), "programs": str(programs)}


@pytest.fixture(scope="module")
def single(h200: Path, model: Path, artifact: Callable[[Path, int], Path]) -> tuple[Path, Found]:
    """An artifact for one H200, and what came of it there."""
    programs = artifact(model, 1)
    return programs, run(h200, from_artifact(model, programs), kinds=KINDS)


@pytest.fixture(scope="module")
def pair(h200: Path, model: Path, artifact: Callable[[Path, int], Path]) -> Found:
    """The same of two."""
    return run(h200, from_artifact(model, artifact(model, 2)), 2, KINDS, **A_LITTLE_MEMORY)


@pytest.fixture(scope="module", params=["single", "pair"])
def found(request: pytest.FixtureRequest) -> Found:
    it = request.getfixturevalue(request.param)
    result: Found = it if isinstance(it, dict) else it[1]
    return result


def test_a_gpu_client_finds_what_is_described(single: tuple[Path, Found]) -> None:
    target, (_, found) = TARGETS["h200"], single
    assert found["devices"] == [[target.name, "9.0", target.num_sms]]
    # Of the memory, JAX takes what an artifact is made for, in pages of 2 MiB.
    assert 0 <= found["bytes_limit"] - target.pool_bytes < 2 * 2**20


def check_that_all_is_loaded(found: Found) -> None:
    stats = found["stats"]
    assert stats["num_programs_loaded"] == stats["num_programs"] == stats["num_programs_wanted"] > 10
    assert found["traces"] == {}
    assert found["num_compiles"] == 0


def test_every_program_is_loaded_and_none_is_traced_or_compiled(found: Found) -> None:
    check_that_all_is_loaded(found)


def test_every_program_for_eight_gpus_is_loaded(h200: Path, model: Path, artifact: Callable[[Path, int], Path]) -> None:
    """All of them run there, and a greedy step waits for no device either."""
    found = run(h200, from_artifact(model, artifact(model, 8)), 8, ("greedy",), **A_LITTLE_MEMORY)
    assert len(found["devices"]) == 8
    check_that_all_is_loaded(found)
    for request in ("later", "lagging"):
        check_that_no_step_waits(found["greedy"][request])


def test_another_gpu_refuses_an_artifact_by_name(
    single: tuple[Path, Found], model: Path, described: Callable[[GPUTarget], Path]
) -> None:
    refused = run(described(TARGETS["a100"]), from_artifact(model, single[0]))["refused"]
    assert "compiled for devices '1 x NVIDIA H200', and here is '1 x NVIDIA A100-SXM4-80GB'" in refused


@pytest.fixture(scope="module")
def assembler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an assembler that XLA finds first on PATH, and that writes a line to "calls" for each call."""
    folder = tmp_path_factory.mktemp("assembler")
    script = folder / "ptxas"
    script.write_text(f'#!/bin/sh\necho called >>{folder}/calls\nexec {HEADERS.parent}/bin/ptxas "$@"\n')
    script.chmod(0o700)
    return folder


def test_an_artifact_is_machine_code_and_needs_no_assembler(
    single: tuple[Path, Found], compiled_there: Found, h200: Path, model: Path, assembler: Path
) -> None:
    """Of Triton's kernels, too. An engine that compiles for the device it is on calls the assembler many times."""
    calls = assembler / "calls"
    assert calls.read_text().count("called") > 20
    calls.unlink()
    path = f"{assembler}{os.pathsep}{os.environ['PATH']}"
    found = run(h200, from_artifact(model, single[0]), kinds=("greedy",), PATH=path, **A_LITTLE_MEMORY)
    check_that_all_is_loaded(found)
    assert found["greedy"]["later"]["num_tokens"] == 16
    assert not calls.exists()


def check_that_no_step_waits(decoded: Found) -> None:
    assert [step["waits"] for step in decoded["steps"]] == [0] * 9


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_step_waits_for_no_device(found: Found, kind: str) -> None:
    for request in ("later", "lagging"):
        check_that_no_step_waits(found[kind][request])


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_request_finds_all_code_on_the_devices(found: Found, kind: str) -> None:
    """Every program has run before the engine was ready, and there JAX has waited for constants to be there."""
    assert found["ready"]["modules"] > 100
    assert found["ready"]["waits"] > 0
    assert found[kind]["first"]["all"]["modules"] == 0
    check_that_no_step_waits(found[kind]["first"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_sends_off_a_step_before_a_device_has_begun_the_one_before(found: Found, kind: str) -> None:
    """They run a launch only when the next step's has come: a host that waits in between waits for ever.

    So much is shown by that it came through, and here that they did lag.
    """
    lagging = found[kind]["lagging"]
    launches = [step["launches"] + step["graphs"] for step in lagging["steps"][3:]]
    assert all(waiting >= number > 0 for waiting, number in zip(lagging["waiting"][1:], launches, strict=True))
    assert lagging["num_tokens"] == found[kind]["later"]["num_tokens"] == (32 if kind == "forked" else 16)


@pytest.mark.parametrize("kind", KINDS)
def test_every_decode_step_is_asked_for_alike(found: Found, kind: str) -> None:
    """Nothing goes to a device unless a row begins a block, and a token for each row comes back; with
    log-probabilities, four more arrays."""
    later = found[kind]["later"]
    asked = [{name: step[name] for name in ("launches", "graphs", "in_graphs", "copies_in")} for step in later["steps"]]
    assert asked[3:] == [asked[3]] * 6
    assert asked[3]["copies_in"] == 0
    assert later["all"]["copies_out"] == later["num_steps"] * (5 if kind == "any" else 1)
    assert later["all"]["modules"] == 0


def test_what_else_is_asked_for_is_done(found: Found) -> None:
    """Log-probabilities come with every token; a fork copies the block that both sequences go on in."""
    for request in ("later", "lagging"):
        assert found["any"][request]["num_logprobs"] == 16
        assert [step["block_copies"] for step in found["forked"][request]["steps"]] == [0, 0, 1] + [0] * 6


@pytest.fixture(scope="module")
def compiled_there(h200: Path, model: Path, assembler: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """An engine without an artifact: its programs are compiled for the device by the client that has it."""
    options = {"model": str(model), "max_num_seqs": 1, "max_num_batched_tokens": 16, **LATER}
    options |= {"compile_cache_dir": str(tmp_path_factory.mktemp("cache")), "background_compile": False}
    path = f"{assembler}{os.pathsep}{os.environ['PATH']}"
    return run(h200, options, kinds=("greedy",), XLA_FLAGS=WITHOUT_TUNING, PATH=path)


def test_an_engine_compiles_for_the_device_it_is_on(compiled_there: Found) -> None:
    stats = compiled_there["stats"]
    assert stats["num_programs"] == stats["num_programs_wanted"] == compiled_there["num_compiles"] > 10
    assert stats["num_programs_loaded"] == stats["num_recompiles"] == 0


def test_what_was_compiled_there_serves_as_an_artifact_does(compiled_there: Found) -> None:
    for request in ("first", "later", "lagging"):
        served = compiled_there["greedy"][request]
        check_that_no_step_waits(served)
        assert served["num_tokens"] == 16
    step = compiled_there["greedy"]["later"]["steps"][-1]
    assert (step["launches"], step["graphs"], step["copies_in"]) == (0, 2, 0)


def test_the_tiles_that_xla_takes_on_a_device_are_kept_for_artifacts(h200: Path, model: Path, tmp_path: Path) -> None:
    """Which are best there means nothing, as nothing takes any time; what is kept is what XLA took."""
    script = Path(__file__).parents[2] / "scripts/tune_gemms.py"
    run_it = (
        f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from described_engine import see_devices\nsee_devices()\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with_arguments = f"import sys; sys.argv = sys.argv[1:]\n{run_it}"
    command = [sys.executable, "-c", with_arguments, script, "--model", model, "--tokens", "16", "--out", tmp_path]
    done = subprocess.run(command, env=environment_there(h200, 1, **A_LITTLE_MEMORY), capture_output=True, text=True)
    assert "1 launches in" in done.stdout, done.stderr
    (launch,) = tuned_gemms(GPU(TARGETS["h200"].num_sms, 90), tmp_path).values()
    assert min(dataclasses.astuple(launch)[:5]) >= 1
    assert choose_gemms(16, 4096, 2, GPU(TARGETS["h200"].num_sms, 90), {16: launch})[0].tokens == launch.tokens


def test_a_greedy_step_is_two_graphs(single: tuple[Path, Found]) -> None:
    step = single[1]["greedy"]["later"]["steps"][-1]
    assert (step["launches"], step["graphs"]) == (0, 2)
    assert step["in_graphs"] < 40


def test_devices_exchange_two_sums_per_layer(pair: Found) -> None:
    """And one for the embedding; each draw finds the best token of all, and what it is."""
    step = pair["greedy"]["later"]["steps"][-1]
    assert step["collectives"] == 2 * (2 * NUM_LAYERS + 1 + 2)


@pytest.fixture(scope="module")
def deep(h200: Path, deep_model: Path, artifact: Callable[[Path, int], Path]) -> Found:
    """What came of greedy requests to a model of as many layers as a large one has."""
    return run(h200, from_artifact(deep_model, artifact(deep_model, 1)), 1, ("greedy", "arriving"), **A_LITTLE_MEMORY)


def steady(found: Found, request: str) -> list[dict[str, int]]:
    """The steps of a request in which nothing begins and nothing ends."""
    taken: list[dict[str, int]] = found["greedy"][request]["steps"][3:]
    return taken


@pytest.mark.parametrize("request_name", ["first", "later", "lagging"])
def test_a_steady_step_leaves_its_graphs_as_they_are(deep: Found, request_name: str) -> None:
    """All that it works in is where it was, but for the tokens of the step before, which are on their way to the host:
    two nodes write them. Nothing is sent, and a graph that changes costs the host a look at each of its nodes."""
    assert deep["greedy"][request_name]["all"]["graphs_made"] == 0
    for step in steady(deep, request_name):
        assert (step["launches"], step["graphs"], step["waits"], step["graphs_made"]) == (0, 2, 0, 0)
        assert step["in_graphs"] > 10 * MANY_LAYERS
        assert sum(step[kind] for kind in UPDATES) <= 4
        assert step["copies_in"] == 0
    # One is counted when the devices come to it, which may be a step later.
    assert sum(step["copies_out"] for step in steady(deep, request_name)) <= len(steady(deep, request_name)) + 1


def test_what_is_sent_for_a_block_that_begins_lies_where_the_last_was(deep: Found) -> None:
    for request in ("first", "later", "lagging"):
        rest = [step for step in deep["greedy"][request]["rest"] if step["graphs"]]
        assert sum(step["copies_in"] for step in rest) == 1
        assert all(sum(step[kind] for kind in UPDATES) <= 4 for step in rest)


def test_a_program_that_becomes_ready_costs_one_step_its_graphs(deep: Found) -> None:
    """XLA throws all graphs away when a program is loaded. Those that serve are made again once, and no others: the
    draw's at once, the step's when it has run without."""
    steps = deep["arriving"]["busy"]["steps"]
    assert [step["graphs_made"] for step in steps] == [0, 0, 0, 0, 1, 1, 0, 0]
    assert [step["launches"] > 0 for step in steps] == [False] * 4 + [True] + [False] * 3


def test_a_quiet_moment_leaves_requests_nothing_of_a_new_program_to_wait_for(deep: Found) -> None:
    idle = deep["arriving"]["idle"]
    assert [step["graphs_made"] for step in idle["steps"]] == [0] * 8
    assert [step["modules"] for step in idle["steps"]] == [0] * 8
    check_that_no_step_waits({"steps": [*idle["steps"], idle["steps"][-1]]})
    assert idle["num_tokens"] == 16


@pytest.fixture(scope="module")
def deep_pair(h200: Path, deep_model: Path, artifact: Callable[[Path, int], Path]) -> Found:
    """The same on two GPUs."""
    return run(h200, from_artifact(deep_model, artifact(deep_model, 2)), 2, ("greedy",), **A_LITTLE_MEMORY)


@pytest.mark.parametrize("request_name", ["first", "later", "lagging"])
def test_collectives_are_part_of_the_graphs(deep_pair: Found, request_name: str) -> None:
    """Two launches for each GPU. What NCCL asks for is captured anew in every step, as XLA wants it: a child graph for
    each of them is replaced."""
    num_gpus = len(deep_pair["devices"])
    for step in steady(deep_pair, request_name):
        assert (step["launches"], step["graphs"], step["waits"], step["graphs_made"]) == (0, 2 * num_gpus, 0, 0)
        assert step["collectives"] == num_gpus * (2 * MANY_LAYERS + 1 + 2)
        assert step["child_updates"] <= step["collectives"]
        assert step["kernel_updates"] + step["copy_updates"] + step["fill_updates"] <= 4 * num_gpus
        assert step["copies_in"] == 0
