"""Recurrences over ragged steps: against a loop over each sequence alone, whatever the cuts and the company."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.recurrent import RecurrentState, recur

BATCH_ROWS, RING = 5, 4
Inputs = dict[str, np.ndarray]


def update(carry: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
    """A gated sum of outer products, as linear attention has it: the carry is [rows, k, v]."""
    decay, k, v, q = inputs["decay"], inputs["k"], inputs["v"], inputs["q"]
    carry = (carry * decay[:, None, None] + k[:, :, None] * v[:, None, :]).astype(carry.dtype)
    return carry, {"read": (carry * q[:, :, None]).sum(1), "size": jnp.abs(carry).sum((1, 2))}


def inputs_of(seed: int, length: int) -> Inputs:
    """What a sequence of this length gives at each position."""
    rng = np.random.default_rng(seed)
    sizes: dict[str, tuple[int, ...]] = {"decay": (), "k": (3,), "v": (4,), "q": (3,)}
    return {name: rng.uniform(-1, 1, (length, *size)).astype(np.float32) for name, size in sizes.items()}


def alone(inputs: Inputs, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The states behind each token, and what is read there, by a loop of plain numpy."""
    carry, states, reads = np.zeros((3, 4), np.float32), [], []
    for decay, k, v, q in zip(inputs["decay"], inputs["k"], inputs["v"], inputs["q"], strict=True):
        carry = np.asarray(jnp.asarray(carry * decay + np.outer(k, v)).astype(dtype), np.float32)
        states.append(carry)
        reads.append(q @ carry)
    return np.array(states), np.array(reads)


def empty(dtype: str = "float32", ring: int = RING) -> jax.Array:
    """What rows hold before anything is computed: nothing that may be read."""
    return jnp.full((BATCH_ROWS, ring, 3, 4), jnp.nan, dtype)


run_recur = jax.jit(lambda inputs, state: recur(update, inputs, state))


def step(
    values: jax.Array, chunks: dict[int, tuple[Inputs, int, int]], *, step_rows: int = BATCH_ROWS, num_tokens: int = 24
) -> tuple[dict[int, np.ndarray], jax.Array]:
    """One step: by batch row, a sequence and its first position and end. Returns what each reads, and the new ring.

    Tokens and step rows that nobody has are padding, with inputs that would spoil whatever used them.
    """
    lens = [end - start for _, start, end in chunks.values()]
    padding = step_rows - len(chunks)
    begins = np.cumsum([0, *lens, *[0] * padding])
    given = {
        name: np.concatenate(
            [inputs[name][start:end] for inputs, start, end in chunks.values()]
            + [np.full((num_tokens - sum(lens), *leaf.shape[1:]), np.nan, np.float32)]
        )
        for name, leaf in inputs_of(0, 1).items()
    }
    state = RecurrentState(
        values,
        rows=jnp.array([*chunks, *[0] * padding], jnp.int32),
        query_start=jnp.asarray(begins, jnp.int32),
        query_lens=jnp.array([*lens, *[0] * padding], jnp.int32),
        num_computed=jnp.array([start for _, start, _ in chunks.values()] + [0] * padding, jnp.int32),
        max_query_len=1 if max(lens, default=1) == 1 else 16,
    )
    outputs, after = run_recur(given, state)
    assert not np.any(np.asarray(outputs["read"])[sum(lens) :]), "padding gets zeros"
    found = np.asarray(outputs["read"])
    return {row: found[begin : begin + count] for row, begin, count in zip(chunks, begins, lens, strict=False)}, (
        after.values
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ragged_batch_reads_what_each_sequence_reads_alone(dtype: str) -> None:
    sequences = {row: (inputs_of(row, length), 0, length) for row, length in ((3, 9), (0, 1), (4, 5))}
    reads, values = step(empty(dtype), sequences)
    for row, (inputs, _, length) in sequences.items():
        states, expected = alone(inputs, dtype)
        tolerance = 1e-5 if dtype == "float32" else 0.05
        np.testing.assert_allclose(reads[row], expected, atol=tolerance)
        for position in range(max(0, length - RING), length):
            kept = np.asarray(values[row, position % RING], np.float32)
            np.testing.assert_allclose(kept, states[position], atol=tolerance)


def test_rows_that_the_step_does_not_name_and_entries_of_older_tokens_keep_what_they_hold() -> None:
    before = jnp.arange(BATCH_ROWS * RING * 12, dtype=jnp.float32).reshape(BATCH_ROWS, RING, 3, 4)
    _, values = step(before, {2: (inputs_of(1, 9), 6, 8)})
    changed = np.any(np.asarray(values != before), axis=(2, 3))
    assert {(int(row), int(entry)) for row, entry in np.argwhere(changed)} == {(2, 6 % RING), (2, 7 % RING)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (3, 10), (9, 10), (1, 6, 7, 10)])
