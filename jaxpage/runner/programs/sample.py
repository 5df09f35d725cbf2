"""The second half of a step: from logits to new tokens in the batch, and drafts behind them.

With masks of tokens, or to undo it, it runs once more for some step rows of the newest step.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.attention.paged import Target
from jaxpage.ops.sampling.processing import ProcessingState
from jaxpage.ops.sampling.sampling import (
    SamplingState,
    TokenLogprobs,
    TokenMask,
    draw,
    sample,
    sample_greedy,
    sample_random,
    token_logprobs,
)
from jaxpage.requests.request import SamplerKind
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_config import ProgramConfig
from jaxpage.runner.programs.program import Piece, Program, Stage, jit_to_measure
from jaxpage.runner.state import BatchState, rules_layout
from jaxpage.speculative.drafts import count_accepted
from jaxpage.speculative.proposer import Rows

FIRST_DRAW, KEEP_DRAW, DRAW_AGAIN, UNDO_DRAW = range(4)
"""What a step row draws: as the step says; and, once it has drawn, what becomes of that token."""


def pack_draws(num_step_rows: int, vocab_size: int) -> np.ndarray:
    """Every step row of a step draws, without a mask. See `pack_redraws`."""
    return np.full((num_step_rows, 1 + -(-vocab_size // 32)), FIRST_DRAW, np.int32)


def pack_redraws(masks: Mapping[int, np.ndarray | None], num_step_rows: int, vocab_size: int) -> np.ndarray:
    """What becomes of a step's tokens by step row, and the mask behind it, as [step rows, 1 + ceil(vocab / 32)] int32.

    A token is drawn again by its mask or, without one, undone. Places that are not named keep theirs.
    """
    packed = pack_draws(num_step_rows, vocab_size)
    packed[:, 0] = KEEP_DRAW
    for step_row, mask in masks.items():
        packed[step_row, 0] = UNDO_DRAW if mask is None else DRAW_AGAIN
        if mask is not None:
            packed[step_row, 1:] = mask
    return packed


class Draws(NamedTuple):
    """What is drawn behind a step depends on no more of it than this."""

    kind: SamplerKind
    num_rows: int
    """Of the step's bucket."""
    num_draws: int
    """Most tokens that each draws."""


class Sample(Program[Draws]):
    """(logits, state, what becomes of each step row) -> state, `StepResult`. Only `SamplerKind.ANY` has an input."""

    name = "sample"
    variant_type = Draws

    def variants(self, plan: EnginePlan) -> Sequence[Draws]:
        kinds = (*self._usual_kinds(plan), SamplerKind.ANY)
        shapes = dict.fromkeys((bucket.num_rows, plan.program_config.num_draws(bucket)) for bucket in plan.buckets)
        return [Draws(kind, *shape) for shape in shapes for kind in kinds]

    def _usual_kinds(self, plan: EnginePlan) -> tuple[SamplerKind, ...]:
        # A GPU has a program of its own for greedy steps: the one that draws at random leaves nothing out there.
        if plan.target.gpu is None:
            return (SamplerKind.FILTERED,)
        return SamplerKind.GREEDY, SamplerKind.RANDOM, SamplerKind.FILTERED

    def behind(self, plan: EnginePlan, bucket: Bucket, kind: SamplerKind) -> Draws:
        """What draws behind a step in a bucket."""
        kinds = (*self._usual_kinds(plan), SamplerKind.ANY)
        found = min(each for each in kinds if each >= kind)
        return Draws(found, bucket.num_rows, plan.program_config.num_draws(bucket))

    def stage(self, plan: EnginePlan, variant: Draws) -> tuple[Stage, int]:
        shapes = [(bucket.num_rows, plan.program_config.num_draws(bucket)) for bucket in plan.buckets]
        shape = variant.num_rows, variant.num_draws
        is_first, index = shape in [shapes[each] for each in plan.first_buckets], shapes.index(shape)
        if variant.kind is SamplerKind.ANY:  # what few requests ask for, and takes the longest to compile
            return Stage.SOON, 2 if index else 0
        return (Stage.FIRST if is_first else Stage.REST), index

    def takes(self, plan: EnginePlan, variant: Draws) -> Sequence[Piece]:
        return [("logits", variant.num_rows * variant.num_draws), "state"]

    def changes(self, plan: EnginePlan, variant: Draws) -> Sequence[Piece]:
        return ["state"]

    def nothing(self, plan: EnginePlan, variant: Draws) -> np.ndarray | None:
        """Every step row draws, without a mask."""
        if variant.kind is not SamplerKind.ANY:
            return None
        return pack_draws(variant.num_rows, plan.model.vocab_size)

    def function(self, plan: EnginePlan, variant: Draws) -> Callable[..., Any]:
        def sample_step(
            logits: jax.Array, state: BatchState, packed: jax.Array | None = None
        ) -> tuple[tuple[BatchState], StepResult]:
            kind, _, num_draws = variant
            state, result = draw_tokens(logits, state, packed, kind, num_draws, plan.program_config, plan.target)
            return (state,), result

        return sample_step

    def title(self, variant: Draws) -> str:
        return f"{self.name} {variant.kind.name.lower()}, {variant.num_rows} rows, {variant.num_draws} a row"


