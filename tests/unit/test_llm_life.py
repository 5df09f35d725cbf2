"""Where an LLM may be made, and that it goes: after JAX has started, in a forked child, by `del`, by an exit."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from jaxpage.engine import process
from jaxpage.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_compiles")
GUARD_SECONDS = 300

HEAD = """
import json, sys
from jaxpage import LLM, SamplingParams
OPTIONS = json.loads(sys.argv[1])

def run(name):
    llm = LLM(**OPTIONS)
    output = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    print(name, output[0].outputs[0].token_ids, flush=True)
    return llm
"""
SCRIPTS = {
    "after JAX has started": """
import jax
jax.devices()
run("first").close()
""",
    "in a forked child": """
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=run, args=("first",))
child.start()
child.join()
assert child.exitcode == 0, child.exitcode
""",
    "in a forked child of a process that has one": """
import multiprocessing
llm = run("first")
child = multiprocessing.get_context("fork").Process(target=run, args=("second",))
child.start()
child.join()
assert child.exitcode == 0, child.exitcode
assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
""",
    "deleted": """
import os
llm = run("first")
pid = llm.engine_pid
del llm
try:
    os.kill(pid, 0)
except ProcessLookupError:
    pass
else:
    raise AssertionError("the engine goes on")
run("second")
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_d08_an_llm_works_wherever_it_is_made_and_leaves_with_its_maker(
    tiny_options: dict[str, Any], tmp_path: Path, name: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[name])
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(tiny_options)],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    results = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(results) == SCRIPTS[name].count('"first"') + SCRIPTS[name].count('"second"')
    assert len(set(results)) == 1
    assert list(tmp_path.glob("jaxpage-*")) == [], "the folder of the sockets is gone, too"


def test_a_temporary_folder_with_a_long_name_is_no_hindrance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    folder = process._socket_folder()
    assert len(str(folder / "requests")) < 100
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: (_ for _ in ()).throw(PermissionError()))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        process._socket_folder()


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (34, "SIGRTMIN"), (40, "signal 40")])
def test_signals_are_named_also_those_without_a_name(number: int, name: str) -> None:
    assert process._signal_name(number) == name
