"""jaxpage: an inference engine for large language models in JAX.

    from jaxpage import LLM, SamplingParams

    llm = LLM(model="smollm2-135m")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Importing it touches no accelerator, sets no environment variable and does not import JAX.
"""

from typing import TYPE_CHECKING

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError, EngineDeadError, JaxpageError, ModelLoadError, RequestError
from jaxpage.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jaxpage.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from jaxpage.server_config import ServerConfig

if TYPE_CHECKING:
    from jaxpage.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDeadError",
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


def __getattr__(name: str) -> type["LLM"]:
    """`LLM`, when it is asked for: a quarter of a second of imports that an engine's own process starts without."""
    if name == "LLM":
        from jaxpage.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
