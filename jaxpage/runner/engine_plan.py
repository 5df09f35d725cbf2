"""What an engine will have on its devices, settled before any of it is there: to serve, or to compile elsewhere."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.aot.targets import share_of
from jaxpage.config import EngineConfig, SizedConfig
from jaxpage.errors import ConfigError, ModelLoadError
from jaxpage.kv_cache.spec import max_request_tokens, plan_layout
from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.families.hf_config import ModelConfig, UnsupportedModelError
from jaxpage.models.families.parallel import divide_model
from jaxpage.models.registry import Model, resolve_model
from jaxpage.models.weights import Params, param_shapes
from jaxpage.ops.attention.paged import KV_CACHE_SPEC, KVCache, logits_sharding
from jaxpage.ops.kv_spec import KVLayout
from jaxpage.runner.buckets import Bucket, make_buckets
from jaxpage.runner.compiler import DeviceShapes
from jaxpage.runner.logits_processors import OwnProcessor, load_processors
from jaxpage.runner.plan import rules_layout
from jaxpage.runner.program_config import ProgramConfig
from jaxpage.runner.resolve import (
    Memory,
    block_bytes,
    max_blocks,
    program_bytes,
    resolve_dtype,
    resolve_max_model_len,
    resolve_num_blocks,
    resolve_sizes,
)
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state
from jaxpage.sampling_params import MAX_BEAM_CANDIDATES, MAX_STOP_TOKEN_IDS

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnginePlan:
    """One model on a mesh of devices, as its options say."""

    config: SizedConfig
    mesh: Mesh
    model: Model
    model_config: ModelConfig
    dtype: np.dtype[Any]
    specs: Params
    """A `Weight` for each array."""
    layout: KVLayout
    num_blocks: int
    """The null block included."""
    max_model_len: int
    processors: tuple[OwnProcessor, ...]

    @property
    def program_config(self) -> ProgramConfig:
        return ProgramConfig(self.model_config, MAX_BEAM_CANDIDATES, self.processors, self.config.speculative_config)

    @property
    def buckets(self) -> list[Bucket]:
        return make_buckets(self.config.max_num_seqs, self.config.max_num_batched_tokens, self.config.max_drafts)

    @property
    def makers(self) -> dict[str, Callable[[], Any]]:
        """What makes those of `shapes` that begin empty."""
        return {"kv_cache": self.make_kv_cache, "state": self.make_state, "logits": self.make_logits}

    @property
    def replicated(self) -> NamedSharding:
        """Where everything lies that all devices have: whatever is neither weights nor KV."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def kv_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, KV_CACHE_SPEC)

    def make_state(self) -> BatchState:
        """A batch without requests."""
        return empty_state(
            *(self.config.max_num_seqs, self.max_model_len, len(self.layout.groups)),
            *(self.config.block_size, MAX_STOP_TOKEN_IDS),
            rules_size=rules_layout(self.model_config.vocab_size).size,
            hidden=jnp.zeros((self.config.max_num_batched_tokens, self.model_config.hidden_size), self.dtype),
            drafts=self.config.max_drafts > 0,
        )

    def make_kv_cache(self) -> KVCache:
        """A cache that holds nothing."""
        return empty_kv_cache(self.layout, self.num_blocks, self.dtype)

    def make_logits(self) -> dict[int, jax.Array]:
        """Room for the logits of steps: see `DeviceShapes.logits`."""
        numbers = sorted({self.program_config.num_logits(bucket) for bucket in self.buckets})
        return {number: jnp.zeros((number, self.model_config.vocab_size), jnp.float32) for number in numbers}

    @cached_property
    def shapes(self) -> DeviceShapes:
        """Of weights, cache, batch and logits, and where they lie."""
        return DeviceShapes(
            param_shapes(self.specs, self.dtype, self.mesh),
            _placed(self.make_kv_cache, self.kv_sharding),
            _placed(self.make_state, self.replicated),
            _placed(self.make_logits, logits_sharding(self.mesh, self.model_config.vocab_size)),
        )

    @property
    def kept_bytes(self) -> int:
        """What weights, cache, batch and logits take of each device."""
        shapes = self.shapes
        return bytes_per_device((shapes.params, shapes.kv_cache, shapes.state, shapes.logits))


