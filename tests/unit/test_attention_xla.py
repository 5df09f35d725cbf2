"""Paged attention in XLA against dense attention in float64, over ragged batches with scattered block tables."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxpage.ops.attention.paged_xla import paged_attention_xla

SCALE = 0.3
Rows = list[tuple[int, int]]
"""(kv_len, query_len) of each row, this step's tokens counted in kv_len."""


@dataclass(frozen=True)
class Shape:
    """A padded step and its cache; each is compiled once for all of its batches."""

    num_tokens: int
    num_rows: int
    max_query_len: int
    head_dim: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    width: int
    dtype: str = field(default="float32")

    @property
    def max_kv_len(self) -> int:
        return self.width * self.block_size


DECODE = Shape(8, 8, 1, head_dim=16, block_size=16, num_heads=8, num_kv_heads=2, width=13)
MIXED = Shape(88, 8, 88, head_dim=16, block_size=16, num_heads=8, num_kv_heads=2, width=13)
WIDE_DECODE = Shape(8, 8, 1, head_dim=64, block_size=32, num_heads=3, num_kv_heads=1, width=7)
WIDE_MIXED = Shape(88, 8, 88, head_dim=64, block_size=32, num_heads=3, num_kv_heads=1, width=7)
SHORT_TABLE = Shape(8, 8, 8, head_dim=16, block_size=16, num_heads=2, num_kv_heads=2, width=2)
"""A table that holds less than a tile, and no head groups."""
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 208)


