"""Every tiny checkpoint, however it is stored, has the logits that transformers computes in float32."""

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import tiny
from gguf import GGMLQuantizationType as Kind
from paged_forward import LoadedModel, compiled_ops
from safetensors.numpy import save_file

from jaxpage.models.checkpoints.open import open_checkpoint
from jaxpage.models.registry import resolve_family
from jaxpage.models.weights import Weight, load_params, map_weights
from jaxpage.ops.quantized import QuantizedWeight

Weights = dict[str, np.ndarray]

GOLDEN = np.load(Path(__file__).with_name("tiny_logits.npz"))
TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def _compiled_ops() -> Iterator[None]:
    with compiled_ops():
        yield


def assert_golden(name: str, length: int, logits: np.ndarray) -> None:
    """`logits [length, vocab]` are those of the config `name` for the prompt of `length`."""
    expected = GOLDEN[f"{name}/{length}/logits"]
    error = float(np.max(np.abs(logits[tiny.positions(length)] - expected)))
    assert error <= TOLERANCE, f"{name}, {length} tokens: largest error {error:.2e}, allowed {TOLERANCE:.0e}"


def write(folder: Path, name: str, **options: Any) -> Path:
    """The checkpoint of a config of `TINY`."""
    tiny.write_checkpoint(folder, tiny.TINY[name], tiny.make_weights(tiny.TINY[name]), **options)
    return folder


