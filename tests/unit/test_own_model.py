"""Models and proposers of a user's own: served in every way, with the same tokens whatever cache and batch do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[1] / "examples"
GOLDEN = FOLDER.parent / "golden"
PROMPT = [5, 9, 2, 41, 7]
DRAFTS = {"num_speculative_tokens": 3}
SPECULATIVE: dict[str, dict[str, Any] | None] = {
    "no drafts": None,
    "n-gram drafts": {"method": "ngram", "prompt_lookup_min": 1, **DRAFTS},
    "drafts at random": {"method": "own_proposer:AtRandom", **DRAFTS},
    "drafts of hidden states": {"method": "own_proposer:NearestEmbedding", **DRAFTS},
}
MODELS = ("own_model:make", "own_hybrid:make", "own_hybrid:make_recurrent")
SERVED = [(model, drafts) for model in MODELS for drafts in list(SPECULATIVE)[:3]]
SERVED.append(("own_model:make", "drafts of hidden states"))  # the others give no such states
SAMPLE = (("own_model:make", "no drafts"), ("own_hybrid:make", "drafts at random"))
"""Served unless a test run is a full one."""


def environment(*folders: Path) -> dict[str, str]:
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(*command: str | Path, path: tuple[Path, ...] = (EXAMPLES, GOLDEN)) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment(*path))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "drafts" in metafunc.fixturenames:
        metafunc.parametrize(("model", "drafts"), SERVED if metafunc.config.getoption("--full") else SAMPLE)


def test_nothing_changes_a_token_of_a_users_own_model(model: str, drafts: str, programs: Path) -> None:
    """Prefix cache, chunks, preemption, several sequences, beams, company, three modes and drafts."""
    found = json.loads(run(FOLDER / "own_matrix.py", model, programs, json.dumps(SPECULATIVE[drafts])))
    assert found["different"] == []
    assert found["count"] > 80
    assert found["distinct"] > 30
    assert (found["drafts"] > 0) == (SPECULATIVE[drafts] is not None)
    assert (found["kept"] > 0) or drafts != "drafts at random"
    assert sum(found["cached"]) > 100


def options_of(programs: Path) -> dict[str, Any]:
    return {
        "tokenizer": "smollm2-135m",
        "max_model_len": 128,
        "num_blocks": 80,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "background_compile": False,
        "compile_cache_dir": str(programs),
    }


SCRIPT = """
import json, sys
from jaxpage import LLM, SamplingParams
from own_model import make

prompt, options = json.loads(sys.argv[1]), json.loads(sys.argv[2])
params, found = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
for model, multiprocess in ((make(), False), ("own_model:make", False), ("own_model:make", True)):
    with LLM(model, multiprocess=multiprocess, **options) as llm:
        found.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
        loaded = llm.stats["num_programs_loaded"] == llm.stats["num_programs"]
print(json.dumps({"tokens": found, "loaded": loaded}))
"""


def test_a_model_gives_the_same_as_a_value_and_by_its_import_path(programs: Path) -> None:
    options = options_of(programs)
    found = json.loads(run("-c", SCRIPT, json.dumps(PROMPT), json.dumps(options)))
    assert found["tokens"][0] == found["tokens"][1] == found["tokens"][2]
    assert found["loaded"], "a model by its import path has the programs that it had as a value"


KEY = "from own_model import make; print(make(1).key)"


def key_of(folder: Path) -> str:
    return run("-c", KEY, path=(folder,)).strip()


def test_a_line_of_the_model_or_of_what_it_imports_changes_the_key_of_its_programs(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "own_model.py", tmp_path)
    source = (tmp_path / "own_model.py").read_text("utf-8")
    before = key_of(tmp_path)
    assert key_of(tmp_path) == before
    (tmp_path / "own_model.py").write_text(source.replace("GAIN = 4.0", "GAIN = 4.5"), "utf-8")
    assert key_of(tmp_path) != before

    (tmp_path / "helpers.py").write_text("def half(x):\n    return x / 2\n", "utf-8")
    changed = source.replace("import numpy as np\n", "import numpy as np\nfrom helpers import half\n")
    (tmp_path / "own_model.py").write_text(changed, "utf-8")
    with_half = key_of(tmp_path)
    (tmp_path / "helpers.py").write_text("def half(x):\n    return x / 2.5\n", "utf-8")
    assert key_of(tmp_path) not in (before, with_half)


def test_each_file_of_a_user_is_short() -> None:
    files = [EXAMPLES / name for name in ("own_model.py", "own_hybrid.py", "own_proposer.py")]
    assert all(len(file.read_text("utf-8").splitlines()) < 120 for file in files)
