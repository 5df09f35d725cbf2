"""Tiny random checkpoints, made on the spot: what `tiny_logits.npz` and `beam_search.json` were computed from.

Nothing random is committed. Every tensor is drawn from the bit stream of `numpy.random.RandomState`, which numpy
promises never to change, as an integer of at most 7 bits times a power of two. So the weights are the same on every
machine and exact in float32, float16 and bfloat16 alike: however a checkpoint is stored, its float32 logits are one.
"""

import copy
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Config = dict[str, Any]

PROMPT_LENGTHS: dict[str, tuple[int, ...]]
"""For each name in `TINY`, the lengths of the prompts that have logits in `tiny_logits.npz`."""

_LLAMA: Config = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = 32
_GEMMA: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,  # not head_dim, so that a reader which forgets it is caught
    "intermediate_size": 96,
    "vocab_size": 128,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "sliding_window": _WINDOW,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHORT_FACTOR = [1.0, 1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5]
_LONG_FACTOR = [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]
_ROPE_THETA = 5000.0  # not 10000, so that a reader which forgets it is caught

_ROPE_KINDS: dict[str, tuple[Config, int]] = {
    "default": ({}, 256),
    "linear": ({"factor": 2.0}, 256),
    "dynamic": ({"factor": 2.0}, 64),
    "yarn": ({"factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "longrope": (
        {"short_factor": _SHORT_FACTOR, "long_factor": _LONG_FACTOR, "original_max_position_embeddings": 64},
        256,
    ),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        256,
    ),
}
"""RoPE kind -> (its parameters, `max_position_embeddings`).

`dynamic` alone takes `max_position_embeddings` itself for the original context, and scales beyond it.
"""


def _llama(**changes: Any) -> Config:
    return copy.deepcopy(_LLAMA | {"rope_theta": _ROPE_THETA} | changes)


def _llama_with_rope_parameters(**changes: Any) -> Config:
    """As transformers 5 writes configs: no `rope_theta` beside `rope_parameters`, but one inside."""
    return copy.deepcopy(_LLAMA | changes)


def _gemma2(**changes: Any) -> Config:
    return copy.deepcopy(_GEMMA | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]} | changes)


def _gemma3(**changes: Any) -> Config:
    config = _GEMMA | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
    return copy.deepcopy(config | changes)


