"""A process that follows another one; `test_tensor_parallel` has real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxpage.config import EngineConfig
from jaxpage.engine.follower import follow
from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.checkpoints.weightless import DummyWeights


def test_a_follower_loads_what_its_leader_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights, here: they would be of two models, or of none."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    opened: list[Checkpoint] = []

    class Runner:
        def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
            opened.append(checkpoint)

        def __getattr__(self, name: str) -> Any:
            return lambda: None

    monkeypatch.setattr("jaxpage.engine.follower.Runner", Runner)
    assert follow(EngineConfig(model=str(tmp_path), load_format="dummy")) == 0
    assert isinstance(opened[0], DummyWeights)
