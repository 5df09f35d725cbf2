"""Options that depend on the model or the device, resolved once; every choice is logged with its reason."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpage.config import MAX_STEPS_IN_FLIGHT, EngineConfig, SizedConfig
from jaxpage.errors import ConfigError
from jaxpage.kv_cache.spec import block_bytes, num_useful_blocks
from jaxpage.models.served_model import ServedModel
from jaxpage.ops.attention.launch import MAX_SPLIT_BLOCK_M, PROGRAMS_PER_SM
from jaxpage.ops.state_spec import KVLayout
from jaxpage.runner.program_config import NUM_SCORED_TOKENS

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 2**30
"""Most memory the KV cache takes on a CPU unless `num_blocks` says otherwise: other programs live there, too."""
_CPU_KV_FRACTION = 0.5
_MAX_SLOTS = 2**30
"""Token positions in the pool: twice as many, keys and values, are counted in 32 bits."""


def resolve_sizes(config: EngineConfig, platform: str) -> SizedConfig:
    """The rows and tokens of a step."""
    sized = config.sized(platform)
    if None in (config.max_num_seqs, config.max_num_batched_tokens):
        logger.info(
            "max_num_seqs=%d, max_num_batched_tokens=%d (what is not given: default on %s)",
            *(sized.max_num_seqs, sized.max_num_batched_tokens, platform),
        )
    return sized


def resolve_dtype(dtype: str, platform: str) -> np.dtype[Any]:
    """Of weights, activations and KV cache."""
    if dtype == "auto":
        dtype = "float32" if platform == "cpu" else "bfloat16"
        logger.info("dtype=%s (default on %s)", dtype, platform)
    return np.dtype(dtype)


def resolve_max_model_len(config: EngineConfig, longest: int) -> int:
    """Most tokens of a request; `longest` is the model's context. Raises `ConfigError` for more than that."""
    if config.max_model_len is None:
        logger.info("max_model_len=%d (the model's context)", longest)
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, the model's context is {longest}: lower it")
    return config.max_model_len


@dataclass(frozen=True)
class Memory:
    """What each device has for the KV cache, in bytes."""

    free: int
    weights: int
    batch: int = 0
    programs: int = 0
    """See `program_bytes`."""
    share: str = ""
    """What `free` is of the device."""

    @property
    def left(self) -> int:
        return self.free - self.weights - self.batch - self.programs

    def __str__(self) -> str:
        taken = {"weights": self.weights, "batch": self.batch, "programs": self.programs}
        parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in taken.items() if size)
        return f"{self.free / 2**30:.2f} GiB{self.share and f' ({self.share})'} but for {parts}"


def resolve_num_blocks(
    config: SizedConfig, layout: KVLayout, max_model_len: int, memory: Memory, *, of_a_block: int, platform: str
) -> int:
    """Blocks in the pool, the null block included. Raises `ConfigError` when memory holds hardly any.

    of_a_block: bytes that each device holds of it.
    """
    fraction = config.kv_memory_fraction or (_CPU_KV_FRACTION if platform == "cpu" else 1.0)
    budget = fraction * memory.left
    if platform == "cpu":
        budget = min(budget, _CPU_KV_BYTES / config.tensor_parallel_size)
    useful = num_useful_blocks(layout, config.max_num_seqs, max_model_len, config.max_step_tokens)
    num_blocks = min(int(budget // of_a_block), useful, max_blocks(layout))
    if num_blocks < 2:
        raise ConfigError(
            f"{memory} do not hold two KV blocks of {of_a_block / 2**20:.1f} MiB: raise --tensor-parallel-size or "
            "--kv-memory-fraction, or lower --max-num-seqs, --max-num-batched-tokens or --block-size"
        )
    logger.info(
        "num_blocks=%d (%.2f GiB in %d KV groups; %.2f of what each device has: %s; no more is of use%s)",
        *(num_blocks, num_blocks * of_a_block / 2**30, len(layout.groups), fraction, memory),
        ", at most 1 GiB on a CPU" if platform == "cpu" else "",
    )
    return num_blocks


def max_blocks(layout: KVLayout) -> int:
    """Most blocks of a pool: positions in it are counted in 32 bits."""
    return _MAX_SLOTS // layout.grain


def program_bytes(config: SizedConfig, model: ServedModel, layout: KVLayout, batch_bytes: int) -> int:
    """What programs take of each GPU at most, beside what they are given: scratch, results, and what compiling takes.

    A program's scratch is given back before the next begins, so that the largest counts.
    """
    logits = config.max_num_seqs * (1 + config.max_drafts) * model.vocab_size * 4
    # XLA tries out matrix products when it compiles on a GPU, with operands of its own, a program or two at a time.
    operand = max(_shard_bytes(leaf) for leaf in jax.tree.leaves(model.param_shapes))
    scratch = scratch_bytes(config, model, layout, batch_bytes)
    return scratch + (MAX_STEPS_IN_FLIGHT + 1) * logits + 2 * operand + _SPARE_BYTES


def scratch_bytes(config: SizedConfig, model: ServedModel, layout: KVLayout, batch_bytes: int) -> int:
    """An upper bound of any program's scratch on each GPU, from shapes. batch_bytes: of the batch's state.

    The pool's size is part of a program, and must be known before any is compiled. That compiled ones stay below is a
    test: tests/kernel/test_program_memory.py.
    """
    tokens, rows, vocab = config.max_num_batched_tokens, config.max_num_seqs, model.vocab_size
    logits = rows * (1 + config.max_drafts) * vocab * 4
    activations = tokens * (5 * model.embed_size + sum(_widest_products(model))) * model.dtype.itemsize
    # Of attention that is split over the KV, each part of a block leaves sums, their weights and their highest scores.
    kept = [group.spec for group in layout.groups]
    num_heads = max((spec.num_query_heads for spec in kept), default=0) // model.num_shards
    head_dim = max((spec.head_dim for spec in kept), default=0)
    blocks = max(rows, _SPLIT_TOKENS) * num_heads + PROGRAMS_PER_SM * _MOST_SMS * MAX_SPLIT_BLOCK_M
    parts = blocks * (head_dim + 2) * 4
    return max(
        activations + parts,
        (6 if config.logits_processors else 4) * logits + rows * _DRAW_BYTES,  # several devices gather them, too
        2 * NUM_SCORED_TOKENS * vocab * 4,
        rows * len(layout.groups) * block_bytes(layout, model.dtype.itemsize, model.num_shards)
        + batch_bytes,  # all rows fork
    )


def _widest_products(model: ServedModel) -> list[int]:
    """Numbers per token that the two widest products of a layer give on each device: its projection and its MLP."""
    matrices = [leaf for leaf in jax.tree.leaves(model.param_shapes) if len(leaf.shape) > 1]
    of_layers = [leaf for leaf in matrices if math.prod(leaf.shape[:-1]) != model.vocab_size]
    return sorted({math.prod(leaf.sharding.shard_shape(leaf.shape)[:-1]) for leaf in of_layers})[-2:]


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    assert leaf.sharding is not None
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


_MOST_SMS = 160
"""Of any GPU."""
_SPLIT_TOKENS = 512
"""Longer steps fill a GPU without splitting the KV."""
_DRAW_BYTES = 2**18
"""Of a row, whatever the vocabulary."""
_SPARE_BYTES = 2**28
"""Constants of programs, what the host sends and fetches, and what lies between two arrays."""
