"""The Llama family: Llama, Mistral, Qwen2 and Qwen3 differ only in biases, q/k norm and sliding window.

The model contract (DESIGN: Models): `config_from_hf`, `param_specs`, `kv_specs`, `forward`, `logits`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpage.models.config import ModelConfig, UnsupportedModelError, require, rope_from_hf
from jaxpage.models.params import Params, Source, Weight, weight
from jaxpage.ops.attention import AttentionMetadata, KVCache, attend
from jaxpage.ops.kv_spec import KVSpec
from jaxpage.ops.matmul import linear
from jaxpage.ops.norm import rms_norm
from jaxpage.ops.rope import apply_rope, rope_cos_sin


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
    windowed = architecture == "MistralForCausalLM" or hf.get("use_sliding_window")
    if windowed and hf.get("use_sliding_window") and int(hf.get("max_window_layers") or 0) > 0:
        raise UnsupportedModelError("use_sliding_window with max_window_layers > 0 is not supported: only all layers")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(require(hf, "vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(require(hf, "intermediate_size")),
        num_layers=int(require(hf, "num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=rope.max_position,
        rope=rope,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=bias and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"),
        mlp_bias=bool(hf.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=hf.get("sliding_window") if windowed else None,
    )


def param_specs(cfg: ModelConfig) -> Params:
    """Every weight of the model, as a pytree of `Weight`."""
    embed = ("vocab", "embed")
    specs: dict[str, Any] = {
        "embed": weight("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size), embed),
        "norm": weight("model.norm.weight", (cfg.hidden_size,), ("embed",)),
        "layers": [_layer_specs(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers)],
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = weight("lm_head.weight", (cfg.vocab_size, cfg.hidden_size), embed)
    return specs


def _layer_specs(cfg: ModelConfig, prefix: str) -> dict[str, Weight]:
    e, f, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    specs = {
        "input_norm": weight(prefix + "input_layernorm.weight", (e,), ("embed",)),
        "qkv": _qkv(cfg, attention, "weight", (e,)),
        "o": weight(attention + "o_proj.weight", (e, cfg.num_heads * d), ("embed", "kv_heads")),
        "post_norm": weight(prefix + "post_attention_layernorm.weight", (e,), ("embed",)),
        "gate_up": _gate_up(cfg, mlp, "weight", (e,)),
        "down": weight(mlp + "down_proj.weight", (e, f), ("embed", "ffn")),
    }
    if cfg.attention_bias:
        specs["qkv_bias"] = _qkv(cfg, attention, "bias", ())
    if cfg.attention_out_bias:
        specs["o_bias"] = weight(attention + "o_proj.bias", (e,), ("embed",))
    if cfg.mlp_bias:
        specs["gate_up_bias"] = _gate_up(cfg, mlp, "bias", ())
        specs["down_bias"] = weight(mlp + "down_proj.bias", (e,), ("embed",))
    if cfg.qk_norm:
        specs["q_norm"] = weight(attention + "q_norm.weight", (d,), ("head_dim",))
        specs["k_norm"] = weight(attention + "k_norm.weight", (d,), ("head_dim",))
    return specs


def _qkv(cfg: ModelConfig, prefix: str, kind: str, tail: tuple[int, ...]) -> Weight:
    """Query, key and value projections as [kv_heads, heads per kv head + 2, head_dim, ...]: whole groups per device."""
    groups, d = cfg.num_kv_heads, cfg.head_dim
    per_group = {"q_proj": cfg.num_heads // groups, "k_proj": 1, "v_proj": 1}
    sources = tuple(
        Source(f"{prefix}{name}.{kind}", (groups * heads * d, *tail), (groups, heads, d, *tail))
        for name, heads in per_group.items()
    )
    return Weight(sources, ("kv_heads", "head", "head_dim", "embed")[: 3 + len(tail)], join_axis=1)


def _gate_up(cfg: ModelConfig, prefix: str, kind: str, tail: tuple[int, ...]) -> Weight:
    """Gate and up projections as [2, ffn, ...]."""
    f = cfg.intermediate_size
    sources = tuple(Source(f"{prefix}{name}.{kind}", (f, *tail), (1, f, *tail)) for name in ("gate_proj", "up_proj"))
    return Weight(sources, ("part", "ffn", "embed")[: 2 + len(tail)])


def kv_specs(cfg: ModelConfig) -> Sequence[KVSpec]:
    """What each layer keeps in the KV cache."""
    return [KVSpec(cfg.num_kv_heads, cfg.head_dim, window=cfg.sliding_window)] * cfg.num_layers


def forward(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    cfg: ModelConfig,
) -> tuple[jax.Array, KVCache]:
    """One pass over a step's tokens, writing their KV.

    tokens, positions: [tokens] int32. Returns the final hidden states [tokens, embed], normed, and the updated cache.
    """
    x = params["embed"][tokens]
    rope = rope_cos_sin(positions, metadata.rope_lengths, cfg.rope)
    for index, layer in enumerate(params["layers"]):
        with jax.named_scope("layer"):
            q, k, v = _project(layer, rms_norm(x, layer["input_norm"], cfg.norm_eps), rope, cfg)
            out, kv_cache = attend(q, k, v, kv_cache, index, metadata, scale=cfg.head_dim**-0.5)
            x = x + linear(out.reshape(x.shape[0], -1), layer["o"], layer.get("o_bias"))
            x = x + _mlp(layer, rms_norm(x, layer["post_norm"], cfg.norm_eps))
    return rms_norm(x, params["norm"], cfg.norm_eps), kv_cache


def _project(
    layer: Params, x: jax.Array, rope: tuple[jax.Array, jax.Array], cfg: ModelConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x: [tokens, embed] -> q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]; q and k rotated."""
    num_tokens = x.shape[0]
    qkv = linear(x, layer["qkv"], layer.get("qkv_bias"))  # [tokens, kv_heads, heads per kv head + 2, head_dim]
    q = qkv[:, :, :-2].reshape(num_tokens, cfg.num_heads, cfg.head_dim)
    k, v = qkv[:, :, -2], qkv[:, :, -1]
    if cfg.qk_norm:
        q = rms_norm(q, layer["q_norm"], cfg.norm_eps)
        k = rms_norm(k, layer["k_norm"], cfg.norm_eps)
    return apply_rope(q, *rope), apply_rope(k, *rope), v


def _mlp(layer: Params, x: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, 2020). x: [tokens, embed] -> [tokens, embed]."""
    gate_up = linear(x, layer["gate_up"], layer.get("gate_up_bias"))  # [tokens, 2, ffn]
    return linear(jax.nn.silu(gate_up[:, 0]) * gate_up[:, 1], layer["down"], layer.get("down_bias"))


def logits(params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """hidden: [rows, embed] -> [rows, vocab] float32."""
    head = params["embed"] if cfg.tie_word_embeddings else params["lm_head"]
    return linear(hidden, head).astype("float32")
