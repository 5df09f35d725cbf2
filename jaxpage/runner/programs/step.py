"""The first half of a step: the last edits, the forward pass, and the logits of what every step row draws.

What is in the old logits is never read. That their memory is given keeps the new ones where they were: XLA computes
layers in it, and a GPU's graph is rewritten wherever an address changes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import KVCache, StepContext, Target
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.edit import NUM_EDITS, edited, no_edits
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState, StepRows

Pieces = tuple[KVCache, BatchState, dict[str, jax.Array], jax.Array]
"""kv_cache, state, hidden and logits."""


class Step(Program[Bucket]):
    """(params, kv_cache, state, hidden, logits, edits) -> kv_cache, state, hidden, logits."""

    name = "step"
    variant_type = Bucket
    keeps_unused = True  # unused arguments would be left out, and the memory of the logits with them
    repeats = True

    def variants(self, plan: EnginePlan) -> Sequence[Bucket]:
        return plan.buckets

    def stage(self, plan: EnginePlan, variant: Bucket) -> tuple[Stage, int]:
        index = plan.buckets.index(variant)
        return (Stage.FIRST if index in plan.first_buckets else Stage.REST), index

    def takes(self, plan: EnginePlan, variant: Bucket) -> Sequence[Piece]:
        return ["params", *self.changes(plan, variant)]

    def changes(self, plan: EnginePlan, variant: Bucket) -> Sequence[Piece]:
        return ["kv_cache", "state", "hidden", ("logits", plan.program_config.num_logits(variant))]

    def nothing(self, plan: EnginePlan, variant: Bucket) -> np.ndarray:
        return no_edits(NUM_EDITS)

    def products(self, plan: EnginePlan, variant: Bucket) -> tuple[int, Any]:
        return variant.num_tokens, plan.shapes["params"]

    def function(self, plan: EnginePlan, variant: Bucket) -> Callable[..., Any]:
        def step(
            params: Params,
            kv_cache: KVCache,
            state: BatchState,
            hidden: dict[str, jax.Array],
            logits: jax.Array,
            edits: jax.Array,
        ) -> tuple[Pieces, None]:
            del logits
            return _run(plan, variant, params, kv_cache, edited(state, edits), hidden), None

        return step

    def title(self, variant: Bucket) -> str:
        return f"{self.name} {variant.num_tokens} tokens, {variant.num_rows} rows"


def _run(
    plan: EnginePlan,
    bucket: Bucket,
    params: Params,
    kv_cache: KVCache,
    state: BatchState,
    hidden: dict[str, jax.Array],
) -> Pieces:
    model, num_draws = plan.model, plan.program_config.num_draws(bucket)
    step = state.step_rows(bucket.num_rows)
    tokens, context = _batch_of(state, step, kv_cache, bucket, plan.target)
    found, kv_cache = model.forward(params, model.embed(params, tokens), kv_cache, context)

    last = found.last
    if bucket.max_query_len > 1:
        first = step.query_start[:-1] + jnp.maximum(step.query_lens - step.num_checked, 1) - 1
        last = last[jnp.minimum(first[:, None] + jnp.arange(num_draws), bucket.num_tokens - 1).reshape(-1)]
    with jax.named_scope("logits"):
        logits = model.logits(params, last)  # [rows * draws, vocab]
    new = {name: found.last if name == "last" else found.extras[name] for name in hidden}
    hidden = {name: kept.at[: bucket.num_tokens].set(new[name]) for name, kept in hidden.items()}
    return kv_cache, state, hidden, logits


def _batch_of(
    state: BatchState, step: StepRows, kv_cache: KVCache, bucket: Bucket, target: Target
) -> tuple[jax.Array, StepContext]:
    """A step's tokens, [tokens] int32, and what layers may read of them."""
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
    context = StepContext(
        positions=positions,
        rows=rows,
        num_computed=num_computed,
        slots=slots,
        block_tables=state.block_tables[:, rows],
        query_start=query_start,
        query_lens=query_lens,
        kv_lens=step.kv_lens,
        rope_lengths=jnp.maximum(state.num_prompt_tokens[token_rows], positions + 1),
        max_query_len=bucket.max_query_len,
        target=target,
        kv_itemsize=kv_cache.buffers[0].dtype.itemsize,
    )
    return state.token_ids[token_rows, positions], context


STEP = Step()
