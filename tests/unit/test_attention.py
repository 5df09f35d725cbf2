"""`attend` over several KV groups: each layer writes and sees its own pages of an array that layers of others share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpage.ops.attention.paged import KVCache, PagedState, StepContext, attend
from jaxpage.ops.state_spec import KVGroup, KVLayout, KVSpec, PagedPlace
from jaxpage.runner.state import empty_kv_cache

HEADS, HEAD_DIM, SCALE = 4, 8, 0.3
FULL = KVGroup(KVSpec(2, HEAD_DIM), 4)
WINDOW = KVGroup(KVSpec(2, HEAD_DIM, window=5), 4)
CHUNK = KVGroup(KVSpec(1, HEAD_DIM, chunk=6), 8)
LAYOUT = KVLayout((FULL, WINDOW, CHUNK), tuple((PagedPlace(*place),) for place in ((0, 0), (1, 0), (2, 0), (2, 1))), 4)
"""Two arrays for four layers; a block of the chunked kind is as large in bytes and holds twice the tokens."""
pytestmark = pytest.mark.usefixtures("quick_compiles")
NUM_TOKENS, MAX_LEN = 32, 24
LENS = (23, 9, 16)
"""Tokens of each row in the end."""
STEPS = ((7, 9, 4), (15, 0, 11), (1, 0, 1))
"""Query lengths, step by step."""


def block_tables(rng: np.random.Generator) -> np.ndarray:
    """[groups, rows, width]: scattered, and no block named twice."""
    width = MAX_LEN // 4
    ids = rng.permutation(np.arange(1, 3 * len(LENS) * width + 1)).reshape(3, len(LENS), width)
    return ids.astype(np.int32)


def metadata_of(tables: np.ndarray, computed: Sequence[int], query_lens: Sequence[int]) -> StepContext:
    slots = np.full((3, NUM_TOKENS), 2**31 - 1, np.int32)
    token = 0
    for row, (start, count) in enumerate(zip(computed, query_lens, strict=True)):
        for position in range(start, start + count):
            for index, group in enumerate(LAYOUT.groups):
                block_id = tables[index, row, position // group.block_size]
                slots[index, token] = block_id * group.block_size + position % group.block_size
            token += 1
    return StepContext(
        positions=jnp.zeros(NUM_TOKENS, jnp.int32),
        slots=[jnp.asarray(of_group) for of_group in slots],
        block_tables=jnp.asarray(tables),
        query_start=jnp.asarray([0, *np.cumsum(query_lens)], jnp.int32),
        query_lens=jnp.asarray(query_lens, jnp.int32),
        kv_lens=jnp.asarray([s + n if n else 0 for s, n in zip(computed, query_lens, strict=True)], jnp.int32),
        rope_lengths=jnp.zeros(NUM_TOKENS, jnp.int32),
        max_query_len=NUM_TOKENS,
    )


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, spec: KVSpec) -> np.ndarray:
    """One row's attention in float64, [tokens, heads, head_dim]; all of its tokens are queries."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    k, v = (np.repeat(array, HEADS // spec.num_kv_heads, axis=1) for array in (k, v))
    out = np.empty_like(q)
    for position in range(len(q)):
        seen = slice(spec.first_visible(position), position + 1)
        scores = np.einsum("hd,shd->hs", q[position], k[seen]) * SCALE
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[position] = np.einsum("hs,shd->hd", weights / weights.sum(-1, keepdims=True), v[seen])
    return out


@dataclass(frozen=True)
class Served:
    """What came of it."""

    block_tables: np.ndarray
    rows: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]]
    """q, k, v of each layer and row."""
    outputs: list[list[np.ndarray]]
    """Of each layer and row, its tokens in order."""
    padding: list[np.ndarray]
    """What stood in place of the padding tokens."""
    cache: KVCache


@pytest.fixture(scope="module")
def served() -> Served:
    """Three rows through four layers, in three steps."""
    rng = np.random.default_rng(0)
    tables = block_tables(rng)

    def draw(length: int, heads: int) -> np.ndarray:
        return rng.normal(size=(length, heads, HEAD_DIM)).astype(np.float32)

    num_kv_heads = [LAYOUT.groups[group].spec.num_kv_heads for group, _ in LAYOUT.paged_places]
    rows = [[(draw(length, HEADS), draw(length, g), draw(length, g)) for length in LENS] for g in num_kv_heads]
    run = jax.jit(partial(attend, scale=SCALE))
    # A slot that was never written holds NaN: reading one shows.
    empty = empty_kv_cache(LAYOUT, int(tables.max()) + 1, np.dtype(np.float32))
    buffers = [jnp.full_like(buffer, jnp.nan) for buffer in empty.buffers]
    outputs: list[list[list[np.ndarray]]] = [[[] for _ in LENS] for _ in rows]
    padding = []
    computed = np.zeros(len(LENS), int)
    for query_lens in STEPS:
        metadata = metadata_of(tables, computed.tolist(), query_lens)
        ends = np.cumsum(query_lens)
        for layer, of_layer in enumerate(rows):
            q, k, v = (
                np.concatenate(
                    [row[i][s : s + n] for row, s, n in zip(of_layer, computed, query_lens, strict=True)]
                    + [np.full((NUM_TOKENS - ends[-1], *of_layer[0][i].shape[1:]), 9, np.float32)]
                )
                for i in range(3)
            )
            group, buffer = LAYOUT.paged_places[layer]
            out, state = run(q, k, v, PagedState(buffers[buffer], metadata.of_group(group, LAYOUT)))
            buffers[buffer] = state.buffer
            for row, (end, count) in enumerate(zip(ends, query_lens, strict=True)):
                outputs[layer][row].append(np.asarray(out[end - count : end]))
            padding.append(np.asarray(out[ends[-1] :]))
        computed += query_lens
    assert computed.tolist() == list(LENS)
    cache = KVCache(buffers, LAYOUT)
    return Served(tables, rows, [[np.concatenate(parts) for parts in layer] for layer in outputs], padding, cache)


@pytest.mark.parametrize("layer", range(len(LAYOUT.paged_places)))
def test_every_layer_equals_dense_attention_of_its_own_kind(served: Served, layer: int) -> None:
    spec = LAYOUT.groups[LAYOUT.paged_places[layer][0]].spec
    for row, out in enumerate(served.outputs[layer]):
        np.testing.assert_allclose(out, dense(*served.rows[layer][row], spec), atol=2e-5, err_msg=f"{row=}")


def test_padding_attends_to_nothing(served: Served) -> None:
    assert any(padding.size for padding in served.padding)
    assert not any(padding.any() for padding in served.padding)


@pytest.mark.parametrize("buffer", range(LAYOUT.num_buffers))
def test_an_array_holds_what_its_layers_wrote_and_nothing_else(served: Served, buffer: int) -> None:
    """Each layer's keys and values stand in the pages of its own group, seen as blocks of its own size."""
    got = np.asarray(served.cache.buffers[buffer])
    expected = np.full_like(got, np.nan)
    for layer, (index, of_layer) in enumerate(LAYOUT.paged_places):
        if of_layer == buffer:
            group = LAYOUT.groups[index]
            pages = expected.reshape(len(got), 2, group.block_size, group.spec.num_kv_heads, HEAD_DIM)
            for row, (_, k, v) in enumerate(served.rows[layer]):
                for position in range(LENS[row]):
                    block_id = served.block_tables[index, row, position // group.block_size]
                    pages[block_id, :, position % group.block_size] = k[position], v[position]
    np.testing.assert_array_equal(got, expected)
