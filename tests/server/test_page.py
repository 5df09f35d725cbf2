"""The page's files: where and under which headers they are served, that they need nobody else, and are in wheels."""

import re
import shutil
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
from conftest import asgi
from fake_engine import FakeEngine
from starlette.applications import Starlette

from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "server" / "web").iterdir())
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Links(HTMLParser):
    """What a document refers to, and what it says that a strict policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attributes if name in ("src", "href", "action")]
        self.inline += [name for name, _ in attributes if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in dict(attributes)):
            self.inline.append(tag)


def test_the_page_is_there_while_the_model_loads_and_may_load_nothing_from_elsewhere() -> None:
    response = asgi(FakeEngine(), "GET", "/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy.pop("require-trusted-types-for") == "'script'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert set(policy.values()) == {"'none'", "'self'"}
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_its_files_are_served_as_what_they_are_and_only_once(client: httpx.Client, file: Path) -> None:
    response = client.get(f"/web/{file.name}")
    assert response.content == file.read_bytes()
    assert response.headers["content-type"].split(";")[0] == TYPES[file.suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    again = client.get(f"/web/{file.name}", headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/web/", "/web/none.js", "/web/../page.py", "/web/%2e%2e/page.py", "/index.html"])
def test_nothing_else_is_served(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json().keys() == {"error"}


def test_the_document_refers_only_to_its_own_files_by_relative_paths() -> None:
    document = Links()
    document.feed((ROOT / "server" / "web" / "index.html").read_text("utf-8"))
    assert {ROOT / "server" / link for link in document.links} < set(FILES)
    assert document.inline == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_names_an_outside_address(file: Path) -> None:
    text = file.read_text("utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?:|wss?:|[\"'(]//|@import", text) == []


def test_modules_import_only_each_other() -> None:
    for file in FILES:
        if file.suffix == ".js":
            for name in re.findall(r"""(?:from|import)\s*\(?["']([^"']+)""", file.read_text("utf-8")):
                assert file.parent / name in FILES, f"{file.name} imports {name}"


@pytest.mark.parametrize("path", ["/", "/live", "/web/app.js"])
def test_all_of_it_can_be_left_out(path: str) -> None:
    app: Starlette = build_app(FakeEngine(), ServerConfig(web_page=False))  # type: ignore[arg-type]
    assert asgi(FakeEngine(), "GET", path, app=app).status_code == 404
    assert asgi(FakeEngine(), "GET", path).status_code == 200


def test_a_wheel_holds_the_page(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="wheels are built with setuptools, which is not installed")
    copy = tmp_path / "source"
    for folder in ("jaxpage", "ops", "models", "server"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(copy / built.stdout.splitlines()[-1]) as wheel:
        assert {f"jaxpage/server/web/{file.name}" for file in FILES} <= set(wheel.namelist())