@dataclass(frozen=True)
class Options:
    """What a layer's attention is, beyond causal."""

    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    def first_visible(self, position: int) -> int:
        """The first KV position that a query sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position - position % self.chunk)


NO_OPTIONS = Options()


@cache
def compiled(shape: Shape, given: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Attention for one shape with the options named. Their values come in as arrays: one program serves all."""

    def attend(q: jax.Array, kv: jax.Array, values: dict[str, jax.Array], **metadata: jax.Array) -> jax.Array:
        options: dict[str, Any] = {name: values[name] for name in given}
        return paged_attention_xla(q, kv, **metadata, max_query_len=shape.max_query_len, scale=SCALE, **options)

    return jax.jit(attend)


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options) -> np.ndarray:
    """Causal attention of one row, whose queries are its last positions.

    q: [queries, heads, head_dim]; k, v: [kv_len, kv_heads, head_dim]; all float64.
    """
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    out = np.empty_like(q)
    for i in range(len(q)):
        position = len(k) - len(q) + i
        visible = slice(options.first_visible(position), position + 1)
        scores = np.einsum("hd,shd->hs", q[i], k[visible]) * SCALE
        if options.softcap is not None:
            scores = options.softcap * np.tanh(scores / options.softcap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[i] = np.einsum("hs,shd->hd", weights / weights.sum(-1, keepdims=True), v[visible])
    return out


def check(shape: Shape, rows: Rows, options: Options = NO_OPTIONS, seed: int = 0) -> None:
    """Run a batch and compare it; slots that no query sees are NaN, padding tokens hold large numbers."""
    rng = np.random.default_rng(seed)
    rows = rows + [(0, 0)] * (shape.num_rows - len(rows))
    kv_lens, query_lens = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    if shape.max_query_len == 1:  # rows and tokens are in the same order
        query_start = np.arange(shape.num_rows + 1, dtype=np.int32)
    else:
        query_start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    q = rng.normal(size=(shape.num_tokens, shape.num_heads, shape.head_dim)) * 2
    num_blocks = shape.num_rows * shape.width + 1
    cache_shape = (num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
    kv = np.full(cache_shape, np.nan, np.float32)
    tables = rng.permutation(np.arange(1, num_blocks)).reshape(shape.num_rows, shape.width).astype(np.int32)
    # Entries past a row's KV, or behind what its queries see, are left-overs: the null block, or blocks of others.
    first_seen = np.array([options.first_visible(kv_len - max(query_len, 1)) for kv_len, query_len in rows])[:, None]
    block_start = np.arange(shape.width) * shape.block_size
    unused = (block_start >= kv_lens[:, None]) | (block_start + shape.block_size <= first_seen)
    tables = np.where(unused, np.where(rng.random(tables.shape) < 0.5, 0, tables[::-1]), tables)

    dtype = jnp.dtype(shape.dtype)
    q = q.astype(dtype)
    expected = np.zeros(q.shape, np.float64)
    is_padding = np.ones(shape.num_tokens, bool)
    for row, (kv_len, query_len) in enumerate(rows):
        new = rng.normal(size=(2, kv_len, shape.num_kv_heads, shape.head_dim)).astype(dtype)
        stored = np.arange(first_seen[row, 0], kv_len)
        block_ids = tables[row][stored // shape.block_size]
        kv[block_ids, :, stored % shape.block_size] = new[:, stored].swapaxes(0, 1)
        tokens = slice(query_start[row], query_start[row] + query_len)
        k, v = new.astype(np.float64)
        expected[tokens] = dense(q[tokens].astype(np.float64), k, v, options)
        is_padding[tokens] = False
    q[is_padding] = 1000

    values = {name: value for name, value in asdict(options).items() if value is not None}
    got = compiled(shape, tuple(values))(
        q,
        kv.astype(dtype),
        {name: np.asarray(value, np.float32 if name == "softcap" else np.int32) for name, value in values.items()},
        block_tables=tables,
        query_start=query_start,
        query_lens=query_lens,
        kv_lens=kv_lens,
    )
    assert got.dtype == dtype
    assert got.shape == q.shape
    result = np.asarray(got, np.float64)
    np.testing.assert_array_equal(result[is_padding], 0)
    tolerance = 6e-2 if dtype == jnp.bfloat16 else 2e-5
    np.testing.assert_allclose(result, expected, atol=tolerance, err_msg=f"{rows=} {options=}")


def lengths(shape: Shape) -> st.SearchStrategy[int]:
    """KV lengths, half of them around the borders of blocks and tiles."""
    return st.sampled_from([n for n in BORDERS if n <= shape.max_kv_len]) | st.integers(1, shape.max_kv_len)


def decode_rows(shape: Shape) -> st.SearchStrategy[Rows]:
    """Rows with one query each, and idle ones between them."""
    return st.lists(st.tuples(lengths(shape), st.sampled_from([1, 1, 1, 0])), min_size=1, max_size=shape.num_rows)


@st.composite
def mixed_rows(draw: st.DrawFn, shape: Shape) -> Rows:
    """Decode rows, prefill chunks (whole prompts or later parts) and idle rows, within the step's tokens."""
    rows, room = [], shape.num_tokens
    for _ in range(draw(st.integers(1, shape.num_rows))):
        kv_len = draw(lengths(shape))
        most = min(kv_len, room)
        query_len = draw(st.sampled_from([0, min(1, most), min(15, most), min(16, most), min(17, most), most]))
        rows.append((kv_len, query_len))
        room -= query_len
    return rows


def windows(shape: Shape) -> st.SearchStrategy[int | None]:
    """No window (in one geometry, to compile less), or one of a length around the borders, or beyond them all."""
    lengths = st.sampled_from((*BORDERS, 1000)) | st.integers(1, 210)
    return lengths if shape.head_dim == 64 else st.none() | lengths


SETTINGS = settings(derandomize=True, deadline=None, max_examples=60, database=None)
SEEDS = st.integers(0, 2**16)
FULL_OF_QUERY_BLOCKS = [(17, 17), (100, 17), (208, 17), (17, 17), (64, 17), (1, 1), (65, 1), (1, 1)]
"""As many query blocks as a step of 88 tokens and 8 rows can have, and no padding."""


@pytest.mark.parametrize("shape", [DECODE, WIDE_DECODE], ids=["gqa_4", "gqa_3_wide"])
def test_decode_equals_dense_attention(shape: Shape) -> None:
    @SETTINGS
    @given(rows=decode_rows(shape), window=windows(shape), seed=SEEDS)
    @example(rows=[(n, 1) for n in BORDERS[:8]], window=1000, seed=0)
    @example(rows=[(n, 1) for n in BORDERS[-8:]], window=64, seed=0)
    @example(rows=[(shape.max_kv_len, 1)] * 8, window=1000, seed=0)
    @example(rows=[(33, 0)], window=16, seed=0)  # nothing to do at all
    def run(rows: Rows, window: int | None, seed: int) -> None:
        check(shape, rows, Options(window), seed)

    run()


@pytest.mark.parametrize("shape", [MIXED, WIDE_MIXED], ids=["gqa_4", "gqa_3_wide"])
def test_mixed_steps_equal_dense_attention(shape: Shape) -> None:
    @SETTINGS
    @given(rows=mixed_rows(shape), window=windows(shape), seed=SEEDS)
    @example(rows=FULL_OF_QUERY_BLOCKS, window=1000, seed=0)
    @example(rows=FULL_OF_QUERY_BLOCKS, window=16, seed=0)
    @example(rows=[(88, 88)], window=1000, seed=0)
    @example(rows=[(208, 88)], window=33, seed=0)
    @example(rows=[(40, 0), (129, 65), (200, 0)], window=1000, seed=0)
    @example(rows=[(40, 0)], window=16, seed=0)
    def run(rows: Rows, window: int | None, seed: int) -> None:
        check(shape, rows, Options(window), seed)

    run()


def test_without_a_window_all_positions_are_seen() -> None:
    for rows in ([(n, 1) for n in BORDERS[:8]], [(n, 1) for n in BORDERS[-8:]], [(208, 1)] * 8, [(33, 0)]):
        check(DECODE, rows)
    for rows in (FULL_OF_QUERY_BLOCKS, [(88, 88)], [(208, 88)], [(40, 0), (129, 65), (200, 0)], [(40, 0)]):
        check(MIXED, rows)


def test_window_of_a_length_hides_exactly_the_position_before_it() -> None:
    # Every window around every border, at a query whose oldest visible position moves across blocks and tiles.
    for window in range(1, 70):
        check(DECODE, [(n, 1) for n in (window - 1 or 1, window, window + 1, 64, 65, 128, 129, 208)], Options(window))


@pytest.mark.parametrize("shape", [DECODE, WIDE_MIXED], ids=["decode", "mixed"])
def test_chunked_attention_equals_dense_attention_within_the_chunk(shape: Shape) -> None:
    @SETTINGS
    @given(
        rows=decode_rows(shape) if shape is DECODE else mixed_rows(shape),
        chunk=st.sampled_from((*BORDERS, 1000)) | st.integers(1, 210),
        seed=SEEDS,
    )
    @example(rows=[(n, 1) for n in BORDERS[-8:]], chunk=64, seed=0)
    @example(rows=[(129, 1), (65, 1)], chunk=128, seed=0)
    @example(rows=[(shape.max_kv_len, min(shape.max_query_len, 80))], chunk=150, seed=0)
    @example(rows=[(shape.max_kv_len, 1), (33, 0)], chunk=16, seed=0)
    def run(rows: Rows, chunk: int, seed: int) -> None:
        check(shape, rows, Options(chunk=chunk), seed)

    run()


def test_chunk_and_window_together_see_what_both_see() -> None:
    for chunk, window in ((64, 33), (33, 64), (128, 128), (7, 1)):
        check(WIDE_MIXED, FULL_OF_QUERY_BLOCKS, Options(window, chunk))


@pytest.mark.parametrize("window", [None, 33])
def test_scores_saturate_at_the_softcap(window: int | None) -> None:
    for softcap in (0.5, 3, 50):  # the first saturates nearly all scores, the last hardly any
        check(WIDE_MIXED, FULL_OF_QUERY_BLOCKS, Options(window, softcap=softcap))
        check(WIDE_DECODE, [(n, 1) for n in BORDERS[-8:]], Options(window, softcap=softcap))


def test_block_table_shorter_than_a_tile_is_read_in_full() -> None:
    for kv_len in (1, 8, 16, 17, 31, 32):
        check(SHORT_TABLE, [(kv_len, min(kv_len, 7)), (9, 1)], seed=kv_len)


@pytest.mark.parametrize("num_kv_heads", [8, 10, 11])
def test_any_number_of_kv_heads(num_kv_heads: int) -> None:
    # A lone query reads up to 8 at once: here all of them, half of them, and one by one.
    shape = Shape(8, 8, 1, head_dim=16, block_size=16, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, width=5)
    check(shape, [(n, 1) for n in (1, 16, 17, 63, 64, 65, 80)])
    check(shape, [(n, 1) for n in (1, 16, 17, 63, 64, 65, 80)], Options(window=20))


def test_bfloat16_is_close_to_dense_attention() -> None:
    shape = Shape(88, 8, 88, head_dim=64, block_size=16, num_heads=4, num_kv_heads=2, width=9, dtype="bfloat16")
    for seed in range(5):
        check(shape, [(1, 1), (16, 1), (0, 0), (65, 33), (144, 1), (129, 1)], seed=seed)


def test_large_scores_do_not_overflow() -> None:
    shape = SHORT_TABLE
    q = np.full((8, 2, 16), 300, np.float32)
    kv = np.full((3, 2, 16, 2, 16), 300, np.float32)
    kv[:, 1] = 7
    got = compiled(shape, ())(
        q,
        kv,
        {},
        block_tables=np.array([[1, 2]] + [[0, 0]] * 7, np.int32),
        query_start=np.array([0] + [8] * 8, np.int32),
        query_lens=np.array([8] + [0] * 7, np.int32),
        kv_lens=np.array([20] + [0] * 7, np.int32),
    )
    np.testing.assert_allclose(got, 7, rtol=1e-6)
