"""A request in full, as it gets its row of the batch.

Packing (numpy) and unpacking (JAX, in the compiled program) stand side by side: a layout is read in one place. Every
pack fills a fresh buffer: a step in flight may still read the last one.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.state_spec import KVLayout
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.state import BatchState
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS
from jaxpage.scheduler.step_plan import AdmittedRequest

_UNUSED = np.iinfo(np.int32).max
"""No row, and no limit."""


@dataclass(frozen=True)
class AdmittedRow:
    """An admitted request on the device; fields as in `BatchState`, without the row dimension."""

    row: jax.Array
    num_tokens: jax.Array
    num_prompt_tokens: jax.Array
    num_computed_tokens: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    num_logprobs: jax.Array
    has_rules: jax.Array
    own_processors: jax.Array
    seed: jax.Array  # [2] uint32
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    stop_token_ids: jax.Array  # [MAX_STOP_TOKEN_IDS] int32
    token_ids: jax.Array  # [capacity] int32
    block_tables: jax.Array  # [groups, capacity / block_size, rounded up] int32


_NUM_INTS, _NUM_FLOATS = 9, 6
_HEADER = _NUM_INTS + 2 + _NUM_FLOATS


def admission_size(capacity: int, layout: KVLayout, *, drafts: bool = False) -> int:
    """Length of a packed admission with room for `capacity` token ids and their blocks."""
    return _HEADER + MAX_STOP_TOKEN_IDS + capacity + len(layout.groups) * -(-capacity // layout.block_size) + drafts


def pack_admission(admitted: AdmittedRequest, capacity: int, layout: KVLayout, *, drafts: bool = False) -> np.ndarray:
    """Pack a request for its row, with room for `capacity` token ids and their blocks.

    Where there may be `drafts`, its `DraftState.draft_end` comes last.
    """
    request, params = admitted.request, admitted.request.params
    whole = np.zeros(admission_size(capacity, layout, drafts=drafts), np.int32)
    packed = whole[: len(whole) - drafts]
    if drafts:
        whole[-1] = request.max_computed_tokens if request.max_drafts else 0
    packed[:_NUM_INTS] = (
        admitted.row,
        len(admitted.token_ids),
        request.num_prompt_tokens,
        admitted.num_computed_tokens,
        min(max(params.top_k, 0), _UNUSED),
        params.min_tokens,
        request.num_logprobs,
        request.has_rules,
        request.own_processors,
    )
    seed = request.seed & (2**64 - 1)
    packed[_NUM_INTS : _NUM_INTS + 2] = np.array([seed >> 32, seed & (2**32 - 1)], np.uint32).view(np.int32)
    filters = params.effective_temperature, params.top_p, params.min_p
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    packed[_NUM_INTS + 2 : _HEADER] = np.array([*filters, *penalties], np.float32).view(np.int32)
    stops = sorted(request.stop_token_ids)
    packed[_HEADER : _HEADER + MAX_STOP_TOKEN_IDS] = stops + [_UNUSED] * (MAX_STOP_TOKEN_IDS - len(stops))
    packed[_HEADER + MAX_STOP_TOKEN_IDS :][: len(admitted.token_ids)] = admitted.token_ids
    tables = packed[_HEADER + MAX_STOP_TOKEN_IDS + capacity :]
    tables = tables.reshape(len(layout.groups), -(-capacity // layout.block_size))
    for group, table in enumerate(admitted.block_tables):
        tables[group, : len(table)] = table
    return whole


def empty_admission(capacity: int, layout: KVLayout, *, drafts: bool = False) -> np.ndarray:
    """Of no request: its row is out of range."""
    packed = np.zeros(admission_size(capacity, layout, drafts=drafts), np.int32)
    packed[0] = _UNUSED
    return packed


def unpack_admission(packed: jax.Array, capacity: int, num_groups: int) -> AdmittedRow:
    """The inverse of `pack_admission`, in a compiled program."""
    row, num_tokens, num_prompt_tokens, num_computed_tokens, top_k, min_tokens, num_logprobs, *others = packed[
        :_NUM_INTS
    ]
    has_rules, own_processors = others
    floats = jax.lax.bitcast_convert_type(packed[_NUM_INTS + 2 : _HEADER], jnp.float32)
    temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty = floats
    stops, token_ids, tables = jnp.split(packed[_HEADER:], (MAX_STOP_TOKEN_IDS, MAX_STOP_TOKEN_IDS + capacity))
    return AdmittedRow(
        row=row,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        top_k=top_k,
        min_tokens=min_tokens,
        num_logprobs=num_logprobs,
        has_rules=has_rules.astype(bool),
        own_processors=own_processors,
        seed=jax.lax.bitcast_convert_type(packed[_NUM_INTS : _NUM_INTS + 2], jnp.uint32),
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop_token_ids=stops,
        token_ids=token_ids,
        block_tables=tables.reshape(num_groups, tables.size // max(num_groups, 1)),
    )


class Admit(Program[int]):
    """(state, request) -> state, for a request of at most so many token ids."""

    name = "admit"
    variant_type = int
    unsettles = True

    def variants(self, plan: EnginePlan) -> Sequence[int]:
        most = plan.max_model_len
        return sorted({min(capacity, most) for capacity in (128, 1024, most)}, reverse=True)

    def stage(self, plan: EnginePlan, variant: int) -> tuple[Stage, int]:
        return (Stage.FIRST, 0) if variant == plan.max_model_len else (Stage.SOON, 3)

    def takes(self, plan: EnginePlan, variant: int) -> Sequence[Piece]:
        return ["state"]

    changes = takes

    def nothing(self, plan: EnginePlan, variant: int) -> np.ndarray:
        return empty_admission(variant, plan.layout, drafts=plan.config.max_drafts > 0)

    def function(self, plan: EnginePlan, variant: int) -> Callable[..., Any]:
        def admit(state: BatchState, packed: jax.Array) -> tuple[tuple[BatchState], None]:
            return (_admitted(state, packed, variant),), None

        return admit

    def title(self, variant: int) -> str:
        return f"{self.name} {variant}"

    def choose(self, ready: Collection[int], num_tokens: int) -> int:
        """What a request of so many known tokens is packed for."""
        return min(capacity for capacity in ready if capacity >= num_tokens)


def _admitted(state: BatchState, packed: jax.Array, capacity: int) -> BatchState:
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


ADMIT = Admit()
