"""Paged attention: the cache, what a step tells the kernel, and which implementation runs."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxpage.ops.attention.kv_write import rotate_and_write_kv
from jaxpage.ops.attention.launch import GPU, AttentionShape, tuned_launches
from jaxpage.ops.attention.paged_xla import QueryBlocks, cut_queries, paged_attention_xla
from jaxpage.ops.attention.work_list import WorkList, list_work
from jaxpage.ops.state_spec import KVGroup, KVLayout, KVSpec

HEADS_AXIS = "tp"
"""Axis of our own device meshes over which heads, and with them the KV cache, are divided. A user's may have others."""


def kv_cache_spec(heads_axis: str | None) -> PartitionSpec:
    """How each buffer of the cache lies on a mesh whose `heads_axis` divides the KV heads; None divides nothing."""
    return PartitionSpec(None, None, None, heads_axis)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """The KV cache on its devices."""

    buffers: list[jax.Array]  # each [num_blocks, 2, block_size, num_kv_heads, head_dim] of its first layer
    layout: KVLayout = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.buffers[0].shape[0]


def logits_sharding(mesh: Mesh | AbstractMesh, vocab_size: int, axis: str | None) -> NamedSharding:
    """How [rows, vocab] lies on a mesh: by vocabulary over `axis`, where its devices divide it."""
    divides = axis is not None and vocab_size % mesh.shape[axis] == 0
    return NamedSharding(mesh, PartitionSpec(None, axis if divides else None))


@dataclass(frozen=True)
class Target:
    """Where a program runs, as far as ops must know. Settled before tracing, so that no CPU needs Triton."""

    gpu: GPU | None = None
    """Runs the Triton kernels; None runs plain XLA."""
    mesh: Mesh | None = None
    """Devices that divide the heads among them; None where there is one."""
    heads_axis: str | None = HEADS_AXIS
    """The axis of `mesh` that divides them; None leaves all heads on each device."""

    @property
    def branch_free(self) -> bool:
        """Whether programs do all that they might, as a branch would make the host wait: see `on_demand`."""
        return self.gpu is not None

    def place_logits(self, logits: jax.Array) -> jax.Array:
        """Keep [rows, vocab] divided as the output head leaves it."""
        if self.mesh is None:
            return logits
        return jax.lax.with_sharding_constraint(logits, logits_sharding(self.mesh, logits.shape[1], self.heads_axis))

    @property
    def num_shards(self) -> int:
        """Parts that the heads are divided into."""
        return 1 if self.mesh is None or self.heads_axis is None else self.mesh.shape[self.heads_axis]


def target_of(mesh: Mesh, heads_axis: str | None) -> Target:
    """The devices of a mesh, as ops must know them."""
    return Target(gpu_of(mesh.devices.flat[0]), mesh if mesh.size > 1 else None, heads_axis)


