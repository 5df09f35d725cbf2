"""The bucket table: every step that can happen has a shape, and a fitting one that wastes little."""

import pytest

from jaxpage.runner.buckets import Bucket, by_usefulness, choose_bucket, make_buckets

SIZES = [(1, 1), (1, 16), (1, 512), (2, 3), (4, 4), (5, 70), (8, 8), (9, 16), (20, 40), (64, 64), (64, 300)]
"""`max_num_seqs` and `max_num_batched_tokens`."""
each_size = pytest.mark.parametrize(("max_num_seqs", "max_num_batched_tokens"), SIZES)


def possible_steps(max_num_seqs: int, max_num_batched_tokens: int) -> list[tuple[int, int, int]]:
    """(tokens, rows, longest query) of every step there can be, but for longest queries between the extremes."""
    return [
        (num_tokens, num_rows, longest)
        for num_tokens in range(1, max_num_batched_tokens + 1)
        for num_rows in range(1, min(max_num_seqs, num_tokens) + 1)
        for longest in sorted({-(-num_tokens // num_rows), num_tokens - num_rows + 1})
    ]


@each_size
def test_every_possible_step_fits_some_bucket(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    for step in possible_steps(max_num_seqs, max_num_batched_tokens):
        chosen = choose_bucket(buckets, *step)
        assert (chosen.num_tokens, chosen.num_rows, chosen.max_query_len) >= (1, 1, 1)
        assert chosen.num_tokens >= step[0]
        assert chosen.num_rows >= step[1]
        assert chosen.max_query_len >= step[2]


@each_size
def test_the_first_bucket_serves_every_step_of_its_own_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    order = by_usefulness(buckets)
    assert sorted(order) == buckets
    first = order[0]
    assert first.num_tokens >= max_num_seqs
    for step in possible_steps(max_num_seqs, first.num_tokens):
        assert choose_bucket([first], *step) == first


@each_size
def test_behind_it_comes_what_all_decoding_can_run_in(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    order = by_usefulness(make_buckets(max_num_seqs, max_num_batched_tokens))
    for num_rows in range(1, max_num_seqs + 1):
        assert choose_bucket(order[:2], num_rows, num_rows, 1).num_tokens == max_num_seqs


@each_size
def test_a_larger_step_never_gets_a_cheaper_bucket(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    top = max_num_batched_tokens
    for num_tokens in range(1, top):
        num_rows = min(max_num_seqs, num_tokens)
        chosen = choose_bucket(buckets, num_tokens, num_rows, 1 if num_rows == num_tokens else num_tokens)
        assert chosen <= choose_bucket(buckets, num_tokens + 1, num_rows, num_tokens)
        assert choose_bucket(buckets, num_tokens, 1, num_tokens) <= choose_bucket(
            buckets, num_tokens, num_rows, num_tokens
        )


@each_size
def test_a_pure_decode_gets_a_bucket_of_one_token_a_row(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    for num_rows in range(1, max_num_seqs + 1):
        chosen = choose_bucket(buckets, num_rows, num_rows, 1)
        assert chosen.max_query_len == 1
        assert chosen.num_tokens == chosen.num_rows
        assert chosen.num_rows <= max(4, 2 * num_rows)


@each_size
def test_a_step_with_a_prompt_is_padded_to_four_times_its_tokens_at_most(
    max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    for num_tokens in range(2, max_num_batched_tokens + 1):
        assert choose_bucket(buckets, num_tokens, 1, num_tokens).num_tokens <= max(4 * 32, 4 * num_tokens + 3)


@each_size
def test_the_table_is_sorted_and_within_the_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    buckets = make_buckets(max_num_seqs, max_num_batched_tokens)
    assert buckets == sorted(set(buckets))
    assert max(bucket.num_rows for bucket in buckets) == max_num_seqs
    assert max(bucket.num_tokens for bucket in buckets) == max_num_batched_tokens
    assert all(bucket.num_rows <= bucket.num_tokens for bucket in buckets)


def test_the_table_of_the_defaults_is_short() -> None:
    assert len(make_buckets(64, 512)) <= 10


def test_the_bucket_of_a_lone_short_prompt_has_few_rows() -> None:
    buckets = make_buckets(64, 512)
    assert choose_bucket(buckets, 10, 1, 10) == Bucket(32, 8, 32)
    assert choose_bucket(buckets, 30, 8, 23) == Bucket(32, 8, 32)
    assert choose_bucket(buckets, 30, 9, 22).num_rows == 64


def test_the_cheapest_of_the_buckets_that_are_ready_is_chosen() -> None:
    ready = [Bucket(512, 64, 512), Bucket(64, 64, 1), Bucket(64, 8, 64)]
    assert choose_bucket(ready, 3, 3, 1) == Bucket(64, 8, 64)
    assert choose_bucket(ready, 9, 9, 1) == Bucket(64, 64, 1)
    assert choose_bucket(ready, 65, 1, 65) == Bucket(512, 64, 512)


def test_fitting_is_up_to_the_edge_in_each_direction() -> None:
    bucket = Bucket(16, 8, 4)
    assert bucket.fits(16, 8, 4)
    assert not bucket.fits(17, 8, 4)
    assert not bucket.fits(16, 9, 4)
    assert not bucket.fits(16, 8, 5)


def test_a_step_that_fits_nowhere_is_an_error_that_gives_its_size() -> None:
    with pytest.raises(AssertionError, match="no bucket for 513 tokens, 1 rows, queries of 513"):
        choose_bucket(make_buckets(64, 512), 513, 1, 513)
