"""A process that follows another one; `test_tensor_parallel` has real ones."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import tiny

from jaxpage.config import EngineConfig
from jaxpage.engine.follower import follow
from jaxpage.models.served_model import ServedModel


def test_a_follower_loads_what_its_leader_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without weights, here: they would be of two models, or of none."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.TINY["llama"]))
    opened: list[ServedModel] = []

    class Runner:
        def __init__(self, config: EngineConfig, model: ServedModel) -> None:
            opened.append(model)

        def __getattr__(self, name: str) -> Any:
            return lambda: None

    monkeypatch.setattr("jaxpage.engine.follower.Runner", Runner)
    assert follow(EngineConfig(model=str(tmp_path), load_format="dummy")) == 0
    assert jnp.std(opened[0].load_params()["embed"]) > 0
