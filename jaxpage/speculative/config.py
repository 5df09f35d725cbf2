"""How an engine speculates: what `--speculative-config` says, checked. No JAX."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpage.errors import ConfigError

METHODS = ("ngram",)
MAX_SPECULATIVE_TOKENS, MAX_LOOKUP = 32, 16
_OPTION = "--speculative-config"


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Raises `ConfigError` that names key, value and limit."""

    method: str
    """ngram: what followed the last tokens where they stood before, in the same prompt and output. Or a proposer of
    your own by its import path: see `jaxpage.speculative.proposer`."""
    num_speculative_tokens: int
    """Most drafts that are checked at a time."""
    prompt_lookup_max: int = 4
    """Most last tokens that are looked for; the longest match counts, and of equal ones the latest."""
    prompt_lookup_min: int = 2
    """Fewest that make a match; at most `prompt_lookup_max`."""

    def __post_init__(self) -> None:
        if self.method not in METHODS and ":" not in self.method:
            raise ConfigError(
                f"{_OPTION} has the method {self.method!r}: it must be {', '.join(METHODS)}, or the import path of a "
                "proposer of your own, package.module:name"
            )
        for name, limit in (
            ("num_speculative_tokens", MAX_SPECULATIVE_TOKENS),
            ("prompt_lookup_max", MAX_LOOKUP),
            ("prompt_lookup_min", self.prompt_lookup_max),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
                raise ConfigError(f"{_OPTION} has {name} {value!r}: it must be a whole number from 1 to {limit}")

    def __str__(self) -> str:
        """As the command line takes it."""
        return json.dumps(dataclasses.asdict(self))


def read_speculative_config(given: Any) -> SpeculativeConfig | None:
    """From a mapping, or from its JSON text. Raises `ConfigError`."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    form = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{_OPTION} is {given!r}, which is no JSON ({error}): write it as {form}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{_OPTION} is {given!r}: it must be a mapping such as {form}")
    options = dict(given)
    known = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    if unknown := sorted(str(key) for key in options.keys() - known):
        raise ConfigError(f"{_OPTION} has {unknown[0]!r}, which is none of {', '.join(sorted(known))}")
    for name in ("method", "num_speculative_tokens"):
        if name not in options:
            raise ConfigError(f"{_OPTION} lacks {name}: write it as {form}")
    if options.get("prompt_lookup_max") == 1:
        options.setdefault("prompt_lookup_min", 1)
    return SpeculativeConfig(**options)