def _gemma_configs() -> dict[str, Config]:
    # Three sliding layers to a full one: KV groups of one layer each.
    old = {"rope_theta": _ROPE_THETA, "rope_local_base_freq": 700.0, "sliding_window_pattern": 4}
    configs = {
        "gemma2": _gemma2(rope_theta=_ROPE_THETA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
        # The keys that have a default in Gemma 2: its caps, and every other layer slides.
        "gemma2_defaults": _gemma2(num_hidden_layers=3),
        "gemma2_layer_types": _gemma2(
            layer_types=["full_attention", *["sliding_attention"] * 3],
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": _ROPE_THETA},
        ),
        "gemma3": _gemma3(**old),
        # The keys that have a default in Gemma 3: both thetas, and every sixth layer sees everything.
        "gemma3_defaults": _gemma3(num_hidden_layers=7),
        "gemma3_bias": _gemma3(**old, attention_bias=True, tie_word_embeddings=False, final_logit_softcapping=3.0),
    }
    for kind, (parameters, max_position_embeddings) in _ROPE_KINDS.items():
        size = {"max_position_embeddings": max_position_embeddings}
        if kind != "default":
            configs[f"gemma3_rope_{kind}"] = _gemma3(**old | size, rope_scaling={"rope_type": kind} | parameters)
        configs[f"gemma3_rope_{kind}_parameters"] = _gemma3(
            layer_types=[*["sliding_attention"] * 3, "full_attention"],
            rope_parameters={
                "full_attention": {"rope_type": kind, "rope_theta": _ROPE_THETA} | parameters,
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
            **size,
        )
    return configs


def _tiny_configs() -> dict[str, Config]:
    configs = {
        "llama": _llama(rope_scaling=None),
        "llama_tied": _llama(tie_word_embeddings=True),
        "llama_wide_heads": _llama(head_dim=32, rms_norm_eps=1e-6),
        "llama_bias": _llama(attention_bias=True, mlp_bias=True),
        "mistral": _llama(
            model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None, rope_theta=10000.0
        ),
        "mistral_sliding": _llama(
            model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=_WINDOW, rope_theta=10000.0
        ),
        "qwen2": _llama(
            model_type="qwen2",
            architectures=["Qwen2ForCausalLM"],
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            sliding_window=32,  # without effect, as Qwen2 checkpoints have it
            max_window_layers=1,
            use_sliding_window=False,
        ),
        "qwen3": _llama(
            model_type="qwen3",
            architectures=["Qwen3ForCausalLM"],
            head_dim=32,
            rms_norm_eps=1e-6,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
        ),
    }
    for name in ("mistral", "mistral_sliding", "qwen2", "qwen3"):
        del configs[name]["mlp_bias"]
    for name in ("mistral", "mistral_sliding", "qwen2"):
        del configs[name]["attention_bias"]  # Qwen2 has it always on q, k and v, never on o
    del configs["qwen2"]["head_dim"]  # left to be hidden_size / num_attention_heads
    # The second of its two layers slides.
    configs["qwen2_sliding"] = copy.deepcopy(configs["qwen2"] | {"use_sliding_window": True})
    configs |= _gemma_configs()

    for kind, (parameters, max_position_embeddings) in _ROPE_KINDS.items():
        size = {"max_position_embeddings": max_position_embeddings}
        configs[f"rope_{kind}_type"] = _llama(rope_scaling={"type": kind} | parameters, **size)
        configs[f"rope_{kind}_rope_type"] = _llama(rope_scaling={"rope_type": kind} | parameters, **size)
        configs[f"rope_{kind}_parameters"] = _llama_with_rope_parameters(
            rope_parameters={"rope_type": kind, "rope_theta": _ROPE_THETA} | parameters, **size
        )

    yarn, longrope = _ROPE_KINDS["yarn"][0], _ROPE_KINDS["longrope"][0]
    only_factors = {"short_factor": _SHORT_FACTOR, "long_factor": _LONG_FACTOR}
    configs |= {
        # No RoPE key at all: transformers takes a theta of 10000.
        "rope_absent": _llama_with_rope_parameters(),
        # Both keys, in disagreement: "rope_type" wins.
        "rope_two_types": _llama(rope_scaling={"type": "dynamic", "rope_type": "linear", "factor": 2.0}),
        # theta beside `rope_parameters`, not inside.
        "rope_parameters_theta_outside": _llama(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        "rope_yarn_betas": _llama(rope_scaling={"rope_type": "yarn", "beta_fast": 8, "beta_slow": 2} | yarn),
        "rope_yarn_not_truncated": _llama(rope_scaling={"rope_type": "yarn", "truncate": False} | yarn),
        "rope_yarn_attention_factor": _llama(rope_scaling={"rope_type": "yarn", "attention_factor": 1.5} | yarn),
        "rope_yarn_mscale": _llama(rope_scaling={"rope_type": "yarn", "mscale": 2.0, "mscale_all_dim": 0.5} | yarn),
        # One of the pair alone does nothing.
        "rope_yarn_mscale_alone": _llama(rope_scaling={"rope_type": "yarn", "mscale": 2.0} | yarn),
        # As Qwen2.5's cards advise, less the original context: it is then `max_position_embeddings`.
        "rope_yarn_no_original": _llama(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=64),
        # As Phi-3 has it: the original context is a field of the config, not of `rope_scaling`.
        "rope_longrope_original_outside": _llama(
            rope_scaling={"type": "longrope"} | only_factors, original_max_position_embeddings=64
        ),
        # A given factor takes the place of 256 / 64 in the attention scaling, and of nothing else.
        "rope_longrope_factor": _llama(rope_scaling={"rope_type": "longrope", "factor": 8.0} | longrope),
        "rope_longrope_attention_factor": _llama(
            rope_scaling={"rope_type": "longrope", "attention_factor": 1.25} | longrope
        ),
    }
    return configs


TINY: dict[str, Config] = _tiny_configs()
"""Name -> config, as `config.json` would hold it. Take a copy before changing one."""

# A prompt of 100 exceeds the original context of 64 wherever there is one; 50 is inside it. `dynamic` and `longrope`
# have other frequencies on either side of it.
PROMPT_LENGTHS = {name: (50, 100) if "dynamic" in name or "longrope" in name else (100,) for name in TINY}
# Lengths around a window tell an off-by-one.
PROMPT_LENGTHS |= dict.fromkeys(("mistral_sliding", "gemma2", "gemma3"), (_WINDOW - 1, _WINDOW, _WINDOW + 1, 128))


def prompt(length: int) -> list[int]:
    """The token ids every golden of this length was computed for; a shorter prompt is the start of a longer one."""
    return np.random.RandomState(1234).randint(3, 128, size=1000)[:length].tolist()  # type: ignore[no-any-return]


def positions(length: int) -> list[int]:
    """The positions of a prompt whose logits are kept: every seventh, and the last."""
    return sorted({*range(0, length, 7), length - 1})


def weight_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Hugging Face tensor name -> shape, in the order of the layers, for any config of `TINY`."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    is_gemma = config["model_type"].startswith("gemma")
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias = config.get("attention_bias", False)

    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}

    def linear(name: str, size_out: int, size_in: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (size_out, size_in)
        if bias:
            shapes[f"{name}.bias"] = (size_out,)

    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(f"{layer}.self_attn.{name}", size, hidden, attention_bias or config["model_type"] == "qwen2")
        if config["model_type"] in ("qwen3", "gemma3_text"):
            shapes[f"{layer}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, q_size, attention_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if is_gemma:
            shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"{layer}.post_feedforward_layernorm.weight"] = (hidden,)
        for name, size_out, size_in in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            linear(f"{layer}.mlp.{name}_proj", size_out, size_in, config.get("mlp_bias", False))
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", is_gemma):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def make_weights(config: Config, seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of `config` in float32 under their Hugging Face names; `lm_head.weight` only if it is not tied.

    Norms multiply by [0.75, 1.25]; the rest is scaled for logits with a standard deviation of about 2. A tensor depends
    on its name, its shape and `seed` alone, so configs of equal shapes have equal weights.
    """
    weights = {name: _tensor(name, shape, seed) for name, shape in weight_shapes(config).items()}
    if config["model_type"].startswith("gemma"):
        # Its models add the 1 themselves.
        weights |= {name: weight - 1 for name, weight in weights.items() if name.endswith("norm.weight")}
    return weights


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    random = np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))
    if name.endswith("norm.weight"):
        return (1 + random.randint(-32, 33, size=shape) / 128).astype(np.float32)
    is_projection = name.endswith("_proj.weight")
    return (random.randint(-127, 128, size=shape) / (512 if is_projection else 256)).astype(np.float32)


def write_checkpoint(
    folder: Path, config: Config, weights: dict[str, np.ndarray], dtype: str = "float32", num_shards: int = 1
) -> None:
    """Writes a Hugging Face checkpoint into `folder`, which is made if need be.

    `dtype` is "float32", "float16" or "bfloat16". With one shard there is `model.safetensors`; with more there are
    `model-00001-of-0000N.safetensors` and so on, and `model.safetensors.index.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token_ids: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    _write_json(folder / "config.json", config | {"dtype": dtype})
    _write_json(folder / "generation_config.json", token_ids)
    if num_shards == 1:
        _write_safetensors(folder / "model.safetensors", weights, dtype)
        return

    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        names = [name for index, name in enumerate(weights) if index * num_shards // len(weights) == shard]
        _write_safetensors(folder / file_name, {name: weights[name] for name in names}, dtype)
        weight_map |= dict.fromkeys(names, file_name)
    total_size = sum(weight.size for weight in weights.values()) * (4 if dtype == "float32" else 2)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    if dtype == "bfloat16":
        import ml_dtypes  # not needed, and not at hand, where the goldens are made

        stored = {name: weight.astype(ml_dtypes.bfloat16) for name, weight in weights.items()}
    else:
        stored = {name: weight.astype(dtype) for name, weight in weights.items()}
    save_file(stored, path, metadata={"format": "pt"})
