"""Block tables: they cover what was asked in whole blocks, grow at their end, and give everything back."""

import pytest

from jaxpage.kv_cache.manager import KVCacheManager


def grown(manager: KVCacheManager, request_id: str, num_tokens: int) -> list[int]:
    added = manager.grow(request_id, num_tokens)
    assert added is not None
    manager.check_integrity()
    return added


def test_a_table_covers_its_tokens_in_whole_blocks() -> None:
    manager = KVCacheManager(num_blocks=11, block_size=16)
    assert grown(manager, "a", 55) == [1, 2, 3, 4]
    assert manager.table("a") == [1, 2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_a_block_is_added_exactly_when_a_token_needs_it(num_tokens: int, num_blocks: int) -> None:
    manager = KVCacheManager(num_blocks=11, block_size=16)
    assert len(grown(manager, "a", num_tokens)) == num_blocks
    assert len(manager.table("a")) == num_blocks


def test_growing_returns_only_what_it_adds_and_adds_at_the_end() -> None:
    manager = KVCacheManager(num_blocks=11, block_size=4)
    first = grown(manager, "a", 5)
    grown(manager, "b", 4)
    assert grown(manager, "a", 8) == []
    second = grown(manager, "a", 13)
    assert len(second) == 2
    assert manager.table("a") == first + second


def test_asking_for_fewer_tokens_than_covered_keeps_the_table() -> None:
    manager = KVCacheManager(num_blocks=11, block_size=4)
    table = grown(manager, "a", 12)
    assert grown(manager, "a", 1) == []
    assert manager.table("a") == table


def test_tables_of_different_requests_share_no_block() -> None:
    manager = KVCacheManager(num_blocks=11, block_size=4)
    for num_tokens in range(1, 18):
        grown(manager, "a", num_tokens)
        grown(manager, "b", num_tokens)
    assert not set(manager.table("a")) & set(manager.table("b"))
    assert manager.pool.num_free == 0


def test_growing_beyond_the_pool_changes_nothing() -> None:
    manager = KVCacheManager(num_blocks=5, block_size=4)
    table = list(grown(manager, "a", 8))
    assert manager.grow("a", 17) is None
    assert manager.grow("b", 9) is None
    assert (manager.table("a"), manager.table("b"), manager.pool.num_free) == (table, [], 2)
    manager.check_integrity()
    assert len(grown(manager, "b", 8)) == 2


def test_only_free_blocks_count_for_what_can_fit() -> None:
    manager = KVCacheManager(num_blocks=5, block_size=4)
    assert manager.can_fit(16)
    assert not manager.can_fit(17)
    grown(manager, "a", 5)
    assert manager.can_fit(8)
    assert not manager.can_fit(9)
    manager.free("a")
    assert manager.can_fit(16)


def test_what_can_fit_can_be_grown() -> None:
    for held in range(17):
        for wanted in range(1, 18):
            manager = KVCacheManager(num_blocks=5, block_size=4)
            grown(manager, "a", held)
            assert manager.can_fit(wanted) == (manager.grow("b", wanted) is not None)


def test_the_longest_possible_request_leaves_the_null_block_alone() -> None:
    manager = KVCacheManager(num_blocks=11, block_size=16)
    assert manager.max_request_tokens == 160
    assert 0 not in grown(manager, "a", 160)


def test_freeing_gives_all_blocks_back_and_forgets_the_table() -> None:
    manager = KVCacheManager(num_blocks=8, block_size=2)
    grown(manager, "a", 5)
    grown(manager, "b", 3)
    manager.free("a")
    assert (manager.table("a"), manager.pool.num_free) == ([], 5)
    manager.check_integrity()
    manager.free("b")
    assert manager.pool.usage == 0
    manager.check_integrity()


def test_an_unknown_request_has_an_empty_table_and_nothing_to_free() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=2)
    assert manager.table("nobody") == []
    manager.free("nobody")
    assert manager.pool.num_free == 3


def test_freeing_twice_is_harmless() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=2)
    grown(manager, "a", 4)
    manager.free("a")
    manager.free("a")
    manager.check_integrity()
    assert manager.pool.num_free == 3


def test_the_integrity_check_notices_a_block_that_no_table_holds() -> None:
    manager = KVCacheManager(num_blocks=4, block_size=2)
    grown(manager, "a", 2)
    manager.pool.allocate(1)
    with pytest.raises(AssertionError, match="lost"):
        manager.check_integrity()
