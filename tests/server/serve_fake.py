"""Runs `serve` with the fake engine behind it: a program for the tests of the server's life.

Its argument is a JSON object: `server` are ServerConfig's options, `engine` FakeEngine's, `load_error` a message with
which loading fails. A prompt that says "slow" is answered at 20 tokens a second, "stuck" never ends, "flood" is
answered with far more than a socket holds, "die" kills the engine. Each request that the engine has got is printed.
"""

import json
import sys
import types
from collections.abc import Sequence
from typing import Any

from fake_engine import FakeEngine, FakeStream, Script

from jaxpage.config import EngineConfig
from jaxpage.errors import ModelLoadError
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.serve import serve
from jaxpage.server_config import ServerConfig


class MortalEngine(FakeEngine):
    """Dies of a prompt that says so."""

    def add_request(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> FakeStream:
        stream = super().add_request(prompt, params, request_id=request_id, **options)
        self.is_dead = list(prompt) == self.encode("die")
        print(f"admitted {request_id}", flush=True)
        return stream


def main() -> int:
    options = json.loads(sys.argv[1])
    load_error = ModelLoadError(options["load_error"]) if "load_error" in options else None

    def make_engine(config: EngineConfig) -> MortalEngine:
        engine = MortalEngine(load_error=load_error, **options.get("engine", {}))
        engine.scripts = {
            "slow": Script(text="x" * 30, delay=0.05),
            "stuck": Script(stall_after=2),
            "flood": Script(text="x" * 5000),
        }
        return engine

    stand_in: Any = types.ModuleType("jaxpage.async_engine")
    stand_in.AsyncEngine = make_engine
    sys.modules["jaxpage.async_engine"] = stand_in
    return serve(EngineConfig(), ServerConfig(**{"port": 0, **options.get("server", {})}))


if __name__ == "__main__":
    sys.exit(main())
