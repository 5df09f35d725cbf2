"""The attention kernel in Triton's interpreter against dense attention in float64, over ragged batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreter import interpret
from ragged import Attention, Batch, Row, make_batch

from jaxpage.ops.attention import paged_triton
from jaxpage.ops.attention.launch import GPU, AttentionLaunch, AttentionShape
from jaxpage.ops.attention.paged_triton import paged_attention_triton
from jaxpage.ops.attention.paged_xla import paged_attention_xla
from jaxpage.ops.attention.work_list import list_work

H200 = GPU(num_sms=132, compute_capability=90)
BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)
SETTINGS = settings(derandomize=True, deadline=None, database=None, max_examples=25)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_triton, "triton_call", interpret)


def launch(
    tile: int = 16, spare_items: int = 0, block_q: int = 1, block_m: int = 16, full_tile: int = 0
) -> AttentionLaunch:
    return AttentionLaunch(block_q, block_m, tile, full_tile, spare_items, num_warps=4, num_stages=1)


def check(batch: Batch, launch: AttentionLaunch | None, tolerance: float = 1e-5, **options: Any) -> None:
    """Every number is compared; whatever the kernel does not write is NaN."""
    got = paged_attention_triton(*batch.args, **batch.options, **options, gpu=H200, launch=launch)
    assert got.dtype == batch.args[0].dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), batch.expected, atol=tolerance, rtol=tolerance)


def check_decode(attention: Attention, kv_lens: Sequence[int], launch: AttentionLaunch, block_size: int = 16) -> None:
    """A step with one query in each row, and an idle row between them."""
    rows = [(kv_len, 1) for kv_len in kv_lens]
    check(make_batch(attention, [*rows[:1], (0, 0), *rows[1:]], block_size=block_size, decode=True), launch)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    """Every kind of layer, in shapes that pad heads or head_dim and in ones that do not."""
    lengths = st.sampled_from(BORDERS) | st.integers(1, 80)
    return Attention(
        num_kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from([1, 2, 3, 7, 8])),
        head_dim=draw(st.sampled_from([16, 24, 64, 80])),
        window=draw(st.none() | lengths),
        chunk=draw(st.none() | st.none() | lengths),
        softcap=draw(st.none() | st.sampled_from([0.5, 3.0, 50.0])),
        has_sinks=draw(st.booleans()),
    )


KV_LENS = st.sampled_from(BORDERS) | st.integers(1, 100)


@st.composite
def mixed_rows(draw: st.DrawFn) -> list[Row]:
    """Queries of 1 to 9 beside prefills and idle rows."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        kv_len = draw(KV_LENS)
        longest = min(kv_len, 40)
        rows.append((kv_len, min(draw(st.sampled_from([0, longest, 17]) | st.integers(1, 9)), longest)))
    return rows


@SETTINGS
@given(
    attention=attentions(),
    rows=st.lists(st.tuples(KV_LENS, st.sampled_from([1, 1, 1, 0])), min_size=1, max_size=4),
    block_size=st.sampled_from([16, 32, 64]),
    tile=st.sampled_from([16, 32]),
    spare_items=st.sampled_from([0, 2, 9]),
    seed=st.integers(0, 2**16),
)
@example(Attention(), [(100, 0)], 16, 16, 0, 0)
@example(Attention(has_sinks=True), [(33, 0), (0, 0)], 16, 16, 9, 0)
def test_decode_equals_dense_attention(
    attention: Attention, rows: list[Row], block_size: int, tile: int, spare_items: int, seed: int
) -> None:
    batch = make_batch(attention, rows, block_size=block_size, decode=True, seed=seed)
    check(batch, launch(tile, spare_items))


