"""Hidden states of prompts, summed on the device: what embeddings are made of.

In: the hidden states that a step leaves on the device, and who asks for them. Out: sums on their way to the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.runner.devices import send_back
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage, replicated
from jaxpage.runner.step_table import Ints
from jaxpage.scheduler.step_plan import PooledStates, PromptPiece, SchedulerOutput

NUM_POOLED = 8
"""Requests that the program sums for at a time."""


class Pool(Program[None]):
    """(hidden, stretches) -> the sum of each stretch of hidden states, [NUM_POOLED, embed] float32.

    Its input, [2, NUM_POOLED] int32: where a stretch of tokens begins, and how long it is.
    """

    name = "pool"

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["hidden"]

    def changes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return []

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return np.zeros((2, NUM_POOLED), np.int32)

    def products(self, plan: EnginePlan, variant: None) -> tuple[int, Any]:
        hidden = plan.shapes["hidden"]["last"]
        return NUM_POOLED, jax.ShapeDtypeStruct(hidden.shape[::-1], jnp.float32, sharding=replicated(plan))

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        def pool(hidden: dict[str, jax.Array], packed: jax.Array) -> tuple[tuple[()], jax.Array]:
            last, (start, length) = hidden["last"], packed[:, :, None]
            token = jnp.arange(last.shape[0])
            within = (token >= start) & (token < start + length)
            # What stands outside of all stretches may be anything, and nothing times infinity is no number.
            states = jnp.where(within.any(axis=0)[:, None], last, 0).astype(jnp.float32)
            return (), jnp.matmul(within.astype(jnp.float32), states, precision=jax.lax.Precision.HIGHEST)

        return pool


POOL = Pool()


@dataclass(frozen=True, slots=True)
class Pools:
    """What a step's requests ask for, in parts that are on their way to the host."""

    step_rows: list[int] = field(default_factory=list)
    """Of those requests among the step's."""
    positions: list[int] = field(default_factory=list)
    """Where the stretch of each begins in its prompt."""
    parts: list[jax.Array] = field(default_factory=list)
    """`NUM_POOLED` of them each, as [NUM_POOLED, embed] float32."""


def dispatch_pools(output: SchedulerOutput, first_tokens: Ints, pool: Callable[[np.ndarray], jax.Array]) -> Pools:
    """Sum what a step's requests ask for. first_tokens: [requests], of each among the tokens of the step."""
    pools = Pools()
    stretches: list[tuple[int, int]] = []
    for step_row, (request, query_len) in enumerate(zip(output.requests, output.query_lens, strict=True)):
        start, end = int(first_tokens[step_row]), request.num_computed_tokens
        if request.pooling == "last":
            start, query_len = start + query_len - 1, int(end >= request.num_prompt_tokens)
        if request.pooling is not None and query_len:
            pools.step_rows.append(step_row)
            pools.positions.append(end - query_len)
            stretches.append((start, query_len))
    for at in range(0, len(stretches), NUM_POOLED):
        packed = np.zeros((2, NUM_POOLED), np.int32)
        part = stretches[at : at + NUM_POOLED]
        packed[:, : len(part)] = np.transpose(part)
        pools.parts.append(send_back(pool(packed)))
    return pools


def fetch_pools(pools: Pools, pieces: list[PromptPiece | None]) -> None:
    """Wait for the sums, and put each into `pieces` by its request's step row."""
    sums = [np.asarray(part) for part in pools.parts]
    for i, (step_row, position) in enumerate(zip(pools.step_rows, pools.positions, strict=True)):
        pieces[step_row] = PooledStates(position, sums[i // NUM_POOLED][i % NUM_POOLED])
