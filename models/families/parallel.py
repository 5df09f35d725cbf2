"""How a model is divided among devices: whole KV heads to each, copied where there are more devices than heads."""

import dataclasses
import logging

from jaxpage.errors import ConfigError
from jaxpage.models.families.hf_config import ModelConfig

logger = logging.getLogger(__name__)


def divide_model(cfg: ModelConfig, num_devices: int) -> ModelConfig:
    """`cfg` with enough copies of its KV heads that each of `num_devices` has one of its own.

    Raises `ConfigError` naming the numbers of devices that divide the model.
    """
    if not _divides(cfg, num_devices):
        possible = [str(size) for size in range(1, cfg.num_heads + 1) if _divides(cfg, size)]
        raise ConfigError(
            f"--tensor-parallel-size is {num_devices}: it cannot divide {cfg.num_heads} heads in {cfg.num_kv_heads} KV "
            f"heads and MLPs of {cfg.intermediate_size} evenly; {', '.join(possible)} can"
        )
    if cfg.vocab_size % num_devices:
        logger.warning("%d devices do not divide a vocabulary of %d: each keeps all of it", num_devices, cfg.vocab_size)
    copies = max(1, num_devices // cfg.num_kv_heads)
    return dataclasses.replace(cfg, num_kv_heads=cfg.num_kv_heads * copies, kv_head_copies=copies)


def _divides(cfg: ModelConfig, num_devices: int) -> bool:
    whole_kv_heads = cfg.num_kv_heads % num_devices == 0 or num_devices % cfg.num_kv_heads == 0
    return whole_kv_heads and cfg.num_heads % num_devices == 0 and cfg.intermediate_size % num_devices == 0