@pytest.mark.parametrize("name", tiny.TINY)
def test_logits_equal_transformers_whole_and_in_chunks(tmp_path: Path, name: str) -> None:
    model = LoadedModel(write(tmp_path, name))
    for length in tiny.PROMPT_LENGTHS[name]:
        assert_golden(name, length, model.logits(tiny.prompt(length)))
        assert_golden(name, length, model.logits(tiny.prompt(length), chunk=16))


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_matrices_in_int8_give_the_logits_of_the_values_they_stand_for(tmp_path: Path, name: str) -> None:
    def in_int8(weight: Weight) -> Weight:
        return (
            dataclasses.replace(weight, quantize="int8") if "embed" in weight.axes and len(weight.axes) > 1 else weight
        )

    def stood_for(leaf: jax.Array | QuantizedWeight) -> jax.Array:
        return leaf.values * leaf.scale[..., None] if isinstance(leaf, QuantizedWeight) else leaf

    model = LoadedModel(write(tmp_path, name))
    checkpoint = open_checkpoint(str(tmp_path))
    family, cfg = resolve_family(checkpoint)
    specs = map_weights(in_int8, family.param_specs(cfg))
    model.params = load_params(specs, checkpoint, np.dtype(np.float32), model.model.mesh)
    logits = model.logits(tiny.prompt(20))
    model.params = jax.tree.map(stood_for, model.params, is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    np.testing.assert_allclose(logits, model.logits(tiny.prompt(20)), atol=TOLERANCE)


@pytest.mark.parametrize("storage", [("bfloat16", 1), ("float16", 3), ("float32", 3)])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_do_not_depend_on_how_weights_are_stored(tmp_path: Path, name: str, storage: tuple[str, int]) -> None:
    dtype, num_shards = storage
    stored = LoadedModel(write(tmp_path / "stored", name, dtype=dtype, num_shards=num_shards))
    plain = LoadedModel(write(tmp_path / "plain", name))
    np.testing.assert_array_equal(stored.logits(tiny.prompt(100)), plain.logits(tiny.prompt(100)))


C01_HEADS = {
    # tie_word_embeddings (None: the key is absent), head -> config with the right logits, words of the warning
    "tied_without_head": (True, None, "llama_tied", None),
    "tied_with_equal_head": (True, "equal", "llama_tied", None),
    "tied_with_other_head": (True, "other", "llama", "different lm_head.weight"),
    "untied_without_head": (False, None, "llama_tied", "no lm_head.weight"),
    "absent_key_with_head": (None, "other", "llama", None),
}


@pytest.mark.parametrize("case", C01_HEADS)
def test_c01_output_head_is_the_right_one_and_never_silently_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    tie, head, expected, warning = C01_HEADS[case]
    config = tiny.TINY["llama"] | {"tie_word_embeddings": tie}
    if tie is None:
        del config["tie_word_embeddings"]
    weights = tiny.make_weights(tiny.TINY["llama"])  # but for the head, the same as those of "llama_tied"
    if head is None:
        del weights["lm_head.weight"]
    elif head == "equal":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    tiny.write_checkpoint(tmp_path, config, weights)
    with caplog.at_level(logging.WARNING):
        model = LoadedModel(tmp_path)
    assert_golden(expected, 100, model.logits(tiny.prompt(100)))
    warnings = [record.getMessage() for record in caplog.records]
    if warning is None:
        assert warnings == []
    else:
        assert len(warnings) == 1
        assert warning in warnings[0]
        assert str(tmp_path) in warnings[0]


def test_c02_tensors_outside_the_index_change_nothing(tmp_path: Path) -> None:
    weights = tiny.make_weights(tiny.TINY["llama"])
    write(tmp_path, "llama", num_shards=2)
    garbage = {name: np.full_like(weight, 99) for name, weight in weights.items()}
    save_file(garbage, tmp_path / "consolidated.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text("utf-8"))["weight_map"]
    # Each shard holds a wrong copy of a tensor that the index maps to the other one.
    for shard, stray in ((1, "lm_head.weight"), (2, "model.embed_tokens.weight")):
        file_name = f"model-{shard:05d}-of-00002.safetensors"
        assert index[stray] != file_name
        kept = {name: weight for name, weight in weights.items() if index[name] == file_name}
        save_file(kept | {stray: garbage[stray]}, tmp_path / file_name)
    assert_golden("llama", 100, LoadedModel(tmp_path).logits(tiny.prompt(100)))


@pytest.mark.parametrize("name", ["rope_longrope_type", "rope_dynamic_type"])
def test_c04_batch_neighbours_keep_their_own_rope_factors(tmp_path: Path, name: str) -> None:
    short, long = LoadedModel(write(tmp_path, name)).batch_logits([tiny.prompt(50), tiny.prompt(100)], chunk=8)
    assert_golden(name, 50, short)
    assert_golden(name, 100, long)


@pytest.mark.parametrize("name", ["rope_longrope_type", "rope_dynamic_type"])
def test_c04_output_that_crosses_the_original_context_does_not_depend_on_chunks(tmp_path: Path, name: str) -> None:
    model = LoadedModel(write(tmp_path, name))
    whole = model.logits(tiny.prompt(80), prompt_len=50)
    assert_golden(name, 50, whole[:50])
    # Up to the 64th token output sees the factors of a short sequence, as a longer prompt within the context does.
    np.testing.assert_allclose(whole[:64], model.logits(tiny.prompt(64)), atol=TOLERANCE)
    np.testing.assert_allclose(model.logits(tiny.prompt(80), chunk=16, prompt_len=50), whole, atol=TOLERANCE)
    assert np.isfinite(whole).all()


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Hugging Face name, less `model.layers.N.` and the last part -> llama.cpp's name."""


def write_gguf(path: Path, config: tiny.Config, weights: Weights, kind: Kind) -> Path:
    """As llama.cpp's converter makes it: matrices as `kind`, vectors in float32, Llama's q and k permuted."""
    arch = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    for name, weight in weights.items():
        stem, _, tail = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            gguf_name = f"blk.{layer}.{GGUF_NAMES[part]}.{tail}"
            if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                # Rotated halves become rotated neighbours.
                halves = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
                weight = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
        else:
            gguf_name = f"{GGUF_NAMES[stem]}.{tail}"
        if weight.ndim == 1:
            writer.add_tensor(gguf_name, weight)
        else:
            writer.add_tensor(gguf_name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gguf_logits_equal_those_of_the_checkpoint_it_was_made_from(tmp_path: Path, name: str, kind: Kind) -> None:
    config = tiny.TINY[name]
    path = write_gguf(tmp_path / "model.gguf", config, tiny.make_weights(config), kind)
    logits = LoadedModel(path).logits(tiny.prompt(100))
    if kind is not Kind.Q8_0:
        assert_golden(name, 100, logits)  # the weights are exact in float16, too
        return
    got, expected = logits[tiny.positions(100)], GOLDEN[f"{name}/100/logits"]
    cosines = (got * expected).sum(-1) / (np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1))
    assert cosines.min() > 0.999
    assert np.abs(got - expected).max() > 1e-3  # it is quantized indeed
