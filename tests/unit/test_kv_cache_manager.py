"""Block tables: they cover what was asked, begin with what is found, and give up what is not seen."""

import pytest
from kv_caches import CHUNK, FULL, HALF, WINDOW, begin, compute, grow, keys_of, kv_cache, lose

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID
from jaxpage.kv_cache.manager import PrefixHit
from jaxpage.ops.state_spec import KVSpec

# Growing.


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3), (160, 10)])
def test_a_table_covers_its_tokens_in_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    manager = kv_cache(10, block_size=16)
    begin(manager, "a")
    assert grow(manager, "a", 0, num_tokens) == {0: list(range(1, num_blocks + 1))}
    assert manager.tables("a") == [list(range(1, num_blocks + 1))]


def test_growing_returns_only_what_it_adds_and_where() -> None:
    manager = kv_cache(10)
    begin(manager, "a")
    begin(manager, "b")
    grow(manager, "a", 0, 5)
    grow(manager, "b", 0, 4)
    assert manager.grow("a", 5, 8) == ()
    (added,) = manager.grow("a", 8, 13) or ()
    assert (added.group, added.first_index, added.block_ids) == (0, 2, [4, 5])
    assert manager.tables("a") == [[1, 2, 4, 5]]


def test_asking_for_fewer_tokens_than_covered_keeps_the_table() -> None:
    manager = kv_cache(10)
    begin(manager, "a")
    grow(manager, "a", 0, 12)
    assert grow(manager, "a", 0, 1) == {}
    assert manager.tables("a") == [[1, 2, 3]]


def test_tables_of_different_requests_share_no_block() -> None:
    manager = kv_cache(10)
    begin(manager, "a")
    begin(manager, "b")
    for num_tokens in range(1, 18):
        grow(manager, "a", num_tokens - 1, num_tokens)
        grow(manager, "b", num_tokens - 1, num_tokens)
    assert not set(manager.tables("a")[0]) & set(manager.tables("b")[0])
    assert manager.pool.num_free == 0


def test_growing_beyond_the_pool_adds_nothing() -> None:
    manager = kv_cache(4)
    begin(manager, "a")
    begin(manager, "b")
    grow(manager, "a", 0, 8)
    assert manager.grow("a", 8, 17) is None
    assert manager.grow("b", 0, 9) is None
    assert (manager.tables("a"), manager.tables("b"), manager.pool.num_free) == ([[1, 2]], [[]], 2)
    manager.check_integrity()
    assert grow(manager, "b", 0, 8) == {0: [3, 4]}


def test_groups_grow_together_or_not_at_all() -> None:
    manager = kv_cache(5, FULL, WINDOW)
    begin(manager, "a")
    assert grow(manager, "a", 0, 8) == {0: [1, 2], 1: [3, 4]}
    assert manager.grow("a", 8, 9) is None
    assert manager.tables("a")[0] == [1, 2]
    manager.check_integrity()


def test_larger_blocks_are_added_less_often() -> None:
    manager = kv_cache(20, FULL, HALF)
    begin(manager, "a")
    assert grow(manager, "a", 0, 4) == {0: [1], 1: [2]}
    assert grow(manager, "a", 4, 8) == {0: [3]}
    assert grow(manager, "a", 8, 9) == {0: [4], 1: [5]}


@pytest.mark.parametrize("max_step_tokens", [1, 3, 4, 7, 16])
@pytest.mark.parametrize("spec", [FULL, WINDOW, CHUNK, KVSpec(1, 8, window=1), KVSpec(1, 8, window=4)])
def test_no_sequence_ever_holds_more_blocks_than_are_counted_for_it(spec: KVSpec, max_step_tokens: int) -> None:
    for first in range(1, max_step_tokens + 1):
        manager = kv_cache(50, spec, max_step_tokens=max_step_tokens)
        begin(manager, "a")
        num_computed, num_new = 0, first
        while num_computed < 60:
            grow(manager, "a", num_computed, num_computed + num_new)
            num_computed += num_new
            held = manager.pool.num_usable - manager.pool.num_free
            assert held <= manager.num_blocks_for(num_computed)
            num_new = max_step_tokens


