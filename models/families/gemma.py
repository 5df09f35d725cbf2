"""Gemma 2 and Gemma 3 (text): norms before and after each block, sliding and full attention layers, a GELU gate.

The model contract (DESIGN: Models): `config_from_hf`, `param_specs`, `kv_specs`, `embed`, `forward`, `logits`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.models.families.hf_config import (
    ModelConfig,
    UnsupportedModelError,
    layer_windows,
    require,
    rope_from_hf,
    rope_from_parameters,
)
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
from jaxpage.ops.norm import zero_centered_rms_norm
from jaxpage.ops.rope import RopeConfig, rope_cos_sin

__all__ = ["config_from_hf", "embed", "forward", "kv_specs", "logits", "param_specs"]

_GELU = "gelu_pytorch_tanh"


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face config. Raises `UnsupportedModelError` naming what is missing or not implemented."""
    architecture = hf["architectures"][0]
    is_gemma3 = architecture == "Gemma3ForCausalLM"
    _refuse_unsupported(hf, architecture)
    head_dim = int(hf.get("head_dim") or 256)
    num_layers = int(require(hf, "num_hidden_layers"))
    # One layer in so many sees everything.
    pattern = int(hf.get("sliding_window_pattern") or 6) if is_gemma3 else 2
    rope, local_rope = _ropes(hf, head_dim) if is_gemma3 else (rope_from_hf(hf, head_dim), None)
    bias = bool(hf.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=int(require(hf, "hidden_size")),
        intermediate_size=int(require(hf, "intermediate_size")),
        num_heads=int(require(hf, "num_attention_heads")),
        num_kv_heads=int(require(hf, "num_key_value_heads")),
        head_dim=head_dim,
        windows=layer_windows(hf, [(i + 1) % pattern != 0 for i in range(num_layers)]),
        attention_scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=rope.max_position,
        rope=rope,
        local_rope=local_rope,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=is_gemma3,
        attention_softcap=None if is_gemma3 else hf.get("attn_logit_softcapping", 50.0),
        logits_softcap=hf.get("final_logit_softcapping", None if is_gemma3 else 30.0),
    )


def _refuse_unsupported(hf: Mapping[str, Any], architecture: str) -> None:
    activation = hf.get("hidden_activation") or _GELU
    if activation != _GELU:
        raise UnsupportedModelError(
            f"hidden_activation {activation!r} is not supported for {architecture}: only {_GELU!r}"
        )
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"use_bidirectional_attention is not supported for {architecture}")
    if architecture == "Gemma3ForCausalLM" and hf.get("attn_logit_softcapping") is not None:
        # transformers reads it and does not apply it, so that nobody can say what such a checkpoint means.
        raise UnsupportedModelError(f"attn_logit_softcapping is not supported for {architecture}: only null")


def _ropes(hf: Mapping[str, Any], head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Gemma 3's RoPE of full and of sliding layers, in the spelling of transformers 5 or an older one."""
    kinds = {"full_attention", "sliding_attention"}
    given = hf.get("rope_parameters") or {}
    if not given.keys() <= kinds:
        raise UnsupportedModelError(
            f"rope_parameters of Gemma 3 has {', '.join(sorted(given.keys() - kinds))}: "
            f"only {' and '.join(sorted(kinds))} are supported, each with its own parameters"
        )
    full = {"rope_theta": hf.get("rope_theta", 1e6)} | (given.get("full_attention") or {})
    local = {"rope_theta": hf.get("rope_local_base_freq", 1e4)} | (given.get("sliding_attention") or {})
    full |= hf.get("rope_scaling") or {}
    return rope_from_parameters(hf, full, head_dim), rope_from_parameters(hf, local, head_dim)


def param_specs(cfg: ModelConfig) -> Params:
    """Every weight of the model, as a pytree of `Weight`."""
    return model_specs(cfg, _layer_specs)


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, Weight]:
    def norm(name: str) -> Weight:
        return weight(f"{prefix}{name}.weight", (cfg.hidden_size,), ("embed",))

    return {
        "pre_attention_norm": norm("input_layernorm"),
        **attention_specs(cfg, prefix),
        "post_attention_norm": norm("post_attention_layernorm"),
        "pre_mlp_norm": norm("pre_feedforward_layernorm"),
        **mlp_specs(cfg, prefix),
        "post_mlp_norm": norm("post_feedforward_layernorm"),
    }


def embed(params: Params, tokens: jax.Array, cfg: ModelConfig) -> jax.Array:
    """tokens: [tokens] int32 -> [tokens, embed], times the root of their size as the weights' type rounds it."""
    x = embed_rows(params["embed"], tokens)
    return x * jnp.asarray(cfg.hidden_size**0.5, x.dtype)


def forward(
    params: Params, x: jax.Array, states: KVCache, step: StepContext, cfg: ModelConfig
) -> tuple[Hidden, KVCache]:
    """One pass over a step's tokens, writing their KV. x: [tokens, embed], of `embed`.

    Returns the hidden states, the last ones normed, and the updated states.
    """

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return zero_centered_rms_norm(x, weight, cfg.norm_eps)

    rope = rope_cos_sin(step.positions, step.rope_lengths, cfg.rope)
    local_rope = rope_cos_sin(step.positions, step.rope_lengths, cfg.local_rope) if cfg.local_rope else rope

    def layer(weights: Params, x: jax.Array, states: LayerStates) -> tuple[jax.Array, LayerStates]:
        (kv,) = states
        q, k, v = project_qkv(weights, norm(x, weights["pre_attention_norm"]), cfg)
        if cfg.qk_norm:
            q, k = norm(q, weights["q_norm"]), norm(k, weights["k_norm"])
        attended, kv = attend(
            *(q, k, v, kv),
            rope=local_rope if kv.spec.window else rope,
            scale=cfg.attention_scale,
            softcap=cfg.attention_softcap,
        )
        x = x + norm(project_out(weights, attended), weights["post_attention_norm"])
        mlp = gated_mlp(weights, norm(x, weights["pre_mlp_norm"]), jax.nn.gelu)  # the approximation by tanh
        return x + norm(mlp, weights["post_mlp_norm"]), (kv,)

    outputs, states = run_layers(layer, params["layers"], x, states, step)
    return hidden_of(norm(outputs[-1], params["norm"]), outputs), states


def logits(params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """hidden: [rows, embed] -> [rows, vocab] float32."""
    out = output_logits(params, hidden, cfg)
    return out if cfg.logits_softcap is None else cfg.logits_softcap * jnp.tanh(out / cfg.logits_softcap)
