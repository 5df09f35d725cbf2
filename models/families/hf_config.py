"""What a decoder-only transformer needs to know about itself. In: a Hugging Face config dict. Out: `ModelConfig`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.ops.rope import RopeConfig

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of one model; hashable, so that compiled programs can be keyed by it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    """Copies included."""
    head_dim: int
    windows: tuple[int | None, ...]
    """For each layer, how many positions a query sees, itself included (sliding window); None is all."""
    attention_scale: float
    """Multiplies the products of queries and keys."""
    norm_eps: float
    max_position_embeddings: int
    """The longest context the model is made for, RoPE scaling included."""
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm on every query and key head before the rotation (Qwen3, Gemma 3)."""
    local_rope: RopeConfig | None = None
    """RoPE of the layers with a window, where it is another (Gemma 3)."""
    attention_softcap: float | None = None
    """Scaled scores become `softcap * tanh(scores / softcap)` (Gemma 2)."""
    logits_softcap: float | None = None
    """The same for the logits (Gemma 2)."""
    kv_head_copies: int = 1
    """How often each KV head of the checkpoint is there, with a share of its queries each: see `models.parallel`."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)


class UnsupportedModelError(ValueError):
    """A config asks for something that jaxpage does not implement; the message names it."""


def require(hf: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that has a value. Raises `UnsupportedModelError` naming them when none has."""
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise UnsupportedModelError(f"config.json has no {' or '.join(names)}: the model cannot be built without it")


def layer_windows(hf: Mapping[str, Any], slides: Sequence[bool]) -> tuple[int | None, ...]:
    """Each layer's window from `sliding_window` and `layer_types`; where there are none, layers slide as `slides` says.

    Raises `UnsupportedModelError` naming a kind of layer that jaxpage does not know, or what is missing.
    """
    kinds = {"full_attention": False, "sliding_attention": True}
    layer_types = hf.get("layer_types")
    if layer_types is not None:
        if unknown := set(layer_types) - kinds.keys():
            raise UnsupportedModelError(
                f"layer_types has {', '.join(map(repr, sorted(unknown)))}: jaxpage knows {', '.join(kinds)}"
            )
        if len(layer_types) != len(slides):
            raise UnsupportedModelError(f"layer_types has {len(layer_types)} entries for {len(slides)} layers")
        slides = [kinds[kind] for kind in layer_types]
    window = hf.get("sliding_window", 4096)  # transformers' default for all that have one
    if any(slides) and not window:
        raise UnsupportedModelError(f"sliding_window is {window}, but some layers slide: it must be a size")
    return tuple(int(window) if slide else None for slide in slides)


def rope_from_hf(hf: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """RoPE from `rope_scaling` or `rope_parameters`. Raises as `rope_from_parameters` does."""
    return rope_from_parameters(hf, hf.get("rope_scaling") or hf.get("rope_parameters") or {}, head_dim)


def rope_from_parameters(hf: Mapping[str, Any], scaling: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """RoPE from `scaling` ("rope_type" or "type", and its numbers) and what stands beside it in the config `hf`.

    Read as transformers 5 does. Raises `UnsupportedModelError` for a kind that jaxpage does not know, by name.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"RoPE kind {kind!r} is not supported: jaxpage knows {', '.join(ROPE_KINDS)}")
    max_position = int(require(hf, "max_position_embeddings"))
    original = int(
        hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or max_position
    )
    rotary_share = float(scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * rotary_share)
    factor = scaling.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise UnsupportedModelError(f"RoPE kind {kind!r} needs a factor, and rope_scaling has none")
        factor = max_position / original
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and len(scaling.get(name) or ()) != rotary_dim // 2:
            raise UnsupportedModelError(
                f"RoPE kind 'longrope' needs {rotary_dim // 2} values of {name}, got {len(scaling.get(name) or ())}"
            )
    return RopeConfig(
        kind=kind,
        theta=float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        rotary_dim=rotary_dim,
        max_position=max_position,
        original_max_position=original,
        factor=float(factor),
        attention_scaling=_attention_scaling(kind, scaling, float(factor), original),
        beta_fast=float(scaling.get("beta_fast") or 32),
        beta_slow=float(scaling.get("beta_slow") or 1),
        truncate=bool(scaling.get("truncate", True)),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        short_factor=tuple(map(float, scaling.get("short_factor") or ())),
        long_factor=tuple(map(float, scaling.get("long_factor") or ())),
    )


def _attention_scaling(kind: str, scaling: Mapping[str, Any], factor: float, original: int) -> float:
    """What multiplies cos and sin: given, or derived as the yarn and LongRoPE papers do."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1