# Giving up.


def test_a_window_gives_up_the_blocks_behind_it_and_full_attention_none() -> None:
    manager = kv_cache(20, FULL, WINDOW)
    begin(manager, "a")
    for num_tokens in range(1, 17):
        grow(manager, "a", num_tokens - 1, num_tokens)
    # The next query, at 16, sees 11 to 16: blocks 2 and 3. Blocks are given up only when one is needed.
    grow(manager, "a", 16, 17)
    full, window = manager.tables("a")
    assert NULL_BLOCK_ID not in full
    assert [block_id == NULL_BLOCK_ID for block_id in window] == [True, True, False, False, False]


def test_what_a_window_gives_up_serves_its_own_growth() -> None:
    manager = kv_cache(3, WINDOW, max_step_tokens=1)
    begin(manager, "a")
    for num_tokens in range(1, 200):
        assert grow(manager, "a", num_tokens - 1, num_tokens).keys() <= {0}


def test_a_chunk_gives_up_the_chunks_before_it() -> None:
    manager = kv_cache(20, CHUNK)
    begin(manager, "a")
    grow(manager, "a", 0, 12)
    grow(manager, "a", 12, 13)
    assert [block_id == NULL_BLOCK_ID for block_id in manager.tables("a")[0]] == [True, True, True, False]


def test_a_block_that_is_given_up_can_still_be_found() -> None:
    manager = kv_cache(20, WINDOW)
    tokens = list(range(30))
    begin(manager, "a")
    for num_tokens in range(1, 31):
        grow(manager, "a", num_tokens - 1, num_tokens)
        manager.publish("a", keys_of(manager, tokens), num_tokens)
    assert manager.match(keys_of(manager, tokens[:9]), 9).num_tokens == 8
    assert manager.match(keys_of(manager, tokens), 30).num_tokens == 28


# What fits.


def test_only_free_blocks_count_for_what_can_fit() -> None:
    manager = kv_cache(4)
    assert manager.can_fit(16)
    assert not manager.can_fit(17)
    begin(manager, "a")
    grow(manager, "a", 0, 5)
    assert manager.can_fit(8)
    assert not manager.can_fit(9)
    manager.free("a")
    assert manager.can_fit(16)


def test_what_can_fit_can_be_grown() -> None:
    for held in range(1, 17):
        for wanted in range(1, 18):
            manager = kv_cache(4)
            begin(manager, "a")
            begin(manager, "b")
            grow(manager, "a", 0, held)
            assert manager.can_fit(wanted) == (manager.grow("b", 0, wanted) is not None)


def test_found_blocks_cost_nothing_when_they_are_held_and_one_each_when_they_are_free() -> None:
    manager = kv_cache(4)
    tokens = list(range(10))
    compute(manager, "a", tokens)
    hit = manager.match(keys_of(manager, tokens), 10)
    assert hit.num_tokens == 8
    assert manager.can_fit(10, hit)
    assert not manager.can_fit(13, hit)
    assert not manager.can_fit(10)
    manager.free("a")
    assert manager.can_fit(16, hit)
    assert not manager.can_fit(17, hit)


def test_the_longest_possible_request_leaves_the_null_block_alone() -> None:
    manager = kv_cache(10, block_size=16)
    assert manager.num_blocks_for(160) == 10
    begin(manager, "a")
    assert NULL_BLOCK_ID not in grow(manager, "a", 0, 160)[0]


