"""The compiled programs, all of them: `jit` appears in this file only.

    fork     rows and KV blocks that go on as copies of others
    admit    one request in full -> its row of the batch
    rules    what an admitted request says of single tokens -> the same row
    edit     block tables and places of the next step, as far as they differ
    step     the last edits -> forward, up to the logits of what every place draws
    draw     these logits -> sample and append, for every place; with masks of tokens, once more for some
    score    some tokens of the last step -> log-probabilities of what follows them; score_rows: of all the vocabulary
    pool     stretches of its tokens -> the sums of their hidden states
    empty    nothing -> a KV cache that holds nothing, or a batch without requests

All others take the device state donated and give it back updated; nothing else crosses between host and device but what
they are told (in) and the sampled tokens (out).
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.aot.targets import compiler_options
from jaxpage.models.registry import model_for
from jaxpage.models.weights import Params
from jaxpage.ops.attention.kv_write import copy_blocks
from jaxpage.ops.attention.launch import GPU
from jaxpage.ops.attention.paged import AttentionMetadata, KVCache, Target
from jaxpage.ops.gemm_launch import choose_gemms, tuned_gemms
from jaxpage.ops.sampling.sampling import TokenLogprobs, logprobs_at
from jaxpage.ops.sampling.sampling import draw as sampling_draw
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.draw import StepResult, draw_tokens
from jaxpage.runner.plan import unpack_admission, unpack_forks
from jaxpage.runner.program_config import ProgramConfig
from jaxpage.runner.state import BatchState, StepRows

trace_counts: Counter[str] = Counter()
"""How often each function was traced in this process; serving adds none after warm-up."""


def compile_step(
    config: ProgramConfig,
    bucket: Bucket,
    params: Params,
    kv_cache: Any,
    state: Any,
    logits: Any,
    edits: Any,
    when_traced: Callable[[], None] = lambda: None,
) -> jax.stages.Compiled:
    """Compile the step of one bucket for arguments of these shapes (arrays or `ShapeDtypeStruct`s).

    `when_traced` is called once no more Python runs for it, and XLA has it.

    It is made for the devices that their shardings name: GPUs among them need not be on this machine.
    The program is `(params, kv_cache, state, logits, edits) -> (kv_cache, state, logits)`, which `compile_draw` goes on
    from. kv_cache, state and logits, [rows * draws, vocab] float32, are donated. What is in the old logits is never
    read. That their memory is given keeps the new ones where they were: XLA computes layers in it, and a GPU's graph is
    rewritten wherever an address changes.
    """

    mesh = kv_cache.buffers[0].sharding.mesh
    target = _target_of(mesh)

    def step(
        params: Params, kv_cache: KVCache, state: BatchState, logits: jax.Array, edits: jax.Array
    ) -> tuple[KVCache, BatchState, jax.Array]:
        trace_counts["step"] += 1
        del logits
        return _step(params, kv_cache, _edit(state, edits), config, bucket, target)

    donated = kv_cache, state, logits
    # Unused arguments would be left out, and the memory of the logits with them.
    jitted = jax.jit(step, donate_argnums=(1, 2, 3), keep_unused=True, out_shardings=_shardings(donated))
    lowered = jitted.lower(params, *donated, edits)
    when_traced()
    return lowered.compile(_options_for(mesh.devices.flat[0], bucket.num_tokens, params))


def _compiled(jitted: Any, *arguments: Any, num_tokens: int = 0, weights: Any = None) -> jax.stages.Compiled:
    """Compiled for the devices that the arguments lie on: here, or described.

    num_tokens: rows of its matrix products, if it has any; weights: what they multiply.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    device = next(device for sharding in shardings if sharding is not None for device in sharding.device_set)
    program: jax.stages.Compiled = jitted.lower(*arguments).compile(_options_for(device, num_tokens, weights))
    return program


