"""The user's own logits processors: functions named by import path, compiled into every program that draws.

In: import paths. Out: what the programs call, with a digest of the source for the key that they are kept under.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxpage.errors import ConfigError
from jaxpage.models.sources import digest_of
from jaxpage.models.user_code import load
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
    """Of the file that it is written in, of what that imports, and of what is bound to it."""
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
    function = load(path, _OPTION)
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
    try:
        digest = digest_of(function)
    except ValueError as error:
        raise ConfigError(f"{_OPTION} is {path!r}: {error}") from error
    return OwnProcessor(path.partition(":")[2], digest, function)
