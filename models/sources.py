"""A digest of everything that a user's own functions depend on, so that a change makes other programs.

In: functions. Out: a digest of the files they are written in, of the files that these import, directly or not, and of
the values that are bound to them. The standard library and installed packages count by their versions alone.
"""

import ast
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

_MAX_CONSTANT_BYTES = 1 << 24
_PLAIN = (str, int, float, bool, bytes, type(None), complex)


def digest_of(*functions: Callable[..., Any]) -> str:
    """See the module. Raises `ValueError` naming a bound value whose representation need not say all."""
    digest = hashlib.sha256()
    for function in functions:
        for part in _parts_of(function, set()):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _parts_of(value: Any, seen: set[int]) -> Iterator[str]:
    """What `value` is made of, as text."""
    if id(value) in seen:
        return
    seen.add(id(value))
    match value:
        case partial():
            yield from _parts_of((value.func, value.args, value.keywords), seen)
        case MethodType():
            yield from _parts_of((value.__func__, value.__self__), seen)
        case FunctionType():
            yield f"{value.__module__}.{value.__qualname__}"
            yield _digest_of_module(value.__module__)
            bound = [cell.cell_contents for cell in value.__closure__ or ()]
            yield from _parts_of((bound, value.__defaults__ or (), value.__kwdefaults__ or {}), seen)
        case type():
            yield f"{value.__module__}.{value.__qualname__}"
            yield _digest_of_module(value.__module__)
        case dict():
            for key, item in value.items():
                yield repr(key)
                yield from _parts_of(item, seen)
        case list() | tuple() | set() | frozenset():
            yield f"{type(value).__name__} of {len(value)}"
            for item in value:
                yield from _parts_of(item, seen)
        case _ if isinstance(value, _PLAIN):
            yield repr(value)
        case ModuleType():
            yield _digest_of_module(value.__name__)
        case _ if dataclasses.is_dataclass(value):
            yield from _parts_of(type(value), seen)
            yield from _parts_of({each.name: getattr(value, each.name) for each in dataclasses.fields(value)}, seen)
        case _ if hasattr(value, "__wrapped__"):  # a function behind a decorator of its own, such as `jax.jit`
            yield from _parts_of(value.__wrapped__, seen)
        case _ if hasattr(value, "dtype") and hasattr(value, "shape"):
            array = np.asarray(value)
            if array.nbytes > _MAX_CONSTANT_BYTES:
                raise ValueError(
                    f"a function is bound to an array of {array.shape} {array.dtype}, which would become a constant of "
                    f"every program, and {_MAX_CONSTANT_BYTES >> 20} MiB are the most: pass it as an argument"
                )
            yield f"{array.shape} {array.dtype} {hashlib.sha256(array.tobytes()).hexdigest()}"
        case _:
            raise ValueError(
                f"a function is bound to {value!r} ({type(value).__name__}), and nobody can tell when compiled "
                "programs are out of date: give a key that changes with it"
            )


@cache
def _digest_of_module(name: str) -> str:
    """Of a module's file and of those that it imports."""
    digest = hashlib.sha256()
    for part in sorted(_closure_of(name)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _closure_of(name: str) -> set[str]:
    """A module and all that it imports, each as what changes when it does."""
    found: dict[str, str] = {}
    todo = [name]
    while todo:
        module = todo.pop()
        if module in found:
            continue
        found[module] = text = _identity_of(module)
        file = _file_of(module)
        if file is not None and text.startswith("file "):
            todo += _imports_of(file, module)
    return set(found.values())


def _identity_of(module: str) -> str:
    """A file's digest, or the version of the package that it is installed with."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return "python " + sys.version
    if top == "jaxpage":  # its digest is part of the key of every program
        return "jaxpage"
    file = _file_of(module)
    if file is None:
        return f"module {module}"
    if _is_installed(file):
        return f"package {top} {_version_of(top)}"
    return f"file {module} {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _file_of(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError, AttributeError):
            return None
        origin = spec.origin if spec is not None and spec.has_location else None
    return Path(origin) if origin is not None and origin.endswith(".py") else None


def _is_installed(file: Path) -> bool:
    places = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(file.is_relative_to(place) for place in places)


@cache
def _version_of(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package, [package])
    try:
        return importlib.metadata.version(names[0])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _imports_of(file: Path, module: str) -> Iterator[str]:
    """Modules that a file names, wherever in it."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield base
            # A name may be a module inside the package.
            yield from (f"{base}.{alias.name}" for alias in node.names if _file_of(f"{base}.{alias.name}") is not None)
