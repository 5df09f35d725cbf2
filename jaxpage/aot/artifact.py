"""A folder of compiled programs that is made on one machine and served from on others: see `jaxpage compile`.

Beside the programs, as `ProgramCache` keeps them, stands a manifest: what they were compiled for and with, so that a
machine where they cannot run says why.
"""

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_cache import environment

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_RESOLVED = ("dtype", "max_model_len", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
"""Options that the engine settles where they are not given; with an artifact, its own."""
_SIZES = ("block_size", "tensor_parallel_size")
_OPTIONS = (*_RESOLVED, *_SIZES, "speculative_config")


def write_manifest(folder: Path, engine_plan: EnginePlan) -> dict[str, Any]:
    """Complete an artifact. Returns the options that it must be served with."""
    options = _options_of(engine_plan)
    manifest = {"environment": environment(engine_plan.mesh), "options": options, "model": _model_digest(engine_plan)}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    return options


def adopt_options(config: EngineConfig, mesh: Mesh) -> EngineConfig:
    """`config` with what an artifact was compiled with, where it leaves a choice.

    Raises `ConfigError` that names what differs: the devices, a version, an option.
    """
    assert config.programs is not None
    manifest = _read(Path(config.programs))
    for name, here in environment(mesh).items():
        if (there := manifest["environment"].get(name)) != here:
            raise ConfigError(
                f"the programs in {config.programs} are compiled for {name} {there!r}, and here is {here!r}: compile "
                "them for this, or serve without --programs"
            )
    options: dict[str, Any] = manifest["options"]
    for name in _OPTIONS:
        given = _value_of(config, name)
        if given != options[name] and not (name in _RESOLVED and given in (None, "auto")):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} is {given}, and the programs in {config.programs} are compiled for {options[name]}: give "
                f"{flag} {options[name]}, or compile them again"
            )
    return dataclasses.replace(config, **options)


def check_model(folder: str, engine_plan: EnginePlan) -> None:
    """Raises `ConfigError` where an artifact is of another model."""
    if _read(Path(folder))["model"] != _model_digest(engine_plan):
        raise ConfigError(
            f"the programs in {folder} are of another model than {engine_plan.config.model}: compile them for this one"
        )


def _options_of(engine_plan: EnginePlan) -> dict[str, Any]:
    settled = {
        "dtype": str(engine_plan.model.dtype),
        "max_model_len": engine_plan.max_model_len,
        "num_blocks": engine_plan.num_blocks,
    }
    return {name: settled.get(name, _value_of(engine_plan.config, name)) for name in _OPTIONS}


def _value_of(config: EngineConfig, name: str) -> Any:
    value = getattr(config, name)
    return value if value is None or isinstance(value, int) else str(value)


def _model_digest(engine_plan: EnginePlan) -> str:
    return hashlib.sha256(engine_plan.model.key.encode()).hexdigest()


def _read(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no programs of `jaxpage compile`: {error}") from error
    return manifest
