"""A GGUF file as a `Checkpoint`: Hugging Face names, shapes, config and row order, whatever llama.cpp made of them.

In: a file as llama.cpp's converters write it (architectures llama, qwen2, qwen3, gemma3). Out: float tensors; nothing
is read from the memory-mapped file before it is asked for.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints.checkpoint import Index
from jaxpage.models.checkpoints.gguf_config import config_from_gguf, generation_config_from_gguf
from jaxpage.models.checkpoints.gguf_metadata import GgufTensor, read_gguf_header
from jaxpage.models.checkpoints.packaged import gguf_parts

_FLOATS = {0: np.dtype(np.float32), 1: np.dtype(np.float16), 30: np.dtype(ml_dtypes.bfloat16)}
_QUANTIZED = {
    # ggml type: (name, weights per block, bytes per block)
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
_Q4_1, _Q8_0 = 3, 8
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FREQS = "rope_freqs.weight"
_CHUNK = 1 << 18
"""Weights dequantized at once: few enough that numpy's temporaries stay in the processor's cache."""


class GgufCheckpoint:
    """`Checkpoint` over a GGUF file or, by the first of them, its parts.

    Raises `ModelLoadError` when one is missing, cut short or of an unknown kind.
    """

    def __init__(self, path: Path) -> None:
        header = read_gguf_header(path)
        self.path = path
        self.config = config_from_gguf(header)
        self.generation_config = generation_config_from_gguf(header.metadata)
        self._architecture = header.metadata["general.architecture"]
        self._parts = gguf_parts(path)
        if (count := header.metadata.get("split.count", 1)) != len(self._parts):
            raise ModelLoadError(f"{path} is one of {count} parts: give all of them the names that llama.cpp gives")
        self._data = [np.memmap(part, dtype=np.uint8, mode="r") for part in self._parts]
        stored = dict(header.tensors)
        for number, part in enumerate(self._parts[1:], 1):
            others = read_gguf_header(part).tensors
            stored |= {name: dataclasses.replace(tensor, part=number) for name, tensor in others.items()}
        self._tensors = {}
        for gguf_name, tensor in stored.items():
            self._check_extent(gguf_name, tensor)
            if gguf_name != _ROPE_FREQS:
                self._tensors[self._hf_name(gguf_name)] = tensor
        if freqs := stored.get(_ROPE_FREQS):
            if "rope_scaling" in self.config:
                raise ModelLoadError(f"{path} has both {_ROPE_FREQS} and rope.scaling.type: one or the other is served")
            # Divisors of the frequencies at every length: LongRoPE whose two tables are the same.
            factors = self._floats(_ROPE_FREQS, freqs).tolist()
            self.config["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
            }

    def names(self) -> Iterable[str]:
        """Names of all tensors, as in Hugging Face checkpoints."""
        return self._tensors.keys()

    def read(self, name: str, shape: tuple[int, ...], index: Index = ()) -> np.ndarray:
        """The part at `index` of a tensor of `shape` (`[out, in]`), in its stored float type, quantized as float32.

        Only the blocks that the part touches are dequantized. Raises `ModelLoadError` naming tensor and file when it
        is missing, of another shape or of an unknown type.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"{self.path} has no tensor {name}")
        if tensor.shape != shape:
            raise ModelLoadError(f"tensor {name} in {self.path} has shape {tensor.shape}, the config asks for {shape}")
        values = self._floats(name, tensor, index)
        if self._architecture == "gemma3" and name.endswith("norm.weight"):
            # llama.cpp's files hold 1 + weight; Hugging Face models add the one themselves.
            return values.astype(np.float32) - np.float32(1)
        return values

    def _floats(self, name: str, tensor: GgufTensor, index: Index = ()) -> np.ndarray:
        """Values of `tensor` at `index`, in Hugging Face's row order."""
        if tensor.ggml_type not in _FLOATS and tensor.ggml_type not in _QUANTIZED:
            raise ModelLoadError(
                f"tensor {name} in {self.path} has the type {_type_name(tensor.ggml_type)}, served are: "
                f"F32, F16, BF16, {', '.join(kind for kind, _, _ in _QUANTIZED.values())}"
            )
        stored = self._data[tensor.part][tensor.offset : tensor.offset + _num_bytes(tensor)].view(np.ndarray)
        if tensor.ggml_type in _FLOATS:
            values = stored.view(_FLOATS[tensor.ggml_type]).reshape(tensor.shape)
            return self._rows(name, values, index)
        _, block_size, block_bytes = _QUANTIZED[tensor.ggml_type]
        *leading, num_columns = tensor.shape
        columns = range(num_columns)[index[-1]] if len(index) == len(tensor.shape) else range(num_columns)
        blocks = slice(columns.start // block_size, -(-columns.stop // block_size))
        # Whole blocks move, so they are picked and put in order while they are still small.
        stored = stored.reshape(*leading, -1, block_bytes)
        picked = self._rows(name, stored, (*index[: len(leading)],))[..., blocks, :]
        values = _dequantize(
            picked.reshape(math.prod(picked.shape[:-2]), picked.shape[-2] * block_bytes), tensor.ggml_type
        )
        first = columns.start - blocks.start * block_size
        return values.reshape(*picked.shape[:-2], values.shape[-1])[..., first : first + len(columns)]

    def _rows(self, name: str, stored: np.ndarray, index: Index) -> np.ndarray:
        """`stored[index]`, with query and key rows `[heads * head_dim, ...]` of Llama files put in order.

        llama.cpp rotates neighbours of a head, Hugging Face its halves.
        """
        if self._architecture != "llama" or not re.search(r"\.[qk]_proj\.(weight|bias)$", name):
            return stored[index]
        heads = self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        num_rows = stored.shape[0]
        order = np.arange(num_rows).reshape(heads, num_rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
        return stored[order[index[0]] if index else order][:, *index[1:]]

    def _hf_name(self, gguf_name: str) -> str:
        layer_names = _GEMMA_LAYER if self._architecture == "gemma3" else _LAYER
        if gguf_name in _TOP:
            return _TOP[gguf_name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
        if match is None or match[2] not in layer_names:
            raise ModelLoadError(f"tensor {gguf_name} in {self.path} has no place in {self._architecture} models")
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"

    def _check_extent(self, gguf_name: str, tensor: GgufTensor) -> None:
        if tensor.ggml_type in _QUANTIZED and (not tensor.shape or tensor.shape[-1] % _QUANTIZED[tensor.ggml_type][1]):
            raise ModelLoadError(f"tensor {gguf_name} in {self.path} has rows of no whole blocks: {tensor.shape}")
        end = tensor.offset + _num_bytes(tensor)
        if end > (size := self._data[tensor.part].size):
            raise ModelLoadError(
                f"{self._parts[tensor.part]} is cut short: tensor {gguf_name} ends at byte {end}, the file at {size}"
            )


def _num_bytes(tensor: GgufTensor) -> int:
    count = math.prod(tensor.shape)
    if tensor.ggml_type in _FLOATS:
        return count * int(_FLOATS[tensor.ggml_type].itemsize)
    if tensor.ggml_type in _QUANTIZED:
        _, block_size, block_bytes = _QUANTIZED[tensor.ggml_type]
        return count // block_size * block_bytes
    return 0  # refused by name if it is ever read


def _type_name(ggml_type: int) -> str:
    from gguf.constants import GGMLQuantizationType

    known = {int(kind): str(kind.name) for kind in GGMLQuantizationType}
    return known.get(ggml_type, f"number {ggml_type}")


def _dequantize(rows: np.ndarray, ggml_type: int) -> np.ndarray:
    """`[rows, bytes]` uint8 to `[rows, columns]` float32."""
    _, block_size, block_bytes = _QUANTIZED[ggml_type]
    out = np.empty((rows.shape[0], rows.shape[1] // block_bytes * block_size), np.float32)
    if not out.size:
        return out
    step = max(1, _CHUNK // out.shape[1])
    for start in range(0, rows.shape[0], step):
        _dequantize_chunk(rows[start : start + step], out[start : start + step], ggml_type)
    return out


def _dequantize_chunk(rows: np.ndarray, out: np.ndarray, ggml_type: int) -> None:
    """Fills `out [rows, columns]`. The types of the default model have their own formula, twice as fast as gguf's."""
    _, block_size, block_bytes = _QUANTIZED[ggml_type]
    blocks, values = rows.reshape(-1, block_bytes), out.reshape(-1, block_size)
    if ggml_type == _Q8_0:  # a scale, then 32 signed bytes
        scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
        np.multiply(blocks[:, 2:].view(np.int8), scale, out=values)
    elif ggml_type == _Q4_1:  # a scale, a minimum, then 16 bytes of which the low halves are the first 16 weights
        scale, minimum = np.split(blocks[:, :4].copy().view(np.float16).astype(np.float32), 2, axis=1)
        np.multiply(blocks[:, 4:] & 15, scale, out=values[:, :16])
        np.multiply(blocks[:, 4:] >> 4, scale, out=values[:, 16:])
        values += minimum
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        out[:] = dequantize(rows, GGMLQuantizationType(ggml_type))