# Finding.


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(1, 0), (3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)]
)
def test_a_hit_is_of_whole_blocks_and_leaves_the_last_token(num_tokens: int, num_hit: int) -> None:
    manager = kv_cache(20)
    tokens = list(range(30))
    compute(manager, "a", tokens[:14])
    hit = manager.match(keys_of(manager, tokens[:num_tokens]), num_tokens)
    assert hit == PrefixHit(num_hit, [manager.tables("a")[0][: num_hit // 4]])


def test_only_what_is_computed_can_be_found() -> None:
    manager = kv_cache(20)
    tokens = list(range(20))
    begin(manager, "a")
    grow(manager, "a", 0, 20)
    manager.publish("a", keys_of(manager, tokens), 11)
    assert manager.match(keys_of(manager, tokens), 20).num_tokens == 8
    manager.publish("a", keys_of(manager, tokens), 12)
    assert manager.match(keys_of(manager, tokens), 20).num_tokens == 12


def test_a_hit_ends_where_the_prompts_part() -> None:
    manager = kv_cache(20)
    tokens = list(range(20))
    compute(manager, "a", tokens)
    other = [*tokens[:9], 99, *tokens[10:]]
    assert manager.match(keys_of(manager, other), 20).num_tokens == 8


def test_a_hit_shrinks_when_its_tail_is_evicted() -> None:
    manager = kv_cache(6)
    tokens = list(range(16))
    compute(manager, "a", tokens)
    manager.free("a")
    begin(manager, "b")
    grow(manager, "b", 0, 4)
    assert manager.match(keys_of(manager, tokens), 16).num_tokens == 12
    grow(manager, "b", 4, 12)
    assert manager.match(keys_of(manager, tokens), 16).num_tokens == 12
    grow(manager, "b", 12, 16)
    assert manager.match(keys_of(manager, tokens), 16).num_tokens == 8


def test_nothing_is_found_or_published_without_prefix_caching() -> None:
    manager = kv_cache(20, caching=False)
    tokens = list(range(20))
    compute(manager, "a", tokens)
    assert manager.match(keys_of(manager, tokens), 20) == PrefixHit(0, [[]])
    assert manager.pool.num_cached == 0


def test_an_admitted_hit_is_held_by_both() -> None:
    manager = kv_cache(20)
    tokens = list(range(14))
    compute(manager, "a", tokens)
    begin(manager, "b", tokens)
    assert manager.tables("b")[0] == manager.tables("a")[0][:3]
    assert [manager.pool.ref_counts[block_id] for block_id in manager.tables("a")[0]] == [2, 2, 2, 1]
    manager.free("a")
    manager.check_integrity()
    assert manager.tables("b") == [[1, 2, 3]]


def test_a_window_needs_only_the_blocks_that_the_next_query_sees() -> None:
    manager = kv_cache(30, WINDOW, max_step_tokens=4)
    tokens = list(range(24))
    compute(manager, "a", tokens)
    hit = manager.match(keys_of(manager, tokens), 24)
    # The query at 20 sees 15 to 20: blocks 3 and 4 of what is found.
    assert (hit.num_tokens, hit.tables[0][:3]) == (20, [NULL_BLOCK_ID] * 3)
    assert hit.tables[0][3:] == manager.tables("a")[0][3:5]


def test_a_window_finds_a_shorter_prefix_when_a_block_that_it_would_see_is_gone() -> None:
    manager = kv_cache(30, WINDOW)
    tokens = list(range(24))
    compute(manager, "a", tokens)
    lose(manager, manager.tables("a")[0][3])
    # What ends after block 3 would see it: a prefix of 12 tokens needs blocks 1 and 2.
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 12


def test_a_chunk_that_begins_anew_needs_nothing_of_what_came_before() -> None:
    manager = kv_cache(30, KVSpec(1, 8, chunk=8))
    tokens = list(range(17))
    assert manager.match(keys_of(manager, tokens), 17) == PrefixHit(16, [[NULL_BLOCK_ID] * 4])
    assert manager.match(keys_of(manager, tokens[:16]), 16) == PrefixHit(8, [[NULL_BLOCK_ID] * 2])


def test_all_groups_must_agree_on_a_hit() -> None:
    manager = kv_cache(30, FULL, WINDOW)
    tokens = list(range(24))
    compute(manager, "a", tokens)
    full, window = manager.tables("a")
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 20
    lose(manager, window[4])
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 16
    lose(manager, full[2])
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 8
    lose(manager, window[1])
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 4


def test_blocks_of_longer_prefixes_are_evicted_first_whatever_their_group() -> None:
    manager = kv_cache(20, FULL, WINDOW, HALF)
    compute(manager, "a", list(range(16)))
    full, half, window = manager.tables("a")
    manager.free("a")
    evicted = manager.pool.free_list()[-10:]
    assert [set(evicted[:2]), set(evicted[2:5]), set(evicted[5:7]), set(evicted[7:])] == [
        {full[3], window[3]},
        {full[2], window[2], half[1]},
        {full[1], window[1]},
        {full[0], window[0], half[0]},
    ]


def test_a_hit_is_of_whole_blocks_of_the_largest_size() -> None:
    manager = kv_cache(30, FULL, HALF)
    tokens = list(range(30))
    compute(manager, "a", tokens)
    assert [manager.match(keys_of(manager, tokens[:n]), n).num_tokens for n in (8, 9, 13, 16, 17)] == [0, 8, 8, 8, 16]
    hit = manager.match(keys_of(manager, tokens), 30)
    assert hit == PrefixHit(24, [manager.tables("a")[0][:6], manager.tables("a")[1][:3]])


def test_prompts_that_part_within_a_large_block_are_both_found() -> None:
    manager = kv_cache(30, FULL, HALF)
    prompts = [[1, 2, 3, 4, *range(start, start + 5)] for start in (10, 20)]
    for request_id, prompt in zip("ab", prompts, strict=True):
        compute(manager, request_id, prompt)
    assert [manager.match(keys_of(manager, prompt), 9).num_tokens for prompt in prompts] == [8, 8]


def test_groups_that_agree_one_by_one_must_agree_on_the_same_prefix() -> None:
    manager = kv_cache(40, FULL, WINDOW, WINDOW)
    tokens = list(range(24))
    compute(manager, "a", tokens)
    _, first, second = manager.tables("a")
    lose(manager, second[4])  # allows 16 at most, where the first window needs its blocks 2 and 3
    lose(manager, first[2])
    assert manager.match(keys_of(manager, tokens), 24).num_tokens == 8


def test_groups_do_not_find_each_others_blocks() -> None:
    manager = kv_cache(30, FULL, KVSpec(1, 8, window=100))
    tokens = list(range(9))
    compute(manager, "a", tokens)
    hit = manager.match(keys_of(manager, tokens), 9)
    assert hit.tables == [table[:2] for table in manager.tables("a")]
    assert not set(hit.tables[0]) & set(hit.tables[1])


# Giving back.


def test_freeing_gives_all_blocks_back_and_forgets_the_table() -> None:
    manager = kv_cache(7, block_size=2)
    compute(manager, "a", [1, 2, 3, 4, 5])
    compute(manager, "b", [6, 7, 8])
    manager.free("a")
    assert (manager.tables("a"), manager.pool.num_free) == ([[]], 5)
    manager.check_integrity()
    manager.free("b")
    assert manager.pool.usage == 0
    manager.check_integrity()


def test_an_unknown_request_has_empty_tables_and_nothing_to_free() -> None:
    manager = kv_cache(3, FULL, WINDOW)
    assert manager.tables("nobody") == [[], []]
    manager.free("nobody")
    assert manager.pool.num_free == 3


def test_freeing_twice_is_harmless() -> None:
    manager = kv_cache(3, block_size=2)
    compute(manager, "a", [1, 2, 3, 4])
    manager.free("a")
    manager.free("a")
    manager.check_integrity()
    assert manager.pool.num_free == 3


def test_resetting_the_prefix_cache_waits_for_the_last_holder() -> None:
    manager = kv_cache(8)
    tokens = list(range(8))
    compute(manager, "a", tokens)
    assert not manager.reset_prefix_cache()
    manager.free("a")
    assert manager.match(keys_of(manager, tokens), 8).num_tokens == 4
    assert manager.reset_prefix_cache()
    assert manager.match(keys_of(manager, tokens), 8).num_tokens == 0


def test_the_integrity_check_notices_a_block_that_no_table_holds() -> None:
    manager = kv_cache(3)
    compute(manager, "a", [1])
    manager.pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts differ"):
        manager.check_integrity()
