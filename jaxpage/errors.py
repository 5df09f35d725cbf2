"""The exceptions that jaxpage raises. Messages name the value, the limit and the remedy.

JaxpageError
├── ConfigError         an engine option is wrong; raised before anything is loaded
├── ModelLoadError      a checkpoint is missing, damaged or of an unknown kind
├── RequestError        one request is wrong (HTTP 400); the engine and all others go on
├── GenerationError     requests of a batch failed on their way; carries the results of all
└── EngineDeadError     the engine process is gone; every open request ends with this
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpage.outputs import RequestOutput


class JaxpageError(Exception):
    """Base of every error that jaxpage raises on purpose."""


class ConfigError(JaxpageError, ValueError):
    """An engine option has a value that cannot work."""


class ModelLoadError(JaxpageError):
    """A checkpoint cannot be served as it is."""


class RequestError(JaxpageError, ValueError):
    """A request that cannot be served. `param` names the field at fault, when there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(JaxpageError):
    """The engine process ended while the request was open, or before it arrived."""


class GenerationError(JaxpageError):
    """Requests that were under way could not be brought to their end; the engine's log says why.

    `outputs` are the results of the whole batch, in its order: those of the failed requests end with finish reason
    "error" and hold what was generated before.
    """

    def __init__(self, message: str, outputs: "Sequence[RequestOutput]") -> None:
        super().__init__(message)
        self.outputs = list(outputs)
