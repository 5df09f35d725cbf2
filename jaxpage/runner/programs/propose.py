"""Drafts behind the tokens that a step has drawn, by a proposer that looks at more than tokens."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import KVCache
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState
from jaxpage.speculative.proposer import Rows


class Propose(Program[int]):
    """(params, kv_cache, hidden, state) -> state, and how many drafts each step row has, [step rows] int32.

    A variant is the step rows of the last step.
    """

    name = "propose"
    variant_type = int

    def variants(self, plan: EnginePlan) -> Sequence[int]:
        proposer = plan.program_config.proposer
        if proposer is None or not proposer.reads_model:
            return []
        return list(dict.fromkeys(bucket.num_rows for bucket in plan.buckets))

    def stage(self, plan: EnginePlan, variant: int) -> tuple[Stage, int]:
        is_first = variant in [plan.buckets[index].num_rows for index in plan.first_buckets]
        return (Stage.FIRST if is_first else Stage.REST), plan.first_bucket_of(variant)

    def takes(self, plan: EnginePlan, variant: int) -> Sequence[Piece]:
        return ["params", "kv_cache", "hidden", "state"]

    def changes(self, plan: EnginePlan, variant: int) -> Sequence[Piece]:
        return ["state"]

    def nothing(self, plan: EnginePlan, variant: int) -> None:
        return None

    def products(self, plan: EnginePlan, variant: int) -> tuple[int, Any]:
        return variant, plan.shapes["params"]

    def function(self, plan: EnginePlan, variant: int) -> Callable[..., Any]:
        proposer, branch_free = plan.program_config.proposer, plan.target.branch_free
        assert proposer is not None

        def propose(
            params: Params, kv_cache: KVCache, hidden: dict[str, jax.Array], state: BatchState
        ) -> tuple[tuple[BatchState], jax.Array]:
            drafts = state.drafts
            assert drafts is not None
            step_rows, query_lens = state.scheduled[:, :variant]
            num_tokens = state.num_tokens[step_rows]
            # Whoever has drawn has a last token that is not computed; in a prompt that goes on, more are missing.
            draws = (query_lens > 0) & (state.num_computed_tokens[step_rows] == num_tokens - 1)
            rows = Rows(state.token_ids, step_rows, num_tokens, state.seed[step_rows], branch_free)
            drafts, token_ids, num_drafts = drafts.propose(rows, draws, proposer, params, kv_cache, hidden)
            return (dataclasses.replace(state, token_ids=token_ids, drafts=drafts),), jnp.where(draws, num_drafts, 0)

        return propose

    def title(self, variant: int) -> str:
        return f"{self.name} {variant} rows"


PROPOSE = Propose()
