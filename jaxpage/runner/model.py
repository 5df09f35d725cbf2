"""What an engine serves: a model that is given, or made on its devices from what the options name."""

import dataclasses
import inspect
from collections.abc import Callable

from jax.sharding import Mesh

from jaxpage.aot.artifact import adopt_options
from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError, JaxpageError
from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.checkpoints.open import open_for_compiling, open_for_serving
from jaxpage.models.registry import serve_checkpoint
from jaxpage.models.served_model import ServedModel
from jaxpage.models.user_code import is_import_path, load
from jaxpage.runner.devices import join_processes, make_mesh
from jaxpage.runner.resolve import resolve_dtype

_OPTION = "--model"


def open_model(config: EngineConfig, given: ServedModel | None = None) -> tuple[EngineConfig, ServedModel]:
    """The model of an engine, and its options with what that settles: the number of devices, and what an artifact says.

    Raises `ModelLoadError` or `ConfigError`.
    """
    join_processes(config)
    if given is None and not is_import_path(config.model):
        checkpoint = open_for_serving(config.model, config.load_format)
        mesh = make_mesh(config)
        if config.programs is not None:
            config = adopt_options(config, mesh)
        return config, model_of_checkpoint(config, checkpoint, mesh)
    model = given if given is not None else make_model(config, lambda: make_mesh(config))
    config = dataclasses.replace(config, tensor_parallel_size=model.num_devices)
    return adopt_options(config, model.mesh) if config.programs is not None else config, model


def model_of_checkpoint(config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh) -> ServedModel:
    """A checkpoint's model in the type that the options say. Raises `ModelLoadError` or `ConfigError`."""
    return serve_checkpoint(checkpoint, mesh, resolve_dtype(config.dtype, mesh.devices.flat[0].platform))


def model_to_compile(config: EngineConfig, mesh: Mesh) -> ServedModel:
    """The model on devices that need not be here; of a checkpoint, `config.json` is enough.

    Raises `ModelLoadError` or `ConfigError`.
    """
    if is_import_path(config.model):
        return make_model(config, lambda: mesh)
    return model_of_checkpoint(config, open_for_compiling(config.model), mesh)


def make_model(config: EngineConfig, mesh: Callable[[], Mesh]) -> ServedModel:
    """A user's own model by its import path: a function without arguments, or with a `mesh` that it is to lie on.

    Raises `ConfigError` that names the path.
    """
    make = load(config.model, _OPTION)
    try:
        takes_mesh = "mesh" in inspect.signature(make).parameters
        model = make(mesh=mesh()) if takes_mesh else make()
    except JaxpageError:
        raise
    except Exception as error:
        raise ConfigError(f"{_OPTION} is {config.model!r}, which fails: {type(error).__name__}: {error}") from error
    if not isinstance(model, ServedModel):
        raise ConfigError(
            f"{_OPTION} is {config.model!r}, which gives {type(model).__name__}: it must give a "
            "jaxpage.models.served_model.ServedModel"
        )
    return model
