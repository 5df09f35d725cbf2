"""The house rules of the design: who imports whom, where jit lives, how long a file may be, what lies at the top."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"jaxpage": "jaxpage", "ops": "jaxpage.ops", "models": "jaxpage.models", "server": "jaxpage.server"}
"""Folder at the top of the repository to the package it is installed as."""
SERVER_SEES = {"async_engine", "config", "server_config", "errors", "outputs", "sampling_params", "metrics"}
MODELS_SEE = {"errors"}
SERVER_STARTERS = {"jaxpage/cli.py", "jaxpage/__main__.py"}
JAX_FREE_MODULES = [
    *("wire", "sampling_params", "outputs", "config", "errors", "server_config", "options", "client"),
    *("speculative/config", "speculative/acceptance", "engine/loops", "engine/process", "engine/links"),
]
JAX_FREE_FOLDERS = ["jaxpage/scheduler", "jaxpage/requests", "jaxpage/text", "jaxpage/kv_cache", "jaxpage/structured"]
MAX_LINES = 600
MAX_FILES = 15
"""Side by side in a folder."""


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no sources in {folder}/"
    return files


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imports_of(file: Path, *, on_import: bool = False) -> Iterator[str]:
    """Every imported name in full: `from jaxpage.wire import Ready` gives "jaxpage.wire.Ready".

    `on_import`: only those that are imported when the file itself is.
    """
    folder, *inner = file.relative_to(ROOT).parent.parts
    package = ".".join([PACKAGES[folder], *inner])
    tree = ast.parse(file.read_text("utf-8"))
    for node in module_level(tree.body) if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{alias.name}" for alias in node.names)


def own_imports(file: Path) -> Iterator[str]:
    """What `file` imports of ours, as the part behind "jaxpage."; the package itself is ""."""
    for name in imports_of(file):
        root, _, rest = name.partition(".")
        if root == "jaxpage":
            yield rest.split(".")[0]


def module_name(file: Path) -> str:
    folder, *inner = file.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *inner]).removesuffix(".__init__")


def module_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run on import, those for type checkers alone left out."""
    for node in body:
        yield node
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from module_level(node.orelse)
            case ast.If() | ast.Try() | ast.With() | ast.ClassDef():
                for field in ("body", "handlers", "orelse", "finalbody"):
                    for inner in getattr(node, field, ()):
                        yield from module_level(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def jax_free_files() -> list[Path]:
    modules = [ROOT / "jaxpage" / f"{name}.py" for name in JAX_FREE_MODULES]
    return [*modules, *(file for folder in (*JAX_FREE_FOLDERS, "server") for file in sources(folder))]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_the_server_sees_only_the_doors_meant_for_it() -> None:
    allowed = SERVER_SEES | {"server"}
    wrong = [(name_of(file), name) for file in sources("server") for name in own_imports(file) if name not in allowed]
    assert wrong == []


def test_models_import_only_ops_and_the_shared_errors_of_ours() -> None:
    allowed = MODELS_SEE | {"models", "ops"}
    wrong = [(name_of(file), name) for file in sources("models") for name in own_imports(file) if name not in allowed]
    assert wrong == []


def test_ops_import_none_of_ours() -> None:
    wrong = [(name_of(file), name) for file in sources("ops") for name in own_imports(file) if name != "ops"]
    assert wrong == []


def test_only_the_command_line_imports_the_server() -> None:
    importers = {name_of(file) for file in sources("jaxpage") if "server" in own_imports(file)}
    assert importers <= SERVER_STARTERS


def test_modules_import_each_other_in_no_circle() -> None:
    """What only type checkers import does not count."""
    files = {module_name(file): file for folder in ("jaxpage", "models", "ops", "server") for file in sources(folder)}
    graph = {
        module: {
            found
            for name in imports_of(file, on_import=True)
            for found in (name, name.rpartition(".")[0])
            if found in files and found != "jaxpage"
        }
        for module, file in files.items()
    }
    assert graph["jaxpage.llm"] > {"jaxpage.client", "jaxpage.engine.links"}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def test_folders_are_imported_under_the_name_they_are_installed_as() -> None:
    wrong = [
        (name_of(file), name)
        for folder in PACKAGES
        for file in sources(folder)
        for name in imports_of(file)
        if name.split(".")[0] in {"ops", "models", "server"}
    ]
    assert wrong == []


def test_host_logic_and_the_server_do_not_import_jax() -> None:
    wrong = [
        (name_of(file), name)
        for file in jax_free_files()
        for name in imports_of(file)
        if name.split(".")[0] in {"jax", "jaxlib", "jax_triton"}
    ]
    assert wrong == []


def test_host_logic_and_the_server_do_not_load_jax_through_others() -> None:
    modules = []
    for file in jax_free_files():
        folder, *inner = file.relative_to(ROOT).with_suffix("").parts
        modules.append(".".join([PACKAGES[folder], *inner]).removesuffix(".__init__"))
    code = (
        "import importlib, sys\n"
        f"for module in {modules}:\n"
        "    importlib.import_module(module)\n"
        "    assert 'jax' not in sys.modules, module + ' loads jax'\n"
        "print('done')"
    )
    assert run_python(code) == "done\n"


def test_importing_jaxpage_loads_no_jax_and_no_transformers_and_sets_no_environment_variable() -> None:
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import jaxpage\n"
        "print(sorted({'jax', 'jaxlib', 'transformers'} & sys.modules.keys()), dict(os.environ) == before)"
    )
    assert run_python(code) == "[] True\n"