def test_however_a_sequence_is_cut_and_whoever_shares_its_steps_it_reads_the_same_bits(
    dtype: str, cuts: tuple[int, ...]
) -> None:
    inputs, other = inputs_of(7, 10), inputs_of(8, 16)
    whole, kept = step(empty(dtype), {1: (inputs, 0, 10)})
    values, pieces, start = empty(dtype), [], 0
    for index, end in enumerate(cuts):
        company = {3: (other, index, index + 1)} if index % 2 == 0 else {}
        reads, values = step(values, {**company, 1: (inputs, start, end)}, num_tokens=16, step_rows=2 + index % 2)
        pieces.append(reads[1])
        start = end
    assert np.array_equal(np.concatenate(pieces), whole[1])
    assert np.array_equal(np.asarray(values[1, 9 % RING]), np.asarray(kept[1, 9 % RING]))


def test_a_new_request_in_a_used_row_begins_with_zeros() -> None:
    inputs = inputs_of(3, 6)
    fresh, _ = step(empty(), {1: (inputs, 0, 6)})
    _, used = step(empty(), {1: (inputs_of(4, 9), 0, 9)})
    again, _ = step(used, {1: (inputs, 0, 6)})
    assert np.array_equal(fresh[1], again[1])


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_after_rejected_drafts_a_row_goes_on_from_the_token_before_them(accepted: int) -> None:
    max_drafts = RING - 2
    inputs, drafted = inputs_of(5, 12), inputs_of(6, 12)
    whole, _ = step(empty(), {0: (inputs, 0, 12)})
    _, values = step(empty(), {0: (inputs, 0, 6)})
    right = 7 + accepted
    guessed = {name: np.concatenate([leaf[:right], drafted[name][right:]]) for name, leaf in inputs.items()}
    reads, values = step(values, {0: (guessed, 6, 7 + max_drafts)})
    assert np.array_equal(reads[0][: 1 + accepted], whole[0][6:right])
    reads, values = step(values, {0: (inputs, right, right + 1)})
    assert np.array_equal(reads[0], whole[0][right : right + 1])


def test_a_row_that_is_held_back_by_a_token_after_all_drafts_were_rejected_computes_it_again() -> None:
    inputs, drafted = inputs_of(5, 12), inputs_of(6, 12)
    whole, values = step(empty(), {0: (inputs, 0, 6)})
    guessed = {name: np.concatenate([leaf[:7], drafted[name][7:]]) for name, leaf in inputs.items()}
    _, values = step(values, {0: (guessed, 6, 7 + RING - 2)})
    again, _ = step(values, {0: (inputs, 6, 7)})
    whole, _ = step(empty(), {0: (inputs, 0, 7)})
    assert np.array_equal(again[0], whole[0][6:])


def test_a_recurrence_runs_under_vmap_over_several_states() -> None:
    inputs = [inputs_of(seed, 8) for seed in (1, 2)]
    expected = [step(empty(), {0: (each, 0, 8)})[0][0] for each in inputs]
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)

    def run(given: Any, values: jax.Array) -> jax.Array:
        ints = [jnp.array(numbers, jnp.int32) for numbers in ([0], [0, 8], [8], [0])]
        return recur(update, given, RecurrentState(values, *ints, max_query_len=8))[0]["read"]

    found = jax.vmap(run)(both, jnp.stack([empty(), empty()]))
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)
