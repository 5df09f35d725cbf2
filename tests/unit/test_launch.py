"""How the attention kernel is cut into programs."""

import dataclasses

import pytest

from jaxpage.ops.attention.launch import GPU, AttentionShape, choose_launch, choose_launches

H200 = GPU(num_sms=132, compute_capability=90)
DECODE = AttentionShape(
    num_tokens=1,
    num_rows=1,
    max_query_len=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    kv_itemsize=2,
    max_kv_len=8192,
)
PREFILL = dataclasses.replace(DECODE, num_tokens=2048, num_rows=64, max_query_len=2048)


def decode(num_rows: int, **changes: int) -> AttentionShape:
    return dataclasses.replace(DECODE, num_tokens=num_rows, num_rows=num_rows, **changes)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16])
def test_a_small_decode_splits_its_kv_until_the_gpu_is_full(num_rows: int) -> None:
    launch = choose_launch(decode(num_rows), H200)
    assert 3 * 132 <= launch.spare_items * 8 < 4 * 132
    fewer = choose_launch(decode(num_rows), GPU(num_sms=16, compute_capability=90))
    assert 0 < fewer.spare_items < launch.spare_items


def test_a_device_with_fewer_heads_splits_each_of_them_more() -> None:
    of_eight = dataclasses.replace(decode(8), num_heads=4, num_kv_heads=1)
    assert choose_launch(of_eight, H200).spare_items == 8 * 132 * 3 // 8


def test_a_long_prompt_is_not_split() -> None:
    launch = choose_launch(PREFILL, H200)
    assert launch.spare_items == 0
    assert launch.block_m == 128
    assert launch.full_tile > launch.tile


def test_what_decodes_beside_a_long_prompt_has_a_launch_of_its_own_and_is_split() -> None:
    few, other = choose_launches(PREFILL, H200)
    assert few is not None
    assert few.spare_items > 0
    assert (few.block_m, few.block_q) == (16, 4)
    assert other == choose_launch(PREFILL, H200)


@pytest.mark.parametrize("shape", [decode(8), dataclasses.replace(PREFILL, num_tokens=32, num_rows=8)])
def test_one_launch_is_enough_where_all_rows_are_split(shape: AttentionShape) -> None:
    few, other = choose_launches(shape, H200)
    assert few is None
    assert other.spare_items > 0


def test_short_rows_are_split_only_while_the_gpu_is_idle() -> None:
    assert choose_launch(decode(1, max_kv_len=128), H200).spare_items == 0
    assert choose_launch(decode(1, max_kv_len=1024), H200).spare_items > 0
    assert choose_launch(decode(64, max_kv_len=1024), H200).spare_items == 0


def test_what_a_window_hides_is_not_split() -> None:
    assert choose_launch(decode(1, span=128), H200).spare_items == 0
    assert choose_launch(decode(1, span=4096), H200).spare_items > 0


@pytest.mark.parametrize("max_query_len", range(2, 9))
def test_drafts_of_a_few_tokens_are_split_as_lone_queries_are(max_query_len: int) -> None:
    shape = decode(4, max_query_len=max_query_len)
    shape = dataclasses.replace(shape, num_tokens=4 * max_query_len)
    launch = choose_launch(shape, H200)
    assert launch.spare_items > 0
    assert launch.block_q == max_query_len


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (32, 8), (64, 8), (9, 3), (71, 1), (28, 4), (128, 1)])
@pytest.mark.parametrize("max_query_len", [1, 3, 8, 2048])
def test_a_block_holds_whole_groups_of_heads(num_heads: int, num_kv_heads: int, max_query_len: int) -> None:
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "max_query_len": max_query_len}
    launch = choose_launch(dataclasses.replace(PREFILL, **heads), H200)
    group = num_heads // num_kv_heads
    assert 1 <= launch.block_q <= max_query_len
    assert launch.block_q * group <= launch.block_m
    assert launch.block_m & (launch.block_m - 1) == 0
    assert launch.block_m >= 16


def test_the_heads_of_a_group_count_and_not_all_heads() -> None:
    """With as many KV heads as heads, a block of 16 rows is a block of 16 queries."""
    many_groups = dataclasses.replace(PREFILL, num_heads=32, num_kv_heads=32, max_query_len=8)
    assert choose_launch(many_groups, H200).block_m == 16


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kv_itemsize", [1, 2, 4])
def test_tiles_in_flight_fit_the_shared_memory_of_an_a100(head_dim: int, kv_itemsize: int) -> None:
    shape = dataclasses.replace(PREFILL, head_dim=head_dim, kv_itemsize=kv_itemsize)
    launch = choose_launch(shape, GPU(num_sms=108, compute_capability=80))
    padded = 1 << (head_dim - 1).bit_length()
    tile = max(launch.tile, launch.full_tile)
    assert 2 * (launch.num_stages - 1) * tile * padded * kv_itemsize <= 160 * 1024
    assert launch.tile >= 16
