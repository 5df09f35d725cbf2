"""What a model of a card makes of attention's launches. Bounds are what an H200 should reach, until one was asked."""

import dataclasses

import pytest

from jaxpage.aot.attention_time import attention_seconds, decode_share, prefill_share
from jaxpage.aot.card import card_of
from jaxpage.aot.targets import TARGETS
from jaxpage.ops.attention.launch import GPU, AttentionShape, choose_launch

H200, CARD = GPU(132, 90), card_of(TARGETS["h200"])


def shape(num_tokens: int, num_rows: int, max_query_len: int, max_kv_len: int = 131072) -> AttentionShape:
    """Of Llama-3.1-8B."""
    return AttentionShape(num_tokens, num_rows, max_query_len, 32, 8, 128, 2, max_kv_len)


@pytest.mark.parametrize(
    ("num_rows", "kv_len", "least"),
    [(1, 8192, 0.6), (1, 131072, 0.75), (32, 1024, 0.7), (32, 8192, 0.85), (256, 1024, 0.85)],
)
def test_decode_comes_near_the_speed_of_memory(num_rows: int, kv_len: int, least: float) -> None:
    of_bucket = shape(max(num_rows, 4), max(num_rows, 4), 1)
    share = decode_share(kv_len, num_rows, of_bucket, choose_launch(of_bucket, H200), CARD)
    assert least <= share < 1


def test_prefill_reaches_half_of_what_products_do() -> None:
    of_bucket = shape(2048, 256, 2048)
    assert 0.45 <= prefill_share(2048, of_bucket, choose_launch(of_bucket, H200), CARD) < 1


def test_a_row_whose_kv_is_not_split_keeps_most_of_the_gpu_idle() -> None:
    of_bucket = shape(4, 4, 1)
    launch = choose_launch(of_bucket, H200)
    whole = dataclasses.replace(launch, spare_items=0)
    rows = [(8192, 1)]
    assert launch.spare_items > 0
    assert attention_seconds(rows, of_bucket, whole, CARD) > 5 * attention_seconds(rows, of_bucket, launch, CARD)


def test_longer_rows_and_more_of_them_take_longer() -> None:
    of_bucket = shape(32, 32, 1)
    launch = choose_launch(of_bucket, H200)
    seconds = [
        attention_seconds([(kv_len, 1)] * num_rows, of_bucket, launch, CARD)
        for kv_len, num_rows in ((64, 1), (1024, 1), (1024, 16), (8192, 16), (8192, 32))
    ]
    assert seconds == sorted(seconds)


def test_a_window_takes_no_longer_than_what_it_sees() -> None:
    of_bucket = dataclasses.replace(shape(32, 32, 1), span=1024)
    launch = choose_launch(of_bucket, H200)
    near, far = (attention_seconds([(kv_len, 1)] * 32, of_bucket, launch, CARD) for kv_len in (1088, 65536))
    assert far <= 1.1 * near
