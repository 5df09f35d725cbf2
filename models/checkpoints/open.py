"""The one door to every kind of checkpoint: what the user gave as `model` in, a `Checkpoint` out."""

from pathlib import Path

from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.checkpoints.gguf_config import ARCHITECTURES
from jaxpage.models.checkpoints.packaged import resolve_model
from jaxpage.models.checkpoints.safetensors import SafetensorsCheckpoint
from jaxpage.models.checkpoints.weightless import ConfigOnly, DummyWeights

FORMATS = {
    "safetensors": "a Hugging Face directory: config.json, and model.safetensors or shards with their index",
    "gguf": f"a GGUF file of llama.cpp, or a directory with one: {', '.join(ARCHITECTURES)}",
}
"""What holds weights, and what it looks like."""


def open_checkpoint(model: str) -> Checkpoint:
    """Opens a packaged model by name, a Hugging Face directory, or a GGUF file (or a directory that holds just one).

    Raises `ModelLoadError` that says what was looked for, or which file is missing or cut short.
    """
    path = resolve_model(model)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    from jaxpage.models.checkpoints.gguf import GgufCheckpoint

    return GgufCheckpoint(path)


def open_for_compiling(model: str) -> Checkpoint:
    """A checkpoint, or a directory with only a `config.json`. Raises `ModelLoadError`."""
    path = Path(model)
    if path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors*")):
        return ConfigOnly(path)
    return open_checkpoint(model)


def open_for_serving(model: str, load_format: str) -> Checkpoint:
    """A checkpoint or, where `load_format` is "dummy", a directory with a `config.json`. Raises `ModelLoadError`."""
    return DummyWeights(Path(model)) if load_format == "dummy" else open_checkpoint(model)
