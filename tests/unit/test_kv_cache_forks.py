"""Forks and beams: full blocks are shared, and only a last block that is not full is copied."""

from kv_caches import FULL, WINDOW, compute, grow, keys_of, kv_cache

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID
from jaxpage.kv_cache.manager import KVCacheManager, PrefixHit

# Forks.


def test_a_fork_shares_full_blocks_and_copies_the_partial_last_one() -> None:
    manager = kv_cache(20)
    compute(manager, "a", list(range(10)))
    assert manager.fork("a", "b", 9) == [(3, 4)]
    assert manager.tables("b") == [[1, 2, 4]]
    assert [manager.pool.ref_counts[block_id] for block_id in (1, 2, 3, 4)] == [2, 2, 1, 1]
    manager.check_integrity()
    assert grow(manager, "b", 9, 13) == {0: [5]}
    manager.free("a")
    manager.check_integrity()
    manager.free("b")
    assert manager.pool.usage == 0


def test_what_a_fork_fills_can_be_found() -> None:
    manager = kv_cache(20)
    tokens = list(range(10))
    compute(manager, "a", tokens)
    assert manager.fork("a", "b", 9) is not None
    forked = [*tokens[:9], 77, 78, 79, 80]
    grow(manager, "b", 9, 12)
    manager.publish("b", keys_of(manager, forked), 12)
    assert manager.match(keys_of(manager, forked), 13) == PrefixHit(12, manager.tables("b"))


def test_a_fork_at_a_block_boundary_copies_nothing() -> None:
    manager = kv_cache(20)
    compute(manager, "a", list(range(10)))
    assert manager.fork("a", "b", 8) == []
    assert manager.tables("b") == [[1, 2]]
    assert grow(manager, "b", 8, 9) == {0: [4]}


def test_a_fork_of_all_groups_leaves_out_what_it_would_not_see() -> None:
    manager = kv_cache(30, FULL, WINDOW)
    compute(manager, "a", list(range(14)))
    full, window = manager.tables("a")
    copies = manager.fork("a", "b", 13)
    assert copies is not None
    assert sorted(source for source, _ in copies) == sorted([full[3], window[3]])
    forked_full, forked_window = manager.tables("b")
    assert forked_full[:3] == full[:3]
    assert forked_window[:3] == [NULL_BLOCK_ID, NULL_BLOCK_ID, window[2]]  # the query at 13 sees 8 to 13
    assert {(full[3], forked_full[3]), (window[3], forked_window[3])} == set(copies)
    manager.check_integrity()


def test_nothing_is_forked_from_a_window_that_has_moved_on() -> None:
    manager = kv_cache(30, WINDOW, max_step_tokens=4)
    compute(manager, "a", list(range(10)))
    for num_tokens in range(11, 18):
        grow(manager, "a", num_tokens - 1, num_tokens)
    assert manager.fork("a", "b", 9) is None
    assert manager.tables("b") == [[]]
    manager.check_integrity()


def test_nothing_is_forked_without_room_to_go_on_nor_from_what_does_not_cover_it() -> None:
    manager = kv_cache(3)
    compute(manager, "a", list(range(10)))
    assert manager.fork("a", "b", 9) is None
    assert manager.fork("nobody", "b", 1) is None
    roomy = kv_cache(20)
    compute(roomy, "a", list(range(8)))
    assert roomy.fork("a", "b", 9) is None
    manager.check_integrity()
    roomy.check_integrity()


# Beams.


def beams(manager: KVCacheManager, num_tokens: int) -> None:
    """Beams a, b and c of `num_tokens` tokens, each with its own last block."""
    compute(manager, "a", list(range(num_tokens)))
    for request_id in "bc":
        assert manager.fork("a", request_id, num_tokens) is not None
        assert manager.grow(request_id, num_tokens, num_tokens) is not None  # tells the copied blocks


def test_beams_that_go_on_as_they_are_copy_nothing() -> None:
    manager = kv_cache(20)
    beams(manager, 6)
    before = [manager.tables(request_id) for request_id in "abc"]
    assert manager.reorder("abc", [0, 1, 2], 6) == []
    assert [manager.tables(request_id) for request_id in "abc"] == before
    manager.check_integrity()


def test_beams_that_swap_places_copy_nothing() -> None:
    manager = kv_cache(20)
    beams(manager, 6)
    a, b, c = (manager.tables(request_id) for request_id in "abc")
    assert manager.reorder("abc", [2, 0, 1], 6) == []
    assert [manager.tables(request_id) for request_id in "abc"] == [c, a, b]
    manager.check_integrity()


def test_the_second_beam_that_goes_on_from_one_gets_a_copy_of_its_last_block() -> None:
    manager = kv_cache(20)
    beams(manager, 6)
    (b,) = manager.tables("b")
    copies = manager.reorder("abc", [1, 1, 1], 6)
    assert copies is not None
    assert [source for source, _ in copies] == [b[1], b[1]]
    assert manager.tables("a") == [b]
    assert [manager.tables("b"), manager.tables("c")] == [[[b[0], target]] for _, target in copies]
    manager.check_integrity()


def test_a_copied_block_is_told_with_the_next_growth_and_only_once() -> None:
    manager = kv_cache(20, FULL, WINDOW)
    beams(manager, 6)
    assert manager.reorder("abc", [1, 1, 1], 6) is not None
    assert grow(manager, "a", 6, 7) == {}
    assert grow(manager, "b", 6, 7) == {group: [table[1]] for group, table in enumerate(manager.tables("b"))}
    assert grow(manager, "b", 7, 8) == {}
    assert [new.first_index for new in manager.grow("c", 6, 7) or ()] == [1, 1]


def test_beams_at_a_block_boundary_share_everything() -> None:
    manager = kv_cache(20)
    beams(manager, 8)
    assert manager.reorder("abc", [0, 0, 0], 8) == []
    assert [manager.tables(request_id) for request_id in "abc"] == [manager.tables("a")] * 3
    assert manager.pool.num_usable - manager.pool.num_free == 2
    manager.check_integrity()


def test_beams_that_do_not_go_on_hold_nothing() -> None:
    manager = kv_cache(20)
    beams(manager, 6)
    assert manager.reorder("abc", [1], 6) == []
    assert [manager.tables("b"), manager.tables("c")] == [[[]], [[]]]
    assert manager.pool.num_usable - manager.pool.num_free == 2
    manager.check_integrity()


def test_a_search_that_begins_spreads_from_its_first_beam() -> None:
    manager = kv_cache(20)
    compute(manager, "a", list(range(6)))
    copies = manager.reorder("abc", [0, 0, 0], 6)
    assert copies is not None
    assert [source for source, _ in copies] == [2, 2]
    assert len({manager.tables(request_id)[0][1] for request_id in "abc"}) == 3
    manager.check_integrity()


def test_beams_without_room_for_a_copy_hold_nothing_any_more() -> None:
    manager = kv_cache(3)
    compute(manager, "a", list(range(6)))
    assert manager.reorder("abc", [0, 0, 0], 6) is None
    assert [manager.tables(request_id) for request_id in "abc"] == [[[]]] * 3
    assert manager.pool.usage == 0
    manager.check_integrity()


def test_the_last_blocks_of_beams_that_end_have_room_for_copies() -> None:
    manager = kv_cache(4)
    beams(manager, 6)
    assert manager.pool.num_free == 0
    copies = manager.reorder("abc", [2, 2, 2], 6)
    assert copies is not None
    assert len(copies) == 2
    manager.check_integrity()
