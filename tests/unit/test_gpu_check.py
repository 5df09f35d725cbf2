"""The check of a GPU machine, as far as a machine without one can run it: all parts, on tiny shapes and plain XLA.

One part is killed on the way. The verdicts are tested by themselves.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_checks.parts import PARTS
from gpu_checks.products import products_of
from gpu_checks.tracing import covered
from gpu_checks.verdicts import Found, Verdict, is_right, judge

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check"


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    settings = {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", **variables}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=os.environ | settings)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("check")
    arguments = ("--dry-run", "--out", str(out), "--before", "check_plug_in:fault")
    done = run(*arguments, DESCRIBED_FAULTS="modes=kill")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the numbers mean nothing" in done.stdout
    result: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert (out / "verdicts.txt").read_text() in done.stdout
    return result


def rows_of(found: dict[str, Any], *parts: str) -> list[dict[str, Any]]:
    return [row for part in parts for row in found["parts"][part]["rows"]]


def test_every_part_but_one_that_is_killed_is_done(found: dict[str, Any]) -> None:
    assert list(found["parts"]) == [part.name for part in PARTS]
    status = {name: part["status"] for name, part in found["parts"].items()}
    assert status.pop("modes") == "error"
    assert set(status.values()) == {"done"}
    (wrong,) = [it for it in found["verdicts"] if it["verdict"] in ("wrong", "error")]
    assert (wrong["part"], wrong["measured"]) == ("modes", "the process ended with SIGKILL")


def test_what_comes_behind_in_the_same_process_goes_on_from_compiled_programs(found: dict[str, Any]) -> None:
    assert [row["case"] for row in rows_of(found, "programs")] == ["step-2-2-1", "step-16-2-16"]
    assert found["parts"]["programs"]["seconds"] < found["parts"]["engine"]["seconds"]


def test_kernels_are_compared_by_their_errors_on_new_numbers(found: dict[str, Any]) -> None:
    compared = rows_of(found, "attention", "kv_writes")
    assert len({row["seed"] for row in compared}) == len(compared)
    assert all(row["error"] < 1e-2 for row in compared)


def test_an_artifact_serves_beside_what_was_compiled(found: dict[str, Any]) -> None:
    start, *rows = rows_of(found, "artifact")
    assert start["num_programs_loaded"] == start["num_programs"] > 10
    assert sum(row["case"].startswith("decode of") for row in rows) == 2
    assert sum(row["case"].startswith("beside") for row in rows) == 2


def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no GPU; try --dry-run" in done.stderr


def test_what_there_is_no_time_for_is_told_and_not_called_right(tmp_path: Path) -> None:
    done = run("--dry-run", "--seconds", "0", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "no time is left" in done.stdout


def one(row: dict[str, Any]) -> Verdict:
    """Of a row, on a card that moves 1 byte and computes 10 operations a second."""
    peaks = {"peak": "bytes", "value": 1, "scale": 1}, {"peak": "flops", "value": 10, "scale": 1}
    found = {"peaks": Found("done", rows=list(peaks)), "part": Found("done", rows=[row])}
    return judge(found)[-1]


def test_a_time_is_slow_beyond_the_share_of_the_peak_that_it_should_reach() -> None:
    for moved in ({"bytes": 8}, {"bytes": 8, "flops": 79}, {"bytes": 7, "flops": 80}):
        assert one({"seconds": 17, "share": 0.5, **moved}).verdict == "ok"
        assert one({"seconds": 18, "share": 0.5, **moved}).verdict == "slow"
    assert one({"seconds": 18, "share": 0.5, "bytes": 8, "fixed": 1}).verdict == "ok"
    assert one({"seconds": float("nan"), "share": 0.5, "bytes": 8}).verdict == "slow"


def test_slow_is_not_wrong_and_everything_else_that_is_not_ok_is() -> None:
    slow = one({"value": 1, "at_least": 2})
    assert (slow.verdict, bool(slow.do), is_right([slow])) == ("slow", False, True)
    assert is_right([one({"skipped": "there is one device"})])
    assert not is_right([one({"ok": False, "error": 1.0})])
    for status in ("error", "skipped", "waiting", "running"):
        assert not is_right(judge({"engine": Found(status, "killed")}))


def test_products_are_read_with_their_configuration() -> None:
    text = """
  %gemm.1 = bf16[32,512]{1,0} fusion(%a, %b), kind=kCustom, backend_config={"fusion_backend_config":{"kind":\
"__triton_nested_gemm_fusion","block_level_fusion_config":{"num_warps":"2","output_tiles":[{"sizes":["8","16"]}],\
"num_stages":1,"is_tma_allowed":false}}}
  %loop.1 = f32[8]{0} fusion(%a), kind=kLoop
  ROOT %cublas = (bf16[2,4]{1,0}, s8[64]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
"""
    shapes = [(it.name, it.shape, it.config) for it in products_of(text)]
    assert shapes == [
        ("gemm.1", "bf16[32,512]", "num_stages 1 num_warps 2 output_tiles [{sizes:[8,16]}]"),
        ("cublas", "(bf16[2,4], s8[64])", "__cublas$gemm"),
    ]


def test_what_overlaps_is_busy_once() -> None:
    assert covered([(5, 6), (0, 3), (1, 2), (2, 4)]) == 5
