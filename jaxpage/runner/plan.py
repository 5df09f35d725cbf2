"""What the host tells the device: one packed int32 array per step, and one per admitted request.

Packing (numpy) and unpacking (JAX, in the compiled program) stand side by side: a layout is read in one place.
Every pack fills a fresh buffer: a step in flight may still read the last one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.runner.buckets import Bucket
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS
from jaxpage.scheduler import AdmittedRequest, SchedulerOutput

_UNUSED = np.iinfo(np.int32).max
"""An index out of every array's range: scatters with mode="drop" write nowhere."""


class StepPlan(NamedTuple):
    """A step's plan on the device."""

    rows: jax.Array  # [num_rows] int32, maximal in padding
    query_lens: jax.Array  # [num_rows] int32, 0 in padding
    new_blocks: jax.Array  # [3, updates] int32: row, index in its table, block id; maximal in padding


def _max_updates(bucket: Bucket, block_size: int) -> int:
    """A step's tokens fill this many new blocks at most: every row may begin one that it does not fill."""
    return bucket.num_rows + bucket.num_tokens // block_size


def pack_step(output: SchedulerOutput, bucket: Bucket, block_size: int) -> np.ndarray:
    """Pack a step for `bucket`, as [2 * num_rows + 3 * updates] int32."""
    updates = _max_updates(bucket, block_size)
    plan = np.full(2 * bucket.num_rows + 3 * updates, _UNUSED, np.int32)
    plan[bucket.num_rows : 2 * bucket.num_rows] = 0
    plan[: len(output.rows)] = output.rows
    plan[bucket.num_rows : bucket.num_rows + len(output.rows)] = output.query_lens
    if output.new_blocks:
        blocks = plan[2 * bucket.num_rows :].reshape(3, updates)
        blocks[:, : len(output.new_blocks)] = np.asarray(output.new_blocks, np.int32).T
    return plan


def empty_step(bucket: Bucket, block_size: int) -> np.ndarray:
    """The plan of a step that does nothing."""
    return pack_step(SchedulerOutput([], [], [], [], []), bucket, block_size)


def unpack_step(plan: jax.Array, bucket: Bucket) -> StepPlan:
    """The inverse of `pack_step`, in a compiled program."""
    n = bucket.num_rows
    return StepPlan(plan[:n], plan[n : 2 * n], plan[2 * n :].reshape(3, -1))


@dataclass(frozen=True)
class AdmittedRow:
    """An admitted request on the device; fields as in `BatchState`, without the row dimension."""

    row: jax.Array
    num_tokens: jax.Array
    num_prompt_tokens: jax.Array
    num_computed_tokens: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    seed: jax.Array  # [2] uint32
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    stop_token_ids: jax.Array  # [MAX_STOP_TOKEN_IDS] int32
    token_ids: jax.Array  # [capacity] int32


_NUM_INTS, _NUM_FLOATS = 6, 3
_HEADER = _NUM_INTS + 2 + _NUM_FLOATS


def admission_size(capacity: int) -> int:
    """Length of a packed admission with room for `capacity` token ids."""
    return _HEADER + MAX_STOP_TOKEN_IDS + capacity


def pack_admission(admitted: AdmittedRequest, capacity: int) -> np.ndarray:
    """Pack a request for its row, with room for `capacity` token ids."""
    request, params = admitted.request, admitted.request.params
    packed = np.zeros(admission_size(capacity), np.int32)
    packed[:_NUM_INTS] = (
        admitted.row,
        len(admitted.token_ids),
        request.num_prompt_tokens,
        admitted.num_computed_tokens,
        min(max(params.top_k, 0), _UNUSED),
        params.min_tokens,
    )
    seed = request.seed & (2**64 - 1)
    packed[_NUM_INTS : _NUM_INTS + 2] = np.array([seed >> 32, seed & (2**32 - 1)], np.uint32).view(np.int32)
    floats = np.array([params.effective_temperature, params.top_p, params.min_p], np.float32)
    packed[_NUM_INTS + 2 : _HEADER] = floats.view(np.int32)
    stops = sorted(request.stop_token_ids)
    packed[_HEADER : _HEADER + MAX_STOP_TOKEN_IDS] = stops + [_UNUSED] * (MAX_STOP_TOKEN_IDS - len(stops))
    packed[_HEADER + MAX_STOP_TOKEN_IDS :][: len(admitted.token_ids)] = admitted.token_ids
    return packed


def unpack_admission(packed: jax.Array) -> AdmittedRow:
    """The inverse of `pack_admission`, in a compiled program."""
    row, num_tokens, num_prompt_tokens, num_computed_tokens, top_k, min_tokens = packed[:_NUM_INTS]
    temperature, top_p, min_p = jax.lax.bitcast_convert_type(packed[_NUM_INTS + 2 : _HEADER], jnp.float32)
    return AdmittedRow(
        row=row,
        num_tokens=num_tokens,
        num_prompt_tokens=num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        top_k=top_k,
        min_tokens=min_tokens,
        seed=jax.lax.bitcast_convert_type(packed[_NUM_INTS : _NUM_INTS + 2], jnp.uint32),
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        stop_token_ids=packed[_HEADER : _HEADER + MAX_STOP_TOKEN_IDS],
        token_ids=packed[_HEADER + MAX_STOP_TOKEN_IDS :],
    )
