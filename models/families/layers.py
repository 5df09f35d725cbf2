"""What the model families share: attention and MLP as they are declared, and as they are multiplied."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxpage.models.families.hf_config import ModelConfig
from jaxpage.models.stored import Source
from jaxpage.models.weights import Params, Weight, weight
from jaxpage.ops.matmul import linear
from jaxpage.ops.state_spec import KVSpec


def model_specs(cfg: ModelConfig, layer_specs: Callable[[ModelConfig, str], dict[str, Weight]]) -> Params:
    """Every weight of a decoder; `layer_specs(cfg, prefix)` gives those of a layer by their name in the params."""
    embed = ("vocab", "embed")
    specs: dict[str, Any] = {
        "embed": weight("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size), embed),
        "norm": weight("model.norm.weight", (cfg.hidden_size,), ("embed",)),
        "layers": [layer_specs(cfg, f"model.layers.{i}.") for i in range(cfg.num_layers)],
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = weight("lm_head.weight", (cfg.vocab_size, cfg.hidden_size), embed)
    return specs


def attention_specs(cfg: ModelConfig, prefix: str) -> dict[str, Weight]:
    """A layer's projections in and out of attention, their biases, and the norms of queries and keys."""
    e, d, prefix = cfg.hidden_size, cfg.head_dim, prefix + "self_attn."
    specs = {
        "qkv": _qkv(cfg, prefix, "weight", (e,)),
        "o": weight(prefix + "o_proj.weight", (e, cfg.num_heads * d), ("embed", "kv_heads")),
    }
    if cfg.attention_bias:
        specs["qkv_bias"] = _qkv(cfg, prefix, "bias", ())
    if cfg.attention_out_bias:
        specs["o_bias"] = weight(prefix + "o_proj.bias", (e,), ("embed",))
    if cfg.qk_norm:
        specs["q_norm"] = weight(prefix + "q_norm.weight", (d,), ("head_dim",))
        specs["k_norm"] = weight(prefix + "k_norm.weight", (d,), ("head_dim",))
    return specs


def mlp_specs(cfg: ModelConfig, prefix: str) -> dict[str, Weight]:
    """A layer's gate, up and down projections, and their biases."""
    e, prefix = cfg.hidden_size, prefix + "mlp."
    specs = {
        "gate_up": _gate_up(cfg, prefix, "weight", (e,)),
        "down": weight(prefix + "down_proj.weight", (e, cfg.intermediate_size), ("embed", "ffn")),
    }
    if cfg.mlp_bias:
        specs["gate_up_bias"] = _gate_up(cfg, prefix, "bias", ())
        specs["down_bias"] = weight(prefix + "down_proj.bias", (e,), ("embed",))
    return specs


def _qkv(cfg: ModelConfig, prefix: str, kind: str, tail: tuple[int, ...]) -> Weight:
    """Query, key and value projections as [kv_heads, heads per kv head + 2, head_dim, ...]: whole groups per device."""
    groups, d, copies = cfg.num_kv_heads, cfg.head_dim, cfg.kv_head_copies
    stored, per_group = groups // copies, cfg.num_heads // groups
    kv = partial(Source, shape=(stored * d, *tail), view=(stored, 1, d, *tail), copies=copies)
    sources = (
        Source(f"{prefix}q_proj.{kind}", (cfg.num_heads * d, *tail), (groups, per_group, d, *tail)),
        *(kv(f"{prefix}{name}.{kind}") for name in ("k_proj", "v_proj")),
    )
    return Weight(sources, ("kv_heads", "head", "head_dim", "embed")[: 3 + len(tail)], join_axis=1)


def _gate_up(cfg: ModelConfig, prefix: str, kind: str, tail: tuple[int, ...]) -> Weight:
    """Gate and up projections as [2, ffn, ...]."""
    f = cfg.intermediate_size
    sources = tuple(Source(f"{prefix}{name}.{kind}", (f, *tail), (1, f, *tail)) for name in ("gate_proj", "up_proj"))
    return Weight(sources, ("part", "ffn", "embed")[: 2 + len(tail)])


def kv_specs(cfg: ModelConfig) -> tuple[tuple[KVSpec, ...], ...]:
    """What each layer keeps of a sequence."""
    kept = (KVSpec(cfg.num_kv_heads, cfg.head_dim, window=window, num_heads=cfg.num_heads) for window in cfg.windows)
    return tuple((spec,) for spec in kept)


def project_qkv(layer: Params, x: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x: [tokens, embed] -> q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim]."""
    qkv = linear(x, layer["qkv"], layer.get("qkv_bias"))  # [tokens, kv_heads, heads per kv head + 2, head_dim]
    q = qkv[:, :, :-2].reshape(x.shape[0], cfg.num_heads, cfg.head_dim)
    return q, qkv[:, :, -2], qkv[:, :, -1]


def project_out(layer: Params, attended: jax.Array) -> jax.Array:
    """What attention gives, [tokens, heads, head_dim] -> [tokens, embed]."""
    return linear(attended.reshape(attended.shape[0], -1), layer["o"], layer.get("o_bias"))


def gated_mlp(layer: Params, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """SwiGLU, or GeGLU by another `activation` (Shazeer, 2020). x: [tokens, embed] -> [tokens, embed]."""
    gate_up = linear(x, layer["gate_up"], layer.get("gate_up_bias"))  # [tokens, 2, ffn]
    return linear(activation(gate_up[:, 0]) * gate_up[:, 1], layer["down"], layer.get("down_bias"))


def output_logits(params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """hidden: [rows, embed] -> [rows, vocab] float32."""
    head = params["embed"] if cfg.tie_word_embeddings else params["lm_head"]
    return linear(hidden, head, out_dtype="float32")
