"""Programs compiled ahead for this machine's CPU: served, and refused by what differs where they cannot run."""

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage import LLM, ConfigError, SamplingParams
from jaxpage.aot.artifact import adopt_options
from jaxpage.cli import main
from jaxpage.config import EngineConfig
from jaxpage.runner.devices import make_mesh
from jaxpage.runner.program_cache import environment
from jaxpage.runner.programs.program import trace_counts

pytestmark = pytest.mark.usefixtures("quick_compiles")
SHAPES = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
LATER = {"max_model_len": 64, "num_blocks": 40}
"""Given when compiling, and left to the artifact when serving."""


def flags(**options: Any) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def model(tiny_options: dict[str, Any]) -> str:
    return str(tiny_options["model"])


@pytest.fixture(scope="module")
def bare(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but the model's config."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copy(Path(model) / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def compiled(bare: Path, tmp_path_factory: pytest.TempPathFactory, quick_compiles: None) -> tuple[Path, str]:
    """An artifact, made without weights, and what was printed."""
    out = tmp_path_factory.mktemp("artifact") / "programs"
    command = ["compile", "--target", "cpu", "--model", str(bare), "--out", str(out), *flags(**SHAPES, **LATER)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(command) == 0
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def artifact(compiled: tuple[Path, str]) -> Path:
    return compiled[0]


def test_an_engine_serves_from_compiled_programs_and_traces_none(artifact: Path, model: str) -> None:
    before = dict(trace_counts)
    with LLM(model, programs=str(artifact), multiprocess=False, **SHAPES) as llm:
        assert dict(trace_counts) == before
        assert llm.stats["num_programs_loaded"] == llm.stats["num_programs"] == llm.stats["num_programs_wanted"]
        assert (llm.max_model_len, llm.kv_cache_snapshot()["num_blocks"]) == (64, 39)  # without the null block
        (output,) = llm.generate("What is it?", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8


def test_what_is_compiled_is_listed_and_how_to_serve_it(compiled: tuple[Path, str], bare: Path) -> None:
    out, printed = compiled
    assert "step 16 tokens, 4 rows" in printed
    assert f"serve --model {bare} --programs {out} --block-size 4\n" in printed


@pytest.mark.parametrize(
    ("name", "there", "message"),
    [
        ("devices", "8 x NVIDIA H200", "compiled for devices '8 x NVIDIA H200', and here is '1 x cpu'"),
        ("jax", "0.1", "compiled for jax '0.1', and here is"),
        ("XLA_FLAGS", "--fast", "compiled for XLA_FLAGS '--fast', and here is"),
    ],
)
def test_another_machine_is_refused_by_what_differs(
    artifact: Path, tmp_path: Path, name: str, there: str, message: str
) -> None:
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["environment"][name] = there
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    config = EngineConfig(programs=str(tmp_path), **SHAPES)
    with pytest.raises(ConfigError, match=message):
        adopt_options(config, make_mesh(config))


def test_another_option_is_refused_with_the_one_to_give(artifact: Path) -> None:
    config = EngineConfig(programs=str(artifact), **SHAPES | {"max_num_seqs": 8})
    with pytest.raises(ConfigError, match=r"--max-num-seqs is 8, and the programs in .* give --max-num-seqs 4"):
        adopt_options(config, make_mesh(config))


def test_another_model_is_refused(artifact: Path, bare: Path, model: str, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="are of another model than"):
        LLM(str(other), programs=str(artifact), multiprocess=False, **SHAPES)


def test_a_lost_program_is_an_error_and_not_a_compile(artifact: Path, model: str, tmp_path: Path) -> None:
    copied = shutil.copytree(artifact, tmp_path / "lossy")
    for file in copied.glob("*.program"):
        file.unlink()
    with pytest.raises(ConfigError, match="holds no program"):
        LLM(model, programs=str(copied), multiprocess=False, **SHAPES)


def test_programs_are_kept_apart_by_flags_of_xla_and_options_of_jax(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    before = environment(mesh)
    monkeypatch.setenv("XLA_FLAGS", "--xla_something")
    assert environment(mesh) == before | {"XLA_FLAGS": "--xla_something"}
    monkeypatch.undo()
    jax.config.update("jax_disable_most_optimizations", not jax.config.values["jax_disable_most_optimizations"])
    try:
        assert environment(mesh) != before
    finally:
        jax.config.update("jax_disable_most_optimizations", not jax.config.values["jax_disable_most_optimizations"])
    assert {"jax", "jaxlib", "source code of jaxpage", "instruction sets"} < before.keys()


def test_a_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    config = EngineConfig(programs=str(tmp_path), **SHAPES)
    with pytest.raises(ConfigError, match="holds no programs of `jaxpage compile`"):
        adopt_options(config, make_mesh(config))


def test_a_folder_in_use_is_not_compiled_into(bare: Path, artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--target", "cpu", "--model", str(bare), "--out", str(artifact)]) == 1
    assert "is not empty" in capsys.readouterr().err
