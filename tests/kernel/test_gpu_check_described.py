"""`gpu_check` on a GPU that `described_driver/` describes: whole, and with a fault in every part.

Nothing is computed there: every check of numbers says wrong, and no time means anything. What is shown is that all
parts run through JAX's client for GPUs, and that a table comes out whatever becomes of them.
"""

import json
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from described_machine import WITHOUT_TUNING, build_libraries, environment_there, why_not

from jaxpage.aot.targets import TARGETS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check"
ENDS = {"raise": "ValueError: a fault in ", "kill": "the process ended with SIGKILL", "exit": "ended with status 7"}
PARTS = (
    *("machine", "engine", "draws", "modes", "programs", "trace", "compile_artifact", "peaks", "attention"),
    *("kv_writes", "tokens", "decode_attention", "prefill_attention", "products", "artifact", "tensor_parallel"),
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    return build_libraries(TARGETS["h200"], tmp_path_factory.mktemp("libraries"))


def run(libraries: Path, out: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    environment = environment_there(
        libraries,
        XLA_FLAGS=WITHOUT_TUNING,
        XLA_PYTHON_CLIENT_MEM_FRACTION="0.01",
        PYTHON=sys.executable,
        **variables,
    )
    done = subprocess.run(
        [SCRIPT, "--sizes", "small", "--out", out, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    assert (out / "verdicts.txt").read_text() in done.stdout
    return found


def test_all_of_it_runs_and_its_checks_see_that_nothing_was_computed(libraries: Path, tmp_path: Path) -> None:
    found = run(libraries, tmp_path, "--before", "check_plug_in:before")
    assert {part["status"] for part in found["parts"].values()} == {"done"}, found["verdicts"]
    assert list(found["parts"]) == list(PARTS)
    wrong = {verdict["part"] for verdict in found["verdicts"] if verdict["verdict"] == "wrong"}
    assert wrong == {"attention", "kv_writes", "tokens"}
    rows = {name: part["rows"] for name, part in found["parts"].items()}
    assert all(row["num_products"] == 5 and row["configs"] for row in rows["programs"])
    assert rows["artifact"][0]["num_programs_loaded"] == rows["engine"][0]["num_programs"] > 10
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("logs.gz", "programs.tar.gz", "results.json", "trace.tar.gz", "verdicts.txt")
    ]


def test_a_table_names_the_fault_of_every_part(libraries: Path, tmp_path: Path) -> None:
    faults = dict(zip(PARTS, cycle(ENDS), strict=False))
    told = ",".join(f"{part}={fault}" for part, fault in faults.items())
    found = run(libraries, tmp_path, "--before", "check_plug_in:fault", DESCRIBED_FAULTS=told)
    verdicts = {verdict["part"]: verdict for verdict in found["verdicts"]}
    assert list(verdicts) == list(PARTS)
    for part, fault in faults.items():
        assert verdicts[part]["verdict"] == "error"
        assert ENDS[fault] in verdicts[part]["measured"]
        assert verdicts[part]["do"]


def test_a_part_that_hangs_is_killed_when_time_is_over(libraries: Path, tmp_path: Path) -> None:
    arguments = ("--only", "machine,peaks", "--seconds", "6", "--before", "check_plug_in:fault")
    found = run(libraries, tmp_path, *arguments, DESCRIBED_FAULTS="machine=hang")
    machine, peaks = (found["parts"][name] for name in ("machine", "peaks"))
    assert machine["why"].startswith("killed after")
    assert peaks["why"] == "no time is left"
