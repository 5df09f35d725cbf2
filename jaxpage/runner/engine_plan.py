"""What an engine will have on its devices, settled before any of it is there: to serve, or to compile elsewhere."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.aot.targets import share_of
from jaxpage.config import EngineConfig, SizedConfig
from jaxpage.errors import ConfigError
from jaxpage.kv_cache.spec import block_bytes, max_request_tokens, plan_layout
from jaxpage.models.served_model import ServedModel
from jaxpage.ops.attention.paged import KVCache, Target, kv_cache_spec, logits_sharding, target_of
from jaxpage.ops.state_spec import KVLayout
from jaxpage.runner.buckets import Bucket, by_usefulness, make_buckets
from jaxpage.runner.program_config import ProgramConfig
from jaxpage.runner.programs.logits_processors import OwnProcessor, load_processors
from jaxpage.runner.resolve import (
    Memory,
    max_blocks,
    program_bytes,
    resolve_max_model_len,
    resolve_num_blocks,
    resolve_sizes,
)
from jaxpage.runner.state import BatchState, empty_kv_cache, empty_state, rules_layout
from jaxpage.sampling_params import MAX_BEAM_CANDIDATES, MAX_STOP_TOKEN_IDS
from jaxpage.speculative.methods import load_proposer
from jaxpage.speculative.proposer import Proposer

logger = logging.getLogger(__name__)


class StateSpecs(NamedTuple):
    """Of each array of the KV cache, how it is divided."""

    buffers: list[PartitionSpec]
    recurrent: list[PartitionSpec]


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """One model on its devices, as the options say."""

    config: SizedConfig
    model: ServedModel
    layout: KVLayout
    num_blocks: int
    """The null block included."""
    max_model_len: int
    processors: tuple[OwnProcessor, ...]
    proposer: Proposer | None

    @cached_property
    def program_config(self) -> ProgramConfig:
        return ProgramConfig(
            model_key=self.model.key,
            vocab_size=self.model.vocab_size,
            num_logprobs=MAX_BEAM_CANDIDATES,
            processors=self.processors,
            proposer_key="" if self.proposer is None else self.proposer.key,
            proposer=self.proposer,
        )

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @cached_property
    def target(self) -> Target:
        return target_of(self.mesh, self.model.heads_axis)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The most useful first: see `by_usefulness`."""
        config = self.config
        return by_usefulness(make_buckets(config.max_num_seqs, config.max_num_batched_tokens, config.max_drafts))

    @cached_property
    def first_buckets(self) -> tuple[int, ...]:
        """Indices of those that serving waits for: what takes every step, and what a lone request decodes in."""
        decode = [bucket for bucket in self.buckets if bucket.max_query_len == 1 + self.config.max_drafts]
        return (0, self.buckets.index(min(decode))) if decode else (0,)

    def first_bucket_of(self, num_rows: int) -> int:
        """Index of the first bucket with so many rows."""
        return next(index for index, bucket in enumerate(self.buckets) if bucket.num_rows == num_rows)

    @cached_property
    def makers(self) -> dict[Any, Callable[[], Any]]:
        """What makes those of `shapes` that begin empty."""
        numbers = sorted({self.program_config.num_logits(bucket) for bucket in self.buckets})
        logits = {("logits", number): self._maker_of_logits(number) for number in numbers}
        return {"kv_cache": self.make_kv_cache, "state": self.make_state, "hidden": self.make_hidden, **logits}

    @cached_property
    def empty_groups(self) -> dict[str, list[Any]]:
        """Pieces of `makers` that one program makes together, by its name: a start loads a file for each program."""
        logits = [piece for piece in self.makers if isinstance(piece, tuple)]
        return {"kv_cache": ["kv_cache"], "batch": ["state", "hidden"], "logits": logits}

    @property
    def scratch(self) -> list[str]:
        """Groups whose content nobody misses once all requests have been preempted."""
        return ["kv_cache", "logits"]

    @property
    def replicated(self) -> NamedSharding:
        """Where everything lies that all devices have: whatever is neither weights nor KV."""
        return NamedSharding(self.mesh, PartitionSpec())

    def make_state(self) -> BatchState:
        """A batch without requests."""
        return empty_state(
            *(self.config.max_num_seqs, self.max_model_len, len(self.layout.groups)),
            *(self.config.block_size, MAX_STOP_TOKEN_IDS),
            rules_size=rules_layout(self.model.vocab_size).size,
            drafts=self.proposer is not None,
        )

    def make_kv_cache(self) -> KVCache:
        """A cache that holds nothing."""
        return empty_kv_cache(
            *(self.layout, self.num_blocks, self.model.dtype),
            num_rows=self.config.max_num_seqs,
            ring=2 + self.config.max_drafts,
            num_devices=self.mesh.size,
        )

    def make_hidden(self) -> dict[str, jax.Array]:
        """Room for the hidden states of a step's tokens: the last ones, and what a proposer reads besides."""
        most = self.config.max_num_batched_tokens
        extras = () if self.proposer is None else self.proposer.extras
        return {name: jnp.zeros((most, self.model.embed_size), self.model.dtype) for name in ("last", *extras)}

    def _maker_of_logits(self, number: int) -> Callable[[], jax.Array]:
        return lambda: jnp.zeros((number, self.model.vocab_size), jnp.float32)

    @cached_property
    def shapes(self) -> dict[Any, Any]:
        """Of every piece on the devices, as `ShapeDtypeStruct`s with where they lie: programs compile before there is
        any of it.
        """
        logits = logits_sharding(self.mesh, self.model.vocab_size, self.model.heads_axis)
        shapes = {"params": self.model.param_shapes}
        for piece, make in self.makers.items():
            shapes[piece] = _placed(make, logits if isinstance(piece, tuple) else self.replicated)
        kv_cache: KVCache = shapes["kv_cache"]
        buffers = [NamedSharding(self.mesh, spec) for spec in self.state_specs.buffers]
        recurrent = [NamedSharding(self.mesh, spec) for spec in self.state_specs.recurrent]
        shapes["kv_cache"] = dataclasses.replace(
            kv_cache, buffers=_at(kv_cache.buffers, buffers), recurrent=_at(kv_cache.recurrent, recurrent)
        )
        return shapes

    @cached_property
    def state_specs(self) -> StateSpecs:
        """How the arrays of the KV cache lie on the mesh."""
        paged = kv_cache_spec(self.model.heads_axis)
        of_checkpoints = PartitionSpec(None, self.mesh.axis_names)
        return StateSpecs(
            [paged] * self.layout.num_buffers or [of_checkpoints] * (self.layout.checkpoint is not None),
            [PartitionSpec(None, None, *spec.axes) for spec in self.layout.recurrent],
        )

    @property
    def kept_bytes(self) -> int:
        """What weights, cache, batch and logits take of each device."""
        return bytes_per_device(list(self.shapes.values()))