def plan_engine(
    config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, free_bytes: Callable[[Mesh], int]
) -> EnginePlan:
    """Settle what depends on the model and on the devices; `free_bytes` tells what each of them has for both.

    Raises `ModelLoadError` or `ConfigError`.
    """
    try:
        model, model_config = resolve_model(checkpoint)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    processors = load_processors(config.logits_processors, model_config.vocab_size)
    model_config = divide_model(model_config, mesh.size)
    platform = mesh.devices.flat[0].platform
    config = resolve_sizes(config, platform)
    dtype = resolve_dtype(config.dtype, platform)
    specs = model.param_specs(model_config)
    layout = plan_layout(model.kv_specs(model_config), config.block_size)
    wanted_len = resolve_max_model_len(config, model_config.max_position_embeddings)
    it = EnginePlan(config, mesh, model, model_config, dtype, specs, layout, 0, wanted_len, processors)
    num_blocks = config.num_blocks or _num_blocks_for(it, free_bytes(mesh))
    if num_blocks > max_blocks(layout):
        raise ConfigError(
            f"--num-blocks is {num_blocks}: of {config.block_size} tokens, there may be {max_blocks(layout)}"
        )
    max_model_len = min(wanted_len, max_request_tokens(layout, num_blocks - 1, config.max_step_tokens))
    if max_model_len < wanted_len:
        logger.warning(
            "max_model_len lowered from %d to %d: %d blocks (%d tokens each) hold no more; raise --num-blocks",
            *(wanted_len, max_model_len, num_blocks - 1, config.block_size),
        )
    it = dataclasses.replace(it, num_blocks=num_blocks, max_model_len=max_model_len)
    if config.num_blocks and platform != "cpu":
        check_memory(it, free_bytes(mesh))
    return it


def _num_blocks_for(it: EnginePlan, free: int) -> int:
    """As many as `free` bytes of each device hold beside all else."""
    config, num_devices, platform = it.config, it.mesh.size, it.mesh.devices.flat[0].platform
    memory = Memory(free, bytes_per_device(param_shapes(it.specs, it.dtype, it.mesh)))
    if platform != "cpu":
        batch = bytes_per_device(_placed(it.make_state, it.replicated))
        programs = program_bytes(config, it.model_config, it.layout, it.dtype, num_devices, batch)
        logits = bytes_per_device(_placed(it.make_logits, logits_sharding(it.mesh, it.model_config.vocab_size)))
        memory = dataclasses.replace(memory, batch=batch + logits, programs=programs, share=share_of(it.mesh))
    of_a_block = block_bytes(it.layout, it.dtype, num_devices)
    return resolve_num_blocks(config, it.layout, it.max_model_len, memory, of_a_block=of_a_block, platform=platform)


def check_memory(it: EnginePlan, free: int) -> None:
    """Raises `ConfigError` where `free` bytes of each device do not hold weights, cache and batch."""
    if it.kept_bytes > free:
        raise ConfigError(
            f"weights, KV cache and batch take {it.kept_bytes / 2**30:.1f} GiB of each device, and "
            f"{it.mesh.devices.flat[0].device_kind} has {free / 2**30:.1f} GiB for them"
            f"{(share := share_of(it.mesh)) and f' ({share})'}: raise --tensor-parallel-size or lower --num-blocks"
        )


def bytes_per_device(shapes: Any) -> int:
    """Bytes that each device holds of a pytree of `ShapeDtypeStruct`s with shardings."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)
    )


def _placed(make: Callable[[], Any], sharding: NamedSharding) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), jax.eval_shape(make)
    )