SAMPLE = Sample()


def compile_sampler(logits: jax.Array, sampling: SamplingState) -> jax.stages.Compiled:
    """The sampler's draw by itself, `(logits, SamplingState) -> tokens`, as it serves where the logits lie."""
    (device,) = logits.devices()
    return jit_to_measure(partial(draw, branch_free=device.platform == "gpu"), logits, sampling)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What a step gives the host, by step row."""

    tokens: jax.Array  # [rows, draws] int32, -1 where there is none
    """Drafts kept and the token behind them; none where a prompt goes on."""
    logprobs: (
        TokenLogprobs | None
    )  # of rows * draws, anything for those that do not ask; only `SamplerKind.ANY` has them
    num_drafts: jax.Array | None  # [rows] int32, proposed for the next step; None without speculation


def draw_tokens(
    logits: jax.Array,
    state: BatchState,
    packed: jax.Array | None,
    kind: SamplerKind,
    num_draws: int,
    config: ProgramConfig,
    target: Target,
) -> tuple[BatchState, StepResult]:
    """Draw for every step row of the step that `state.scheduled` names, and count what it has computed.

    logits: [rows * num_draws, vocab] float32, behind the last known token of each row and behind its drafts.
    packed: `pack_draws` or, once they have drawn, `pack_redraws`; only for `SamplerKind.ANY`.
    """
    step = state.step_rows(logits.shape[0] // num_draws)
    rows, num_tokens, draws, num_checked = step.rows, step.num_tokens, step.draws, step.num_checked
    is_first, undone, mask = jnp.ones_like(draws), jnp.zeros_like(rows), None
    if packed is not None:
        is_first, draws_again = packed[:, 0] == FIRST_DRAW, packed[:, 0] == DRAW_AGAIN
        mask = TokenMask(jnp.repeat(draws_again, num_draws), jnp.repeat(packed[:, 1:], num_draws, axis=0))
        # Back to where the step stood when it drew; a draw that is undone takes the row's last computed token with it.
        undone = (packed[:, 0] == UNDO_DRAW).astype(jnp.int32)
        num_tokens = num_tokens - undone - draws_again
        draws = jnp.where(is_first, draws, draws_again)
        num_checked = jnp.where(is_first, num_checked, 0)
    nth = jnp.arange(num_draws)
    known = num_tokens[:, None] + nth  # what each draw follows
    drawing = draws[:, None] & (nth <= num_checked[:, None])
    of_row, wanted = jnp.repeat(rows, num_draws), drawing.reshape(-1)
    options = _sampling_states(state, of_row, known.reshape(-1), wanted, config)
    with jax.named_scope("sample"):
        drawn = _sample(logits, *options, mask, kind, target)
    logprobs = None
    if kind is SamplerKind.ANY:
        with jax.named_scope("logprobs"):
            asked = jnp.where(wanted, state.num_logprobs[of_row], -1)
            logprobs = token_logprobs(logits, drawn, asked, config.num_logprobs, branch_free=target.branch_free)

    drawn = drawn.reshape(-1, num_draws)
    drafts = state.token_ids.at[rows[:, None], known[:, :-1]].get(mode="clip")
    num_accepted = count_accepted(drawn, drafts, num_checked)
    kept = draws[:, None] & (nth <= num_accepted[:, None])
    num_known = num_tokens + jnp.sum(kept, axis=1, dtype=jnp.int32)
    token_ids = state.token_ids.at[jnp.where(kept, rows[:, None], state.num_rows), known].set(drawn, mode="drop")
    draft_state, num_drafts = state.drafts, None
    if draft_state is not None and config.proposer is not None:
        if config.proposer.reads_model:  # `programs.propose` follows
            draft_state = draft_state.set(rows, draws, jnp.zeros_like(rows))
        else:
            known_rows = Rows(token_ids, rows, num_known, state.seed[rows], target.branch_free)
            with jax.named_scope("propose"):
                draft_state, token_ids, num_drafts = draft_state.propose(known_rows, draws, config.proposer)
    num_computed = jnp.where(is_first, step.query_lens - num_checked + num_accepted, -undone)
    updated = dataclasses.replace(
        state,
        token_ids=token_ids,
        # Padding names some row, and adds nothing to it.
        num_tokens=state.num_tokens.at[rows].add(num_known - step.num_tokens),
        num_computed_tokens=state.num_computed_tokens.at[rows].add(num_computed),
        drafts=draft_state,
    )
    return updated, StepResult(jnp.where(kept, drawn, -1), logprobs, num_drafts)


def _sample(
    logits: jax.Array,
    sampling: SamplingState,
    processing: ProcessingState,
    mask: TokenMask | None,
    kind: SamplerKind,
    target: Target,
) -> jax.Array:
    match kind:
        case SamplerKind.GREEDY:
            return sample_greedy(logits)
        case SamplerKind.RANDOM:
            return sample_random(logits, sampling, target.place_logits, branch_free=target.branch_free, filtered=False)
        case SamplerKind.FILTERED:
            return sample_random(logits, sampling, target.place_logits, branch_free=target.branch_free)
        case SamplerKind.ANY:
            return sample(logits, sampling, processing, mask, target.place_logits, branch_free=target.branch_free)


def _sampling_states(
    state: BatchState, rows: jax.Array, num_tokens: jax.Array, draws: jax.Array, config: ProgramConfig
) -> tuple[SamplingState, ProcessingState]:
    """The options of a step's draws; those that are not made have none.

    rows: [n] int32, of each draw; num_tokens: [n] int32, tokens that it follows; draws: [n] bool, whether it is made.
    """

    def where_drawn(values: jax.Array, off: float) -> jax.Array:
        return jnp.where(draws, values[rows], off)

    sampling = SamplingState(
        temperature=where_drawn(state.temperature, 0),
        top_k=where_drawn(state.top_k, 0),
        top_p=where_drawn(state.top_p, 1),
        min_p=where_drawn(state.min_p, 0),
        seed=state.seed[rows],
        position=num_tokens,
    )
    processing = ProcessingState(
        rows=rows,
        num_prompt_tokens=state.num_prompt_tokens[rows],
        num_tokens=num_tokens,
        min_tokens=where_drawn(state.min_tokens, 0),
        stop_token_ids=state.stop_token_ids[rows],
        repetition_penalty=where_drawn(state.repetition_penalty, 1),
        presence_penalty=where_drawn(state.presence_penalty, 0),
        frequency_penalty=where_drawn(state.frequency_penalty, 0),
        has_rules=draws & state.has_rules[rows],
        token_ids=state.token_ids,
        rules=state.rules,
        own=jnp.where(draws, state.own_processors[rows], 0),
        layout=rules_layout(config.vocab_size),
        processors=tuple(processor.function for processor in config.processors),
    )
    return sampling, processing
