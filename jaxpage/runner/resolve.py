"""Options that depend on the model or the device, resolved once; every choice is logged with its reason."""

import logging
from typing import Any

import numpy as np

from jaxpage.config import EngineConfig
from jaxpage.errors import ConfigError
from jaxpage.kv_cache.spec import num_blocks_for
from jaxpage.ops.kv_spec import KVLayout

logger = logging.getLogger(__name__)

_CPU_KV_BYTES = 2**30
"""Most memory the KV cache takes on a CPU unless `num_blocks` says otherwise: other programs live there, too."""


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


def resolve_num_blocks(
    config: EngineConfig,
    layout: KVLayout,
    dtype: np.dtype[Any],
    max_model_len: int,
    free: int,
    *,
    platform: str,
    num_devices: int,
) -> int:
    """Blocks in the pool, the null block included. Raises `ConfigError` when memory holds hardly any.

    `free`: bytes that each of the devices has beside the weights.
    """
    page = layout.groups[0]
    block_bytes = layout.num_buffers * page.block_size * page.spec.token_elements * dtype.itemsize // num_devices
    budget = config.kv_memory_fraction * free
    if platform == "cpu":
        budget = min(budget, _CPU_KV_BYTES / num_devices)
    useful = config.max_num_seqs * num_blocks_for(layout, max_model_len, config.max_step_tokens) + 1
    num_blocks = min(int(budget // block_bytes), useful)
    if num_blocks < 2:
        raise ConfigError(
            f"{free / 2**30:.2f} GiB beside the weights do not hold two KV blocks of {block_bytes / 2**20:.1f} MiB: "
            "raise --kv-memory-fraction or lower --block-size"
        )
    logger.info(
        "num_blocks=%d (%.2f GiB in %d KV groups; %.2f of %.2f GiB beside the weights%s; no more is of use%s)",
        *(num_blocks, num_blocks * block_bytes / 2**30, len(layout.groups)),
        *(config.kv_memory_fraction, free / 2**30, " of each device" if num_devices > 1 else ""),
        ", at most 1 GiB on a CPU" if platform == "cpu" else "",
    )
    return num_blocks
