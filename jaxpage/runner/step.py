"""The compiled programs, all of them: `jit` appears in this file only.

    admit    one request in full -> its row of the batch
    step     a plan -> forward, sample, append, for every row it names

Both take the device state donated and give it back updated; nothing else crosses between host and device but the plan
(in) and the sampled tokens (out).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.models.config import ModelConfig
from jaxpage.models.params import Params
from jaxpage.models.registry import model_for
from jaxpage.ops.attention import AttentionMetadata
from jaxpage.ops.sampling import SamplingState, sample
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.plan import unpack_admission, unpack_step
from jaxpage.runner.state import BatchState

KVCache = list[jax.Array]
"""Per layer [num_blocks, 2, block_size, num_kv_heads, head_dim]."""

trace_counts: Counter[str] = Counter()
"""How often each function was traced in this process; serving adds none after warm-up."""


@dataclass(frozen=True)
class ProgramConfig:
    """What a step program depends on besides its bucket."""

    model: ModelConfig
    block_size: int


def compile_step(
    config: ProgramConfig, bucket: Bucket, params: Params, kv_cache: Any, state: Any, plan: Any
) -> jax.stages.Compiled:
    """Compile the step of one bucket for arguments of these shapes (arrays or `ShapeDtypeStruct`s).

    The program is `(params, kv_cache, state, plan) -> (kv_cache, state, tokens)`; kv_cache and state are donated.
    `tokens`: [bucket.num_rows] int32, in the plan's order, -1 where a row did not reach its last known token.
    """

    def step(
        params: Params, kv_cache: KVCache, state: BatchState, plan: jax.Array
    ) -> tuple[KVCache, BatchState, jax.Array]:
        trace_counts["step"] += 1
        return _step(params, kv_cache, state, plan, config, bucket)

    return jax.jit(step, donate_argnums=(1, 2)).lower(params, kv_cache, state, plan).compile()


def compile_admit(state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(state, packed request) -> state` for a request of this many token ids; state is donated."""

    def admit(state: BatchState, packed: jax.Array) -> BatchState:
        trace_counts["admit"] += 1
        return _admit(state, packed)

    return jax.jit(admit, donate_argnums=(0,)).lower(state, packed).compile()


def on_device(make: Callable[[], Any], sharding: jax.sharding.Sharding) -> Any:
    """Build a pytree of arrays right on its device, without a copy on the host."""
    return jax.jit(make, out_shardings=sharding)()


def _admit(state: BatchState, packed: jax.Array) -> BatchState:
    new = unpack_admission(packed)
    capacity = new.token_ids.shape[0]
    fields = {field.name for field in dataclasses.fields(new)} - {"row", "token_ids"}
    updated = {name: getattr(state, name).at[new.row].set(getattr(new, name)) for name in fields}
    token_ids = state.token_ids.at[new.row, jnp.arange(capacity)].set(new.token_ids, mode="drop")
    return dataclasses.replace(state, token_ids=token_ids, **updated)


def _step(
    params: Params, kv_cache: KVCache, state: BatchState, packed: jax.Array, config: ProgramConfig, bucket: Bucket
) -> tuple[KVCache, BatchState, jax.Array]:
    model, block_size = model_for(config.model.architecture), config.block_size
    plan = unpack_step(packed, bucket)
    block_tables = state.block_tables.at[plan.new_blocks[0], plan.new_blocks[1]].set(plan.new_blocks[2], mode="drop")

    # Which row each token belongs to, and where in the row it stands.
    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(plan.query_lens)])
    token = jnp.arange(bucket.num_tokens)
    if bucket.max_query_len == 1:
        index = token
        live = plan.query_lens > 0
    else:
        index = jnp.minimum(jnp.searchsorted(query_start[1:], token, side="right"), bucket.num_rows - 1)
        live = token < query_start[-1]
    rows = jnp.minimum(plan.rows, state.num_rows - 1)  # padding reads some row and writes none
    num_computed = state.num_computed_tokens[rows]
    positions = num_computed[index] + token - query_start[index]
    if bucket.max_query_len == 1:
        positions = num_computed
    positions = jnp.where(live, positions, 0)
    token_rows = rows[index]
    num_blocks = kv_cache[0].shape[0]
    slots = block_tables[token_rows, positions // block_size] * block_size + positions % block_size
    kv_lens = jnp.where(plan.query_lens > 0, num_computed + plan.query_lens, 0)
    metadata = AttentionMetadata(
        slots=jnp.where(live, slots, num_blocks * block_size),
        block_tables=block_tables[rows],
        query_start=query_start,
        query_lens=plan.query_lens,
        kv_lens=kv_lens,
        rope_lengths=jnp.maximum(state.num_prompt_tokens[token_rows], positions + 1),
        max_query_len=bucket.max_query_len,
    )
    tokens = state.token_ids[token_rows, positions]
    hidden, kv_cache = model.forward(params, tokens, positions, kv_cache, metadata, config.model)

    last = hidden if bucket.max_query_len == 1 else hidden[jnp.maximum(query_start[1:] - 1, 0)]
    with jax.named_scope("logits"):
        logits = model.logits(params, last, config.model)
    num_tokens = state.num_tokens[rows]
    with jax.named_scope("sample"):
        drawn = sample(
            logits,
            SamplingState(
                temperature=jnp.where(plan.query_lens > 0, state.temperature[rows], 0),
                top_k=state.top_k[rows],
                top_p=state.top_p[rows],
                min_p=state.min_p[rows],
                seed=state.seed[rows],
                position=num_tokens,
                min_position=state.num_prompt_tokens[rows] + state.min_tokens[rows],
                stop_token_ids=state.stop_token_ids[rows],
            ),
        )

    # A row draws only when its last known token is computed; prompts that go on in a later step do not.
    draws = (plan.query_lens > 0) & (kv_lens == num_tokens)
    updated = dataclasses.replace(
        state,
        block_tables=block_tables,
        token_ids=state.token_ids.at[jnp.where(draws, rows, state.num_rows), num_tokens].set(drawn, mode="drop"),
        num_tokens=state.num_tokens.at[plan.rows].add(draws.astype(jnp.int32), mode="drop"),
        num_computed_tokens=state.num_computed_tokens.at[plan.rows].add(plan.query_lens, mode="drop"),
    )
    return kv_cache, updated, jnp.where(draws, drawn, -1)