def plan_engine(config: EngineConfig, model: ServedModel, free_bytes: Callable[[Mesh], int]) -> EnginePlan:
    """Settle what depends on the model and on the devices; `free_bytes` tells what each of them has for both.

    Raises `ConfigError`.
    """
    processors = load_processors(config.logits_processors, model.vocab_size)
    proposer = load_proposer(config.speculative_config)
    mesh = model.mesh
    platform = mesh.devices.flat[0].platform
    config = resolve_sizes(config, platform)
    layout = plan_layout(
        *(model.states, config.block_size),
        kv_itemsize=model.dtype.itemsize,
        num_shards=model.num_shards,
        axis_sizes=mesh.shape,
    )
    wanted_len = resolve_max_model_len(config, model.max_model_len)
    it = EnginePlan(config, model, layout, 0, wanted_len, processors, proposer)
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
    config, model, platform = it.config, it.model, it.mesh.devices.flat[0].platform
    of_rows = bytes_per_device(it.shapes["kv_cache"].recurrent)
    memory = Memory(free, bytes_per_device(model.param_shapes), of_rows)
    if platform != "cpu":
        batch = bytes_per_device([it.shapes["state"], it.shapes["hidden"]])
        logits = bytes_per_device([shape for piece, shape in it.shapes.items() if isinstance(piece, tuple)])
        programs = program_bytes(config, model, it.layout, batch)
        memory = dataclasses.replace(memory, batch=of_rows + batch + logits, programs=programs, share=share_of(it.mesh))
    of_a_block = block_bytes(it.layout, model.dtype.itemsize, model.num_shards)
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


def _at(shapes: list[Any], shardings: list[NamedSharding]) -> list[Any]:
    return [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
        for shape, sharding in zip(shapes, shardings, strict=True)
    ]


def _placed(make: Callable[[], Any], sharding: NamedSharding) -> Any:
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), jax.eval_shape(make)
    )