def _options_for(device: jax.Device, num_tokens: int, weights: Any) -> dict[str, Any]:
    """How XLA compiles a program for such devices; see `_compiled`."""
    gpu = _gpu_of(device)
    if gpu is None or not num_tokens:
        return compiler_options(device)
    matrices = [leaf for leaf in jax.tree.leaves(weights) if len(leaf.shape) > 1]
    # A weight is [..., in]: see `ops.matmul.linear`.
    columns = min(math.prod(leaf.sharding.shard_shape(leaf.shape)[:-1]) for leaf in matrices)
    launches = choose_gemms(num_tokens, columns, matrices[0].dtype.itemsize, gpu, tuned_gemms(gpu))
    return compiler_options(device, launches, num_tokens)


def _shardings(arguments: Any) -> Any:
    """Where donated arguments lie, and their updates as well: the next program takes those as they are."""
    return jax.tree.map(lambda array: array.sharding, arguments)


def _target_of(mesh: Mesh) -> Target:
    return Target(_gpu_of(mesh.devices.flat[0]), mesh if mesh.size > 1 else None)


def _gpu_of(device: jax.Device) -> GPU | None:
    if device.platform != "gpu":
        return None
    return GPU(device.core_count, int(device.compute_capability.replace(".", "")))


def compile_edit(state: Any, edits: Any) -> jax.stages.Compiled:
    """Compile `(state, edits) -> state`; state is donated."""

    def edit(state: BatchState, edits: jax.Array) -> BatchState:
        trace_counts["edit"] += 1
        return _edit(state, edits)

    return _compiled(jax.jit(edit, donate_argnums=(0,), out_shardings=_shardings(state)), state, edits)


