"""What the host tells the device: a packed int32 array per step, one per admitted request, one for a step's forks.

A request that says something of single tokens takes another one with its rules.

Packing (numpy) and unpacking (JAX, in the compiled program) stand side by side: a layout is read in one place.
Every pack fills a fresh buffer: a step in flight may still read the last one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.kv_spec import KVLayout
from jaxpage.ops.sampling.token_rules import RulesLayout
from jaxpage.requests.request import Request
from jaxpage.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxpage.scheduler.scheduler import AdmittedRequest, SchedulerOutput

_UNUSED = np.iinfo(np.int32).max
"""An index out of every array's range: scatters with mode="drop" write nowhere."""


NUM_EDITS = 64
"""Edits that travel with a step; if there are more, the rest go ahead of it."""


NO_EDITS = np.zeros((2, 0), np.int32)
"""What most steps travel with."""


def pack_edits(edits: np.ndarray, capacity: int) -> np.ndarray:
    """Edits of the state (`StepTable`), [2, n] int32, padded to [2, capacity]."""
    packed = np.full((2, capacity), _UNUSED, np.int32)
    packed[:, : edits.shape[1]] = edits
    return packed


class ForkPlan(NamedTuple):
    """What goes on as a copy of something else, before a step."""

    row_forks: jax.Array  # [3, rows] int32: source row, target row, last token; maximal in padding
    num_copies: jax.Array  # int32
    copies: jax.Array  # [2, capacity] int32: source block, target block


def pack_forks(output: SchedulerOutput, num_rows: int, num_groups: int) -> np.ndarray:
    """Pack a step's row forks and block copies: each row is forked to at most once, and copies a block per group."""
    capacity = num_rows * num_groups
    packed = np.full(3 * num_rows + 1 + 2 * capacity, _UNUSED, np.int32)
    forks = packed[: 3 * num_rows].reshape(3, num_rows)
    for index, fork in enumerate(output.row_forks):
        forks[:, index] = fork.source, fork.target, fork.token_id
    packed[3 * num_rows] = len(output.block_copies)
    if output.block_copies:
        copies = packed[3 * num_rows + 1 :].reshape(2, capacity)
        copies[:, : len(output.block_copies)] = np.asarray(output.block_copies, np.int32).T
    return packed


FIRST_DRAW, KEEP_DRAW, DRAW_AGAIN, UNDO_DRAW = range(4)
"""What a place draws: as the step says; and, once it has drawn, what becomes of that token."""


def pack_draws(num_places: int, vocab_size: int) -> np.ndarray:
    """Every place of a step draws, without a mask. See `pack_redraws`."""
    return np.full((num_places, 1 + -(-vocab_size // 32)), FIRST_DRAW, np.int32)


def pack_redraws(masks: Mapping[int, np.ndarray | None], num_places: int, vocab_size: int) -> np.ndarray:
    """What becomes of a step's tokens by place, and the mask behind it, as [places, 1 + ceil(vocab / 32)] int32.

    A token is drawn again by its mask or, without one, undone. Places that are not named keep theirs.
    """
    packed = pack_draws(num_places, vocab_size)
    packed[:, 0] = KEEP_DRAW
    for place, mask in masks.items():
        packed[place, 0] = UNDO_DRAW if mask is None else DRAW_AGAIN
        if mask is not None:
            packed[place, 1:] = mask
    return packed


def empty_forks(num_rows: int, num_groups: int) -> np.ndarray:
    """Forks and copies of nothing."""
    return pack_forks(SchedulerOutput([], [], [], [], [], [], []), num_rows, num_groups)


def unpack_forks(packed: jax.Array, num_rows: int) -> ForkPlan:
    """The inverse of `pack_forks`, in a compiled program."""
    start = 3 * num_rows
    return ForkPlan(packed[:start].reshape(3, num_rows), packed[start], packed[start + 1 :].reshape(2, -1))


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
    tables = packed[_HEADER + MAX_STOP_TOKEN_IDS + capacity :].reshape(len(layout.groups), -1)
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
        block_tables=tables.reshape(num_groups, -1),
    )


def rules_layout(vocab_size: int) -> RulesLayout:
    """How the rules of a request about single tokens are packed: with room for all that it may have."""
    return RulesLayout(vocab_size, MAX_LOGIT_BIAS, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)


def pack_rules(row: int, request: Request, vocab_size: int) -> np.ndarray:
    """Pack a request's rules for its row, as [1 + layout.size] int32: the row goes first."""
    params = request.params
    rules = rules_layout(vocab_size).pack(params.allowed_token_ids, params.logit_bias, request.bad_words)
    return np.concatenate([np.array([row], np.int32), rules])


def empty_rules(vocab_size: int) -> np.ndarray:
    """Of no request: their row is out of range."""
    packed = np.zeros(1 + rules_layout(vocab_size).size, np.int32)
    packed[0] = _UNUSED
    return packed
