"""RoPE against transformers' frequencies, and the rotation itself against complex numbers."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.models.families.hf_config import UnsupportedModelError, rope_from_hf
from jaxpage.models.registry import FAMILIES
from jaxpage.ops.rope import RopeConfig, apply_rope, inverse_frequencies, rope_cos_sin

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import tiny

GOLDEN = np.load(Path(tiny.__file__).with_name("tiny_logits.npz"))


def rope_of(name: str) -> RopeConfig:
    config = tiny.TINY[name]
    return FAMILIES[config["architectures"][0]].config_from_hf(config).rope


@pytest.mark.parametrize("name", tiny.TINY)
def test_frequencies_and_attention_scaling_equal_transformers(name: str) -> None:
    rope = rope_of(name)
    frequencies = inverse_frequencies(rope)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, GOLDEN[f"{name}/inv_freq"], rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(float(GOLDEN[f"{name}/attention_scaling"]), rel=1e-6)


@pytest.mark.parametrize("name", tiny.TINY)
def test_angles_at_each_length_are_those_that_transformers_took(name: str) -> None:
    rope = rope_of(name)
    for length in tiny.PROMPT_LENGTHS[name]:
        positions = jnp.arange(length, dtype=jnp.int32)
        cos, sin = rope_cos_sin(positions, jnp.full(length, length, jnp.int32), rope)
        angles = np.arange(length)[:, None] * GOLDEN[f"{name}/{length}/inv_freq"].astype(np.float64)
        scaling = float(GOLDEN[f"{name}/attention_scaling"])
        # float32 angles of up to 100 radians are off by some 1e-5.
        np.testing.assert_allclose(cos, np.cos(angles) * scaling, atol=3e-5)
        np.testing.assert_allclose(sin, np.sin(angles) * scaling, atol=3e-5)


@pytest.mark.parametrize("name", ["rope_dynamic_type", "rope_longrope_type"])
def test_tokens_of_one_batch_keep_the_factors_of_their_own_length(name: str) -> None:
    rope = rope_of(name)
    assert rope.depends_on_length
    lengths = jnp.array([50, 64, 65, 100, 50, 200], jnp.int32)
    positions = jnp.full(6, 49, jnp.int32)
    together = rope_cos_sin(positions, lengths, rope)
    for i in range(6):
        among_equals = rope_cos_sin(positions, jnp.full(6, lengths[i]), rope)
        for got, expected in zip(together, among_equals, strict=True):
            np.testing.assert_allclose(got[i], expected[i], atol=1e-6)
    cos = np.asarray(together[0])
    # Lengths up to the original context of 64 are one class; beyond it, the factors are others.
    np.testing.assert_array_equal(cos[0], cos[1])
    assert np.abs(cos[1] - cos[2]).max() > 1e-3
    assert np.array_equal(cos[2], cos[5]) == (rope.kind == "longrope")  # "dynamic" goes on growing


@pytest.mark.parametrize("kind", ["default", "linear", "yarn", "llama3"])
def test_other_kinds_do_not_look_at_the_length(kind: str) -> None:
    rope = rope_of(f"rope_{kind}_type")
    assert not rope.depends_on_length
    positions = jnp.full(2, 49, jnp.int32)
    cos, sin = rope_cos_sin(positions, jnp.array([50, 200], jnp.int32), rope)
    np.testing.assert_array_equal(cos[0], cos[1])
    np.testing.assert_array_equal(sin[0], sin[1])


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_unknown_kind_is_refused_by_name(place: str, key: str) -> None:
    with pytest.raises(UnsupportedModelError, match="banana"):
        rope_from_hf({"max_position_embeddings": 64, place: {key: "banana", "factor": 2.0}}, 16)


def test_incomplete_scalings_are_refused_with_what_is_missing() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'linear' needs a factor"):
        rope_from_hf({"max_position_embeddings": 64, "rope_scaling": {"type": "linear"}}, 16)
    longrope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}
    with pytest.raises(UnsupportedModelError, match=r"8 values of long_factor, got 7"):
        rope_from_hf({"max_position_embeddings": 64, "rope_scaling": longrope}, 16)
    with pytest.raises(UnsupportedModelError, match="max_position_embeddings"):
        rope_from_hf({}, 16)


def test_rotation_turns_pairs_of_halves_by_the_angle() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3, 16)).astype(np.float32)
    angles = rng.uniform(-3, 3, size=(5, 8)).astype(np.float32)
    turned = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * angles)[:, None, :]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), np.cos(angles), np.sin(angles)), expected, atol=1e-5)


def test_components_beyond_the_rotary_part_stay_and_types_are_kept() -> None:
    x = np.random.default_rng(0).normal(size=(4, 2, 16)).astype(jnp.bfloat16)
    rope = rope_from_hf({"max_position_embeddings": 64, "partial_rotary_factor": 0.5}, 16)
    assert rope.rotary_dim == 8
    positions = jnp.arange(4, dtype=jnp.int32)
    got: jax.Array = apply_rope(jnp.asarray(x), *rope_cos_sin(positions, positions + 1, rope))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(got[0], x[0])  # position 0
    assert np.abs(np.asarray(got[1:, :, :8], np.float32) - x[1:, :, :8].astype(np.float32)).max() > 0.1