def compile_admit(capacity: int, state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(state, packed request) -> state` for a request of this many token ids; state is donated."""

    def admit(state: BatchState, packed: jax.Array) -> BatchState:
        trace_counts["admit"] += 1
        return _admit(state, packed, capacity)

    return _compiled(jax.jit(admit, donate_argnums=(0,), out_shardings=_shardings(state)), state, packed)


def compile_rules(state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(state, packed rules) -> state`; state is donated."""

    def set_rules(state: BatchState, packed: jax.Array) -> BatchState:
        trace_counts["rules"] += 1
        return dataclasses.replace(state, rules=state.rules.at[packed[0]].set(packed[1:]))

    return _compiled(jax.jit(set_rules, donate_argnums=(0,), out_shardings=_shardings(state)), state, packed)


def compile_draw(
    config: ProgramConfig, kind: SamplerKind, num_draws: int, logits: Any, state: Any, told: Any
) -> jax.stages.Compiled:
    """Compile `(logits, state, told) -> (state, StepResult)` behind a step of as many places.

    logits: [rows * num_draws, vocab] float32. told: packed, None but for `SamplerKind.ANY`. state is donated.
    """
    mesh = logits.sharding.mesh
    target = _target_of(mesh)

    def draw(logits: jax.Array, state: BatchState, told: jax.Array | None) -> tuple[BatchState, StepResult]:
        trace_counts["draw"] += 1
        return draw_tokens(logits, state, told, kind, num_draws, config, target)

    out_shardings = (_shardings(state), NamedSharding(mesh, PartitionSpec()))
    return _compiled(jax.jit(draw, donate_argnums=(1,), out_shardings=out_shardings), logits, state, told)


def compile_fork(kv_cache: Any, state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(kv_cache, state, packed forks) -> (kv_cache, state)`; kv_cache and state are donated."""
    target = _target_of(kv_cache.buffers[0].sharding.mesh)

    def fork(kv_cache: KVCache, state: BatchState, packed: jax.Array) -> tuple[KVCache, BatchState]:
        trace_counts["fork"] += 1
        return _fork(kv_cache, state, packed, target)

    jitted = jax.jit(fork, donate_argnums=(0, 1), out_shardings=_shardings((kv_cache, state)))
    return _compiled(jitted, kv_cache, state, packed)


def compile_score(config: ProgramConfig, params: Params, hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(params, hidden, packed) -> TokenLogprobs`.

    hidden: [tokens, embed]. packed: [2, n] int32, whose hidden state is looked at and which token follows it.
    """

    def score(params: Params, hidden: jax.Array, packed: jax.Array) -> TokenLogprobs:
        trace_counts["score"] += 1
        index, following = packed
        logits = model_for(config.model.architecture).logits(params, hidden[index], config.model)
        return logprobs_at(logits, following, config.num_logprobs)

    num_tokens = packed.shape[-1]
    return _compiled(
        jax.jit(score, out_shardings=hidden.sharding), params, hidden, packed, num_tokens=num_tokens, weights=params
    )


def compile_score_rows(config: ProgramConfig, params: Params, hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(params, hidden, packed) -> log-probabilities of the whole vocabulary, [n, vocab] float32`.

    hidden: [tokens, embed]. packed: [n] int32, whose hidden state is looked at.
    """

    def score_rows(params: Params, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        trace_counts["score_rows"] += 1
        logits = model_for(config.model.architecture).logits(params, hidden[packed], config.model)
        return jax.nn.log_softmax(logits, axis=-1)

    num_tokens = packed.shape[-1]
    return _compiled(
        jax.jit(score_rows, out_shardings=hidden.sharding),
        params,
        hidden,
        packed,
        num_tokens=num_tokens,
        weights=params,
    )


def compile_pool(hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(hidden, packed) -> sums of hidden states, [n, embed] float32`.

    hidden: [tokens, embed]. packed: [2, n] int32, where stretches of tokens begin and how long they are.
    """

    def pool(hidden: jax.Array, packed: jax.Array) -> jax.Array:
        trace_counts["pool"] += 1
        start, length = packed[:, :, None]
        token = jnp.arange(hidden.shape[0])
        within = (token >= start) & (token < start + length)
        # What stands outside of all stretches may be anything, and nothing times infinity is no number.
        states = jnp.where(within.any(axis=0)[:, None], hidden, 0).astype(jnp.float32)
        return jnp.matmul(within.astype(jnp.float32), states, precision=jax.lax.Precision.HIGHEST)

    sums = jax.ShapeDtypeStruct((hidden.shape[-1], hidden.shape[0]), jnp.float32, sharding=hidden.sharding)
    jitted = jax.jit(pool, out_shardings=hidden.sharding)
    return _compiled(jitted, hidden, packed, num_tokens=packed.shape[-1], weights=sums)


def compile_sampler(logits: Any, sampling: Any) -> jax.stages.Compiled:
    """Compile the sampler's draw by itself, `(logits, SamplingState) -> tokens`, to be measured.

    It is what serves on the device that the logits lie on.
    """
    device = next(iter(logits.sharding.device_set))
    return _compiled(jax.jit(partial(sampling_draw, branch_free=device.platform == "gpu")), logits, sampling)


def compile_empty(make: Callable[[], Any], shapes: Any) -> jax.stages.Compiled:
    """Compile `() -> what make gives`, right on its devices, without a copy on the host. shapes: of that."""

    def empty() -> Any:
        trace_counts["empty"] += 1
        return make()

    device = jax.tree.leaves(shapes)[0].sharding.mesh.devices.flat[0]
    return jax.jit(empty, out_shardings=_shardings(shapes)).lower().compile(compiler_options(device))


def _admit(state: BatchState, packed: jax.Array, capacity: int) -> BatchState:
    drafts = None
    if state.drafts is not None:
        packed, draft_end = packed[:-1], packed[-1]
        drafts = state.drafts.admit(packed[0], draft_end)
    new = unpack_admission(packed, capacity, state.block_tables.shape[0])
    # Their rows are shorter than the state's; what stands behind them there belongs to nobody.
    fields = {field.name for field in dataclasses.fields(new)} - {"row", "token_ids", "block_tables"}
    updated = {name: getattr(state, name).at[new.row].set(getattr(new, name)) for name in fields}
    return dataclasses.replace(
        state,
        token_ids=state.token_ids.at[new.row, jnp.arange(capacity)].set(new.token_ids, mode="drop"),
        block_tables=state.block_tables.at[:, new.row, : new.block_tables.shape[1]].set(new.block_tables),
        drafts=drafts,
        **updated,
    )


def _edit(state: BatchState, edits: jax.Array) -> BatchState:
    address, value = edits
    tables, places = state.block_tables.reshape(-1), state.places.reshape(-1)
    tables = tables.at[address].set(value, mode="drop")
    # A negative index would count from the end.
    place = jnp.where(address < tables.size, places.size, address - tables.size)
    places = places.at[place].set(value, mode="drop")
    return dataclasses.replace(
        state, block_tables=tables.reshape(state.block_tables.shape), places=places.reshape(state.places.shape)
    )


def _fork(kv_cache: KVCache, state: BatchState, packed: jax.Array, target: Target) -> tuple[KVCache, BatchState]:
    plan = unpack_forks(packed, state.num_rows)
    source, copy, token_id = plan.row_forks
    rows = jnp.minimum(source, state.num_rows - 1)

    def copy_rows(array: jax.Array) -> jax.Array:
        return array.at[copy].set(array[rows], mode="drop")

    copied = {
        field.name: jax.tree.map(copy_rows, getattr(state, field.name))
        for field in dataclasses.fields(state)
        if field.name not in ("block_tables", "places", "hidden")
    }
    copied["block_tables"] = jax.vmap(copy_rows)(state.block_tables)
    last = copied["num_tokens"].at[copy].get(mode="clip") - 1
    copied["token_ids"] = copied["token_ids"].at[copy, last].set(token_id, mode="drop")
    buffers = copy_blocks(
        kv_cache.buffers, plan.copies[0], plan.copies[1], plan.num_copies, branch_free=target.branch_free
    )
    return dataclasses.replace(kv_cache, buffers=buffers), dataclasses.replace(state, **copied)


def _step(
    params: Params, kv_cache: KVCache, state: BatchState, config: ProgramConfig, bucket: Bucket, target: Target
) -> tuple[KVCache, BatchState, jax.Array]:
    model = model_for(config.model.architecture)
    step = state.step_rows(bucket.num_rows)
    tokens, positions, metadata = _batch_of(state, step, kv_cache, bucket, target, config.model.num_heads)
    hidden, kv_cache = model.forward(params, tokens, positions, kv_cache, metadata, config.model)

    last = hidden
    if bucket.max_query_len > 1:
        first = step.query_start[:-1] + jnp.maximum(step.query_lens - step.num_checked, 1) - 1
        draw = jnp.arange(config.num_draws(bucket))
        last = hidden[jnp.minimum(first[:, None] + draw, bucket.num_tokens - 1).reshape(-1)]
    with jax.named_scope("logits"):
        logits = model.logits(params, last, config.model)  # [rows * draws, vocab]
    return kv_cache, dataclasses.replace(state, hidden=state.hidden.at[: bucket.num_tokens].set(hidden)), logits


def _batch_of(
    state: BatchState, step: StepRows, kv_cache: KVCache, bucket: Bucket, target: Target, num_heads: int
) -> tuple[jax.Array, jax.Array, AttentionMetadata]:
    """A step's tokens and their positions, both [tokens] int32, and what attention must know of them."""
    rows, query_start, query_lens, num_computed = step.rows, step.query_start, step.query_lens, step.num_computed
    # Which row each token belongs to, and where in the row it stands.
    token = jnp.arange(bucket.num_tokens)
    if bucket.max_query_len == 1:
        index = token
        live = query_lens > 0
    else:
        index = jnp.minimum(
            jnp.searchsorted(query_start[1:], token, side="right", method="compare_all"), bucket.num_rows - 1
        )
        live = token - query_start[index] < query_lens[index]
    positions = num_computed[index] + token - query_start[index]
    if bucket.max_query_len == 1:
        positions = num_computed
    positions = jnp.where(live, positions, 0)
    token_rows = rows[index]
    slots = []
    for table, size in zip(state.block_tables, (group.block_size for group in kv_cache.layout.groups), strict=True):
        slot = table[token_rows, positions // size] * size + positions % size
        slots.append(jnp.where(live, slot, kv_cache.num_blocks * size))
    metadata = AttentionMetadata(
        slots=slots,
        block_tables=state.block_tables[:, rows],
        query_start=query_start,
        query_lens=query_lens,
        kv_lens=step.kv_lens,
        rope_lengths=jnp.maximum(state.num_prompt_tokens[token_rows], positions + 1),
        max_query_len=bucket.max_query_len,
        target=target,
        num_heads=num_heads,
        kv_itemsize=kv_cache.buffers[0].dtype.itemsize,
    )
    return state.token_ids[token_rows, positions], positions, metadata