@SETTINGS
@given(
    attention=attentions(),
    rows=mixed_rows(),
    block_size=st.sampled_from([16, 32, 64]),
    tile=st.sampled_from([16, 32]),
    spare_items=st.sampled_from([0, 0, 9]),
    padding=st.sampled_from([0, 1, 20]),
    seed=st.integers(0, 2**16),
)
@example(Attention(), [(40, 0)], 16, 16, 0, 0, 0)
@example(Attention(), [(0, 0), (0, 0)], 16, 16, 0, 20, 0)  # as every program runs before an engine on a GPU serves
@example(Attention(has_sinks=True), [(40, 0), (20, 20), (5, 0)], 16, 16, 9, 7, 0)
def test_mixed_steps_equal_dense_attention(
    attention: Attention,
    rows: list[Row],
    block_size: int,
    tile: int,
    spare_items: int,
    padding: int,
    seed: int,
) -> None:
    batch = make_batch(attention, rows, block_size=block_size, padding=padding, seed=seed)
    check(batch, launch(tile, spare_items, block_q=16 // attention.group))


@pytest.mark.parametrize("options", [{}, {"window": 37}, {"chunk": 48}, {"has_sinks": True, "softcap": 3.0}])
def test_tiles_that_all_queries_see_are_walked_without_masks(options: dict[str, Any]) -> None:
    """Blocks begin and end before, at and behind the borders of both sizes of tiles."""
    rows = [(96, 33), (64, 64), (129, 16), (0, 0), (63, 15), (65, 1)]
    for full_tile in (16, 32):
        check(make_batch(Attention(**options), rows), launch(block_q=8, full_tile=full_tile))


@pytest.mark.parametrize("options", [{}, {"window": 37}, {"chunk": 48}, {"has_sinks": True}])
def test_rows_of_few_queries_are_split_beside_long_ones(options: dict[str, Any]) -> None:
    """Only the long ones have a launch that is not split, which writes zeros where padding is."""
    batch = make_batch(Attention(**options), [(200, 1), (64, 40), (0, 0), (130, 4), (17, 17), (33, 5), (9, 1)])
    num_rows, width = batch.options["block_tables"].shape
    shape = AttentionShape(len(batch.args[0]), num_rows, batch.options["max_query_len"], 2, 1, 16, 4, 16 * width)
    launches = launch(spare_items=12, block_q=4), launch(block_q=8, full_tile=32)
    names = ("query_start", "query_lens", "kv_lens")
    spans = {name: batch.options[name] for name in ("window", "chunk")}
    lengths = [jnp.asarray(batch.options[name]) for name in names]
    work = list_work(*lengths, shape=shape, gpu=H200, launches=launches, **spans)
    assert work[0].parts is not None
    assert int(work[0].parts[:, 2].max()) > 2
    check(batch, None, work=work)


@pytest.mark.parametrize("spare_items", [0, 9])
def test_a_window_hides_exactly_the_position_before_it(spare_items: int) -> None:
    """Its first position moves across every border of tiles and blocks, of both sizes."""
    for window in (1, 2, 15, 16, 17, 31, 32, 33, 64):
        kv_lens = (window, window + 1, window + 15, window + 16, window + 17)
        check_decode(Attention(window=window, head_dim=8), kv_lens, launch(32, spare_items))


@pytest.mark.parametrize("num_queries", range(1, 10))
def test_short_queries_see_their_own_past_beside_a_prefill(num_queries: int) -> None:
    rows = [(num_queries, num_queries), (33, num_queries), (20, 17)]
    check(make_batch(Attention(), rows), launch(block_q=8))
    check(make_batch(Attention(window=5), rows), launch(block_q=2, spare_items=3))
    check(make_batch(Attention(chunk=6), rows), launch(block_q=8, spare_items=9))


@pytest.mark.parametrize("spare_items", [0, 40])
@pytest.mark.parametrize("window", [None, 1000])
def test_long_rows_equal_dense_attention(spare_items: int, window: int | None) -> None:
    attention = Attention(head_dim=64, group=4, window=window, has_sinks=True)
    rows = [(4000, 1), (2049, 1), (1, 1), (0, 0)]
    check(make_batch(attention, rows, block_size=32, decode=True), launch(128, spare_items))
    check(make_batch(attention, [(3999, 5), (1025, 3)], block_size=32), launch(128, spare_items, block_q=4))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_half_precision_is_close_to_dense_attention(dtype: Any, tolerance: float, head_dim: int) -> None:
    attention = Attention(num_kv_heads=2, group=4, head_dim=head_dim, scale=head_dim**-0.5)
    check(make_batch(attention, [(65, 1), (40, 33), (12, 5)], dtype=dtype), launch(block_q=4), tolerance)
    check(make_batch(attention, [(65, 1), (9, 1)], dtype=dtype, decode=True), launch(spare_items=3), tolerance)


@pytest.mark.parametrize("kv_dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_eight_bit_keys_and_values_are_scaled_by_head(kv_dtype: Any, dtype: Any) -> None:
    kv_scales = np.array([[0.5, 2.0], [3.0, 0.25]], np.float32)
    attention = Attention(num_kv_heads=2, softcap=5.0)
    tolerance = 1e-5 if dtype == np.float32 else 2e-2
    for spare_items in (0, 3):
        options: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_scales": kv_scales}
        batch = make_batch(attention, [(33, 3), (40, 20)], **options)
        check(batch, launch(spare_items=spare_items, block_q=8), tolerance, kv_scales=kv_scales)


def test_large_scores_do_not_overflow() -> None:
    batch = make_batch(Attention(scale=300.0), [(50, 1), (70, 1)], decode=True)
    for spare_items in (0, 6):
        check(batch, launch(spare_items=spare_items), tolerance=2e-3)


@pytest.mark.parametrize("decode", [True, False])
def test_the_launch_chosen_for_a_shape_gives_the_same(decode: bool) -> None:
    rows = [(300, 1), (0, 0), (17, 1)] if decode else [(300, 4), (70, 70), (0, 0), (17, 1)]
    for attention in (Attention(num_kv_heads=2, group=4, head_dim=64), Attention(group=6, head_dim=80, window=40)):
        check(make_batch(attention, rows, decode=decode), None)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize("decode", [True, False])
def test_both_implementations_fulfil_one_contract(decode: bool) -> None:
    rows = [(90, 1), (0, 0), (17, 1)] if decode else [(90, 4), (30, 30), (0, 0), (17, 1)]
    for attention in (
        Attention(num_kv_heads=2, window=20, has_sinks=True),
        Attention(group=3, chunk=32, softcap=3.0, has_sinks=True),
    ):
        batch = make_batch(attention, rows, decode=decode)
        options = {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in batch.options.items()}
        got = jax.jit(partial(paged_attention_xla, **options))(*batch.args)
        np.testing.assert_allclose(np.asarray(got), batch.expected, atol=1e-5)
        check(batch, launch(spare_items=3, block_q=1 if decode else 4))
