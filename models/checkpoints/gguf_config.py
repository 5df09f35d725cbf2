"""GGUF metadata as the dicts of `config.json` and `generation_config.json`."""

from typing import Any

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints.gguf_metadata import GgufHeader

ARCHITECTURES = {
    # GGUF architecture: (Hugging Face architecture, model type)
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}


def config_from_gguf(header: GgufHeader) -> dict[str, Any]:
    """What `config.json` says of the same model. Raises `ModelLoadError` naming what is missing or not served.

    A Llama 3 file holds no RoPE scaling but the factors made of it, `[head_dim / 2]` divisors of the frequencies, as
    the tensor `rope_freqs.weight`; whoever reads tensors adds them as `rope_scaling`.
    """
    arch = header.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelLoadError(f"{header.path} has the architecture {arch!r}, served are: {', '.join(ARCHITECTURES)}")

    def get(key: str, default: Any = None) -> Any:
        return header.metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        if (value := get(key)) is None:
            raise ModelLoadError(f"{header.path} lacks the metadata {arch}.{key}")
        return value

    if get("expert_count"):
        raise ModelLoadError(f"{header.path} is a mixture of experts ({arch}.expert_count): not served from GGUF")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{header.path} has no matrix token_embd.weight")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    if isinstance(heads, tuple) or isinstance(kv_heads, tuple):
        raise ModelLoadError(f"{header.path} has another number of heads in each layer: not served")
    rope_dims = get("rope.dimension_count")
    head_dim = get("attention.key_length") or rope_dims or hidden // heads
    if rope_dims not in (None, head_dim):
        raise ModelLoadError(f"{header.path} rotates {rope_dims} of {head_dim} head dimensions: not served")
    architecture, model_type = ARCHITECTURES[arch]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if scaling := _rope_scaling(header, arch):
        config["rope_scaling"] = scaling
    window = get("attention.sliding_window")
    if arch == "gemma3":
        config |= _gemma3_config(config, get, window)
    elif arch == "llama" and window:
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _gemma3_config(config: dict[str, Any], get: Any, window: int | None) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    # Gemma 3 27B alone scales queries by hidden_size / heads; llama.cpp knows it by its 62 layers, too.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    full = [(layer + 1) % 6 == 0 or not window for layer in range(layers)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "layer_types": ["full_attention" if is_full else "sliding_attention" for is_full in full],
        "rope_local_base_freq": get("rope.freq_base_swa", 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": get("final_logit_softcapping"),
    }


def _rope_scaling(header: GgufHeader, arch: str) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling."
    found = {key.removeprefix(prefix): value for key, value in header.metadata.items() if key.startswith(prefix)}
    linear = header.metadata.get(f"{arch}.rope.scale_linear")  # files before rope.scaling.*
    kind = found.get("type", "linear" if linear else "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": found.get("factor", linear)}
    if kind != "yarn":
        raise ModelLoadError(f"{header.path} has the RoPE scaling {kind!r}, served are: none, linear, yarn")
    renamed = {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_attn_factor": "attention_factor",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
    return {"rope_type": "yarn"} | {new: found[old] for old, new in renamed.items() if old in found}


def generation_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """Every token that ends an answer (end of sequence, of turn, of message) and the one that starts a text."""
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    out: dict[str, Any] = {}
    if known := list(dict.fromkeys(end for end in ends if end is not None)):
        out["eos_token_id"] = known
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        out["bos_token_id"] = bos
    return out
