"""Gemma's config: which layers slide, which settings are refused. Its logits are in `golden/`."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.models.families import gemma
from jaxpage.models.families.hf_config import UnsupportedModelError
from jaxpage.models.registry import resolve_family
from jaxpage.ops.state_spec import KVSpec

GEMMA2: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 40,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 32,
}
GEMMA3 = GEMMA2 | {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}


def test_every_other_layer_of_gemma_2_slides() -> None:
    assert gemma.config_from_hf(GEMMA2).windows == (32, None, 32, None)


def test_every_sixth_layer_of_gemma_3_sees_everything() -> None:
    assert gemma.config_from_hf(GEMMA3).windows == (32, 32, 32, 32, 32, None, 32)


def test_a_pattern_or_layer_types_say_which_layers_slide() -> None:
    assert gemma.config_from_hf(GEMMA3 | {"sliding_window_pattern": 3}).windows == (32, 32, None, 32, 32, None, 32)
    types = ["full_attention"] * 6 + ["sliding_attention"]
    windows = gemma.config_from_hf(GEMMA3 | {"layer_types": types, "sliding_window_pattern": 3}).windows
    assert windows == (*[None] * 6, 32)


def test_kv_specs_carry_the_windows() -> None:
    cfg = gemma.config_from_hf(GEMMA2)
    full, sliding = KVSpec(2, 16, num_heads=4), KVSpec(2, 16, window=32, num_heads=4)
    assert gemma.kv_specs(cfg) == ((sliding,), (full,), (sliding,), (full,))


REFUSED = {
    "hidden_activation 'gelu'": {"hidden_activation": "gelu"},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "'chunked_attention'": {"layer_types": ["chunked_attention"] * 7},
    "layer_types has 6 entries for 7 layers": {"layer_types": ["full_attention"] * 6},
    "sliding_window is None": {"sliding_window": None},
    "rope_parameters of Gemma 3 has factor, rope_type": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "RoPE kind 'banana'": {"rope_parameters": {"sliding_attention": {"rope_type": "banana"}}},
    "no num_key_value_heads": {"num_key_value_heads": None},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_supported_is_refused_by_name(words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        gemma.config_from_hf(GEMMA3 | REFUSED[words])


def test_multimodal_gemma_is_refused_by_name() -> None:
    checkpoint: Any = SimpleNamespace(config={"architectures": ["Gemma3ForConditionalGeneration"]})
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration"):
        resolve_family(checkpoint)


def test_embeddings_are_scaled_by_the_root_of_their_size_in_the_weights_type() -> None:
    cfg = gemma.config_from_hf(GEMMA2)
    weights = jnp.ones((128, 40), jnp.bfloat16)
    got = gemma.embed({"embed": weights}, jnp.array([3, 5]), cfg)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), 6.3125)  # the root of 40 is 6.3246
