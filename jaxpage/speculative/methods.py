"""Proposers by the method that names them. One more is one new file, and its name here and in `config.METHODS`."""

from collections.abc import Callable

from jaxpage.errors import ConfigError
from jaxpage.models.sources import digest_of
from jaxpage.models.user_code import load
from jaxpage.speculative.config import SpeculativeConfig
from jaxpage.speculative.ngram import NGram
from jaxpage.speculative.proposer import Proposer

_PROPOSERS: dict[str, Callable[[SpeculativeConfig], Proposer]] = {"ngram": NGram}
_OPTION = "the method of --speculative-config"


def load_proposer(config: SpeculativeConfig | None) -> Proposer | None:
    """The one that a config names. Raises `ConfigError` for an import path that leads nowhere."""
    if config is None:
        return None
    if config.method in _PROPOSERS:
        return _PROPOSERS[config.method](config)
    make = load(config.method, _OPTION)
    try:
        proposer: Proposer = make(config)
    except Exception as error:
        raise ConfigError(f"{_OPTION} is {config.method!r}, which cannot be made: {error}") from error
    for name in ("propose", "max_drafts", "reads_model", "extras"):
        if not hasattr(proposer, name):
            raise ConfigError(f"{_OPTION} is {config.method!r}, which has no {name}: see jaxpage.speculative.proposer")
    if not getattr(proposer, "key", ""):
        proposer.key = digest_of(type(proposer))
    return proposer
