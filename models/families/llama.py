"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only in biases, q/k norm and sliding windows.

The model contract (DESIGN: Models): `config_from_hf`, `param_specs`, `kv_specs`, `embed`, `forward`, `logits`.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpage.models.families.hf_config import ModelConfig, UnsupportedModelError, layer_windows, require, rope_from_hf
from jaxpage.models.families.layers import (
    attention_specs,
    gated_mlp,
    kv_specs,
    mlp_specs,
    model_specs,
    output_logits,
    project_out,
    project_qkv,
)
from jaxpage.models.run_layers import LayerStates, hidden_of, run_layers
from jaxpage.models.served_model import Hidden
from jaxpage.models.weights import Params, Weight, weight
from jaxpage.ops.attention.paged import KVCache, StepContext, attend
from jaxpage.ops.matmul import embed_rows
from jaxpage.ops.norm import rms_norm
from jaxpage.ops.rope import rope_cos_sin

__all__ = ["config_from_hf", "embed", "forward", "kv_specs", "logits", "param_specs"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config. Raises `UnsupportedModelError` naming what is missing or not implemented."""
    architecture = hf["architectures"][0]
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedModelError(f"hidden_act {hf['hidden_act']!r} is not supported for {architecture}: only 'silu'")
    num_heads = int(require(hf, "num_attention_heads"))
    hidden_size = int(require(hf, "hidden_size"))
    head_dim = int(hf.get("head_dim") or (128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads))
    rope = rope_from_hf(hf, head_dim)
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(require(hf, "intermediate_size")),
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        windows=_windows(hf, architecture),
        attention_scale=head_dim**-0.5,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=rope.max_position,
        rope=rope,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(hf.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _windows(hf: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    """All layers of Mistral slide if its window has a size; Qwen's from `max_window_layers` on, if told to."""
    num_layers = int(require(hf, "num_hidden_layers"))
    if architecture == "MistralForCausalLM":
        return (hf.get("sliding_window", 4096),) * num_layers
    if architecture == "LlamaForCausalLM" or not hf.get("use_sliding_window"):
        return (None,) * num_layers
    first = int(hf.get("max_window_layers", 28))
    return layer_windows(hf, [i >= first for i in range(num_layers)])


def param_specs(cfg: ModelConfig) -> Params:
    """Every weight of the model, as a pytree of `Weight`."""
    return model_specs(cfg, _layer_specs)


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, Weight]:
    def norm(name: str) -> Weight:
        return weight(f"{prefix}{name}.weight", (cfg.hidden_size,), ("embed",))

    return {
        "input_norm": norm("input_layernorm"),
        **attention_specs(cfg, prefix),
        "post_norm": norm("post_attention_layernorm"),
        **mlp_specs(cfg, prefix),
    }


def embed(params: Params, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """tokens: [tokens] int32 -> [tokens, embed]."""
    return embed_rows(params["embed"], tokens)


def forward(
    params: Params, x: jax.Array, states: KVCache, step: StepContext, cfg: ModelConfig
) -> tuple[Hidden, KVCache]:
    """One pass over a step's tokens, writing their KV. x: [tokens, embed], of `embed`.

    Returns the hidden states, the last ones normed, and the updated states.
    """
    rope = rope_cos_sin(step.positions, step.rope_lengths, cfg.rope)

    def layer(weights: Params, x: jax.Array, states: LayerStates) -> tuple[jax.Array, LayerStates]:
        (kv,) = states
        q, k, v = project_qkv(weights, rms_norm(x, weights["input_norm"], cfg.norm_eps), cfg)
        if cfg.qk_norm:
            q = rms_norm(q, weights["q_norm"], cfg.norm_eps)
            k = rms_norm(k, weights["k_norm"], cfg.norm_eps)
        attended, kv = attend(q, k, v, kv, rope=rope, scale=cfg.attention_scale)
        x = x + project_out(weights, attended)
        return x + gated_mlp(weights, rms_norm(x, weights["post_norm"], cfg.norm_eps), jax.nn.silu), (kv,)

    outputs, states = run_layers(layer, params["layers"], x, states, step)
    return hidden_of(rms_norm(outputs[-1], params["norm"], cfg.norm_eps), outputs), states


def logits(params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """hidden: [rows, embed] -> [rows, vocab] float32."""
    return output_logits(params, hidden, cfg)