def test_jit_appears_only_where_programs_are_compiled() -> None:
    users = set()
    for file in (file for folder in PACKAGES for file in sources(folder)):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Attribute(ast.Name("triton"), "jit"):
                    pass  # a kernel
                case ast.Attribute(attr=word) | ast.Name(id=word) | ast.alias(name=word):
                    if word.split(".")[-1] in {"jit", "pjit"}:
                        users.add(name_of(file))
    # In models it has alike layers traced once, inside a program; it makes none.
    assert users == {"jaxpage/runner/programs/program.py", "models/run_layers.py"}


def test_one_file_imports_jax_triton() -> None:
    files = [file for folder in PACKAGES for file in sources(folder)]
    users = {name_of(file) for file in files if "jax_triton" in imports_of(file)}
    assert users == {"ops/triton_call.py"}


def test_a_cpu_engine_loads_no_triton() -> None:
    code = "import sys, jaxpage.runner.runner\nprint(sorted({'triton', 'jax_triton'} & sys.modules.keys()))"
    assert run_python(code) == "[]\n"


def test_no_file_is_too_long_to_read() -> None:
    lengths = {
        name_of(file): len(file.read_text("utf-8").splitlines())
        for folder in PACKAGES
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in {".py", ".js", ".css", ".html"}
    }
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_no_folder_is_too_full_to_survey() -> None:
    folders = [folder for package in PACKAGES for folder in (ROOT / package, *(ROOT / package).rglob("*/"))]
    counts = {name_of(folder): len(list(folder.glob("*.py"))) for folder in folders if folder.name != "__pycache__"}
    assert {name: count for name, count in counts.items() if count > MAX_FILES} == {}


def test_every_folder_with_sources_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    inits = [file for folder in PACKAGES for file in sources(folder) if file.name == "__init__.py"]
    found = [".".join((PACKAGES[top], *rest)) for top, *rest in (file.relative_to(ROOT).parent.parts for file in inits)]
    assert sorted(listed) == sorted(found)


def test_the_top_of_the_repository_holds_only_what_the_design_names() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    top = {line.strip('"').split("/")[0] for line in listed.splitlines()}
    files = {"pyproject.toml", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md"}
    folders = {"jaxpage", "ops", "models", "server", "tests", "scripts", "docs", "examples"}
    assert {name for name in top if not name.startswith(".")} - files - folders == set()
    assert all((ROOT / name).is_dir() for name in top & folders)


def test_no_two_test_files_have_the_same_name() -> None:
    """pytest imports them by it."""
    names = [file.name for file in (ROOT / "tests").rglob("*.py") if file.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


PRIVATE_WORDS = {
    "told": "packed, reported, or what it is",
    "at_once": "branch_free",
    "in_clients_words": "as_client_error",
    "draw_blueprint": "plan_engine",
    "spare_the_collector": "freeze_gc",
    "PatientProtocol": "QueuedProtocol",
    "Blueprint": "EnginePlan",
}
"""Names that were ours alone, and the field's words for them."""


def names_in(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.arg(name) | ast.keyword(arg=str(name)):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


@pytest.mark.parametrize("package", PACKAGES)
def test_names_are_the_fields_and_not_our_own(package: str) -> None:
    found = {(name_of(file), name) for file in sources(package) for name in names_in(file) if name in PRIVATE_WORDS}
    assert {f"{file}: {name}: say {PRIVATE_WORDS[name]}" for file, name in found} == set()