def gpu_of(device: jax.Device) -> GPU | None:
    """What kernels are compiled for; None where the device is no GPU."""
    if device.platform != "gpu":
        return None
    return GPU(device.core_count, int(device.compute_capability.replace(".", "")))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepContext:
    """One step's ragged batch, as layers may read it.

    The tokens of row r are `query_start[r] : query_start[r] + query_lens[r]`.

    Rows without tokens have a query length of 0. `kv_lens` counts the KV of a row after this step's tokens are written;
    its queries are the last `query_lens[r]` of those positions.
    """

    positions: jax.Array  # [tokens] int32, of each token in its sequence; 0 in padding
    slots: list[jax.Array]  # per KV group [tokens] int32, where each token's KV goes; past the cache's end for padding
    block_tables: jax.Array  # [groups, rows, width] int32
    query_start: jax.Array  # [rows + 1] int32
    query_lens: jax.Array  # [rows] int32
    kv_lens: jax.Array  # [rows] int32
    rope_lengths: jax.Array  # [tokens] int32, the sequence length that RoPE scalings see
    max_query_len: int = field(metadata={"static": True})
    target: Target = field(default=Target(), metadata={"static": True})
    kv_itemsize: int = field(default=0, metadata={"static": True})  # bytes of a number in the cache, for GPUs

    def of_group(self, index: int, layout: KVLayout) -> "LayerMetadata":
        """The batch as the layers of KV group `index` see it."""
        rows = (self.block_tables[index], self.query_start, self.query_lens, self.kv_lens)
        on_gpu = self.target.gpu is not None
        return LayerMetadata(
            self.slots[index],
            *rows,
            blocks=None if on_gpu else cut_queries(*rows, self.rope_lengths.shape[0], self.max_query_len),
            work=self._work_of(layout.groups[index]) if on_gpu else None,
            max_query_len=self.max_query_len,
            group=layout.groups[index],
            target=self.target,
        )

    def _work_of(self, group: KVGroup) -> tuple[WorkList, ...]:
        """What the programs of the kernel do in each layer of a group, on each device."""
        assert self.target.gpu is not None
        num_shards, spec = self.target.num_shards, group.spec
        shape = AttentionShape(
            num_tokens=self.rope_lengths.shape[0],
            num_rows=len(self.query_lens),
            max_query_len=self.max_query_len,
            num_heads=spec.num_query_heads // num_shards,
            num_kv_heads=spec.num_kv_heads // num_shards,
            head_dim=spec.head_dim,
            kv_itemsize=self.kv_itemsize,
            max_kv_len=self.block_tables.shape[2] * group.block_size,
            span=spec.span,
        )
        lengths = (self.query_start, self.query_lens, self.kv_lens)
        tuned = tuned_launches(self.target.gpu)
        with jax.named_scope("work"):
            return list_work(
                *lengths, shape=shape, gpu=self.target.gpu, window=spec.window, chunk=spec.chunk, tuned=tuned
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerMetadata:
    """One step's ragged batch for the layers of one KV group; fields as in `StepContext`."""

    slots: jax.Array  # [tokens] int32
    block_tables: jax.Array  # [rows, width] int32
    query_start: jax.Array  # [rows + 1] int32
    query_lens: jax.Array  # [rows] int32
    kv_lens: jax.Array  # [rows] int32
    blocks: QueryBlocks | None  # what plain XLA takes in place of the rows
    work: tuple[WorkList, ...] | None  # what the Triton kernel takes in place of the rows
    max_query_len: int = field(metadata={"static": True})
    group: KVGroup = field(metadata={"static": True})
    target: Target = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedState:
    """A layer's paged KV during a step."""

    buffer: jax.Array  # its array of the `KVCache`
    metadata: LayerMetadata

    @property
    def spec(self) -> KVSpec:
        """What the layer has asked for."""
        return self.metadata.group.spec


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: PagedState,
    *,
    rope: tuple[jax.Array, jax.Array] | None = None,
    scale: float,
    softcap: float | None = None,
) -> tuple[jax.Array, PagedState]:
    """Rotate, write a layer's new keys and values, and attend over all that its kind (`KVSpec`) lets each query see.

    q: [tokens, heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim]; rope: what `rope_cos_sin` gives, or None for
    no rotation. All of a step's KV is written first: a row may read blocks that another row fills in the same step.
    Returns q's shape and dtype (0 for padding), and the state with the new keys and values.
    """
    metadata = state.metadata
    spec, block_size, target = metadata.group.spec, metadata.group.block_size, metadata.target
    if target.gpu is None:
        write, attention = rotate_and_write_kv, paged_attention_xla
    else:
        from jaxpage.ops.attention.kv_write_triton import rotate_and_write_kv_triton
        from jaxpage.ops.attention.paged_triton import paged_attention_triton

        write = partial(rotate_and_write_kv_triton, gpu=target.gpu)
        attention = partial(paged_attention_triton, gpu=target.gpu)

    def attend_on_device(
        heads: tuple[jax.Array, jax.Array, jax.Array],
        rope: tuple[jax.Array, jax.Array] | None,
        stored: jax.Array,
        step: dict[str, Any],
        slots: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        # Layers that keep less per token see the same page as a larger block.
        kv_layer = stored.reshape(stored.shape[0], 2, block_size, -1, spec.head_dim)
        q, kv_layer = write(*heads, rope, kv_layer, slots)
        out = attention(
            q,
            kv_layer,
            **step,
            max_query_len=metadata.max_query_len,
            scale=scale,
            window=spec.window,
            chunk=spec.chunk,
            softcap=softcap,
        )
        return out, kv_layer.reshape(stored.shape)

    if target.mesh is not None:
        by_head, everywhere = PartitionSpec(None, target.heads_axis), PartitionSpec()
        by_kv_head = kv_cache_spec(target.heads_axis)
        attend_on_device = jax.shard_map(
            attend_on_device,
            mesh=target.mesh,
            in_specs=(by_head, everywhere, by_kv_head, everywhere, everywhere),
            out_specs=(by_head, by_kv_head),
            check_vma=False,  # Triton kernels do not say which axes their results vary over
        )
    step: dict[str, Any] = {
        "block_tables": metadata.block_tables,
        "query_start": metadata.query_start,
        "query_lens": metadata.query_lens,
        "kv_lens": metadata.kv_lens,
    }
    if metadata.blocks is not None:
        step["blocks"] = metadata.blocks
    if metadata.work is not None:
        step["work"] = metadata.work
    out, buffer = attend_on_device((q, k, v), rope, state.buffer, step, metadata.slots)
    return out, PagedState(buffer, metadata)
