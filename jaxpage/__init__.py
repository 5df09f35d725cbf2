"""jaxpage: an inference engine for large language models in JAX.

    from jaxpage import LLM, SamplingParams

    llm = LLM(model="smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Importing it touches no accelerator, sets no environment variable and does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxpage.config import EngineConfig
from jaxpage.errors import (
    ConfigError,
    EngineDeadError,
    GenerationError,
    JaxpageError,
    ModelLoadError,
    RequestError,
)
from jaxpage.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from jaxpage.async_engine import AsyncEngine
    from jaxpage.llm import LLM
    from jaxpage.server_config import ServerConfig

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
    "GenerationError",
    "JaxpageError",
    "Logprob",
    "ModelLoadError",
    "PoolingParams",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ServerConfig",
    "StructuredOutputsParams",
]


_IMPORTED_WHEN_ASKED_FOR = {
    "AsyncEngine": "jaxpage.async_engine",
    "LLM": "jaxpage.llm",
    "ServerConfig": "jaxpage.server_config",
}
"""A quarter of a second of imports that an engine's own process starts without."""


def __getattr__(name: str) -> Any:
    """The names that are imported when somebody asks for them."""
    if name in _IMPORTED_WHEN_ASKED_FOR:
        return getattr(import_module(_IMPORTED_WHEN_ASKED_FOR[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
