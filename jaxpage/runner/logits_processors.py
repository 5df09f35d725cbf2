"""The user's own logits processors: functions named by import path, compiled into every program that draws.

In: import paths. Out: what the programs call, with a digest of the source for the key that they are kept under.
"""

import hashlib
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxpage.errors import ConfigError
from jaxpage.ops.sampling.processing import KnownTokens, LogitsProcessor

MAX_PROCESSORS = 16
"""Each has a bit in a row's flags."""
_OPTION = "--logits-processors"


@dataclass(frozen=True)
class OwnProcessor:
    """One of them."""

    name: str
    """What requests call it: the function's name."""
    digest: str
    """Of the file that it is written in."""
    function: LogitsProcessor = field(repr=False)


def load_processors(paths: Sequence[str], vocab_size: int) -> tuple[OwnProcessor, ...]:
    """Import them, and see that JAX can trace each. Raises `ConfigError` that names the path at fault."""
    if len(paths) > MAX_PROCESSORS:
        raise ConfigError(f"{_OPTION} are {len(paths)}: at most {MAX_PROCESSORS}")
    processors = tuple(_load(path, vocab_size) for path in paths)
    names = [processor.name for processor in processors]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{_OPTION} has {name} twice: requests could not tell them apart")
    return processors


def _load(path: str, vocab_size: int) -> OwnProcessor:
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{_OPTION} is {path!r}: it must be package.module:function ({error})") from error
    if not callable(function):
        raise ConfigError(f"{_OPTION} is {path!r}, which is no function")
    rows, longest = 2, 8
    counts = jax.ShapeDtypeStruct((rows,), jnp.int32)
    known = KnownTokens(jax.ShapeDtypeStruct((rows, longest), jnp.int32), counts, counts)  # type: ignore[arg-type]
    logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
    try:
        result = jax.eval_shape(function, logits, known)
    except Exception as error:
        raise ConfigError(f"{_OPTION} is {path!r}, which JAX cannot trace: {error}") from error
    if getattr(result, "shape", None) != logits.shape:
        raise ConfigError(f"{_OPTION} is {path!r}, which must give logits of the shape that it takes, [rows, vocab]")
    source = inspect.getsourcefile(function)
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else path
    return OwnProcessor(name, digest, function)
