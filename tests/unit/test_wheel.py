"""The wheel holds all that lies in the folders of sources, under the names that it is imported by."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"jaxpage": "jaxpage", "ops": "jaxpage/ops", "models": "jaxpage/models", "server": "jaxpage/server"}
"""Folder at the top of the repository to the folder that it is installed as."""
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, as the build leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in PACKAGES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(source)], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    (file,) = source.glob("*.whl")
    return zipfile.ZipFile(file)


def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    sources = {
        f"{installed}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in PACKAGES.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert sorted(packed) == sorted(sources)
    assert {"jaxpage/py.typed", "jaxpage/server/web/index.html"} <= packed


def test_the_wheel_brings_the_command_and_its_license(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert "jaxpage = jaxpage.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    assert wheel.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
