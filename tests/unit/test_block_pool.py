"""The block pool: each block is free or referenced, what freed blocks hold can be found until they are taken again."""

import pytest

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from jaxpage.kv_cache.hashing import BlockKey


def allocated(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(16), name.to_bytes(4))


def published(pool: BlockPool, count: int, first: int = 0) -> list[int]:
    """A table whose blocks can be found as `key(first)`, `key(first + 1)`, ..."""
    table = allocated(pool, count)
    for index, block_id in enumerate(table):
        pool.publish(block_id, 0, key(first + index))
    return table


def test_a_new_pool_is_free_but_for_the_null_block() -> None:
    pool = BlockPool(8)
    assert (pool.num_blocks, pool.num_usable, pool.num_free, pool.num_cached, pool.usage) == (8, 7, 7, 0, 0.0)
    assert pool.free_list() == [1, 2, 3, 4, 5, 6, 7]
    pool.check_integrity([])


def test_every_block_but_the_null_block_can_be_held_at_once() -> None:
    pool = BlockPool(8)
    assert allocated(pool, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert (pool.num_free, pool.usage, pool.free_list()) == (0, 1.0, [])
    pool.check_integrity([(0, [1, 2, 3, 4, 5, 6, 7])])


def test_nothing_is_taken_when_too_few_blocks_are_free() -> None:
    pool = BlockPool(5)
    held = allocated(pool, 2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.check_integrity([(0, held)])
    assert len(allocated(pool, 2)) == 2


def test_asking_for_no_blocks_gives_none_of_them_even_when_the_pool_is_full() -> None:
    pool = BlockPool(3)
    held = allocated(pool, 2)
    assert pool.allocate(0) == []
    pool.check_integrity([(0, held)])


def test_blocks_held_at_once_are_distinct() -> None:
    pool = BlockPool(10)
    first, second = allocated(pool, 4), allocated(pool, 3)
    pool.free(first)
    third = allocated(pool, 5)
    assert len({*second, *third}) == 8
    pool.check_integrity([(0, second), (0, third)])


def test_freed_blocks_that_hold_nothing_are_taken_before_all_others_and_tail_first() -> None:
    pool = BlockPool(8)
    first, second = allocated(pool, 3), allocated(pool, 2)
    pool.free(first)
    assert pool.free_list() == [3, 2, 1, 6, 7]
    pool.free(second)
    assert pool.free_list() == [5, 4, 3, 2, 1, 6, 7]
    assert allocated(pool, 3) == [5, 4, 3]


def test_freed_blocks_that_can_be_found_are_taken_after_all_others_and_tail_first() -> None:
    pool = BlockPool(8)
    first, second = published(pool, 2), published(pool, 3, first=10)
    pool.free(first)
    pool.free(second)
    assert pool.free_list() == [6, 7, 2, 1, 5, 4, 3]


def test_a_block_found_again_outlives_those_that_were_not() -> None:
    pool = BlockPool(5)
    first, second = published(pool, 2), published(pool, 2, first=10)
    pool.free(first)
    pool.free(second)
    pool.share(first)
    pool.free(first)
    assert pool.free_list() == [4, 3, 2, 1]


def test_a_shared_block_is_free_only_when_its_last_holder_gives_it_back() -> None:
    pool = BlockPool(5)
    table = allocated(pool, 2)
    pool.share(table)
    pool.share(table[:1])
    assert (pool.ref_counts[table[0]], pool.ref_counts[table[1]]) == (3, 2)
    pool.free(table)
    pool.free(table)
    assert pool.num_free == 3
    pool.check_integrity([(0, table[:1])])
    pool.free(table[:1])
    assert pool.num_free == 4
    pool.check_integrity([])


def test_sharing_a_free_block_takes_it_out_of_the_midst_of_the_free_list() -> None:
    pool = BlockPool(6)
    pool.free(published(pool, 5))
    assert pool.free_list() == [5, 4, 3, 2, 1]
    pool.share([3])
    assert (pool.free_list(), pool.num_free) == ([5, 4, 2, 1], 4)
    pool.share([5, 1])
    assert pool.free_list() == [4, 2]
    pool.check_integrity([(0, [3]), (0, [5, 1])])


def test_the_null_block_is_neither_counted_nor_shared_nor_freed() -> None:
    pool = BlockPool(4)
    table = [NULL_BLOCK_ID, NULL_BLOCK_ID, *allocated(pool, 1)]
    pool.share(table)
    pool.free(table)
    pool.check_integrity([(0, table)])
    pool.free(table)
    pool.check_integrity([])
    assert NULL_BLOCK_ID not in pool.free_list()


def test_usage_is_the_share_of_the_usable_blocks_that_is_held() -> None:
    pool = BlockPool(9)
    held = published(pool, 6)
    assert pool.usage == 0.75
    pool.free(held[:4])
    assert pool.usage == 0.25
    pool.free(held[4:])
    assert (pool.usage, pool.num_cached) == (0.0, 6)


def test_freeing_takes_any_iterable_of_blocks() -> None:
    pool = BlockPool(5)
    pool.free(iter(allocated(pool, 4)))
    assert pool.num_free == 4
    pool.free(())
    assert pool.num_free == 4


def test_freeing_a_block_twice_is_refused_by_name() -> None:
    pool = BlockPool(5)
    held = allocated(pool, 2)
    pool.free(held)
    with pytest.raises(AssertionError, match=f"block {held[1]} is freed twice"):
        pool.free(held[1:])
    with pytest.raises(AssertionError, match="block 4 is freed twice"):
        pool.free([4])


# What can be found.


def test_a_published_block_is_found_under_its_group_and_key_alone() -> None:
    pool = BlockPool(5)
    (block_id,) = allocated(pool, 1)
    pool.publish(block_id, 1, key(7))
    assert pool.find(1, key(7)) == block_id
    assert pool.find(0, key(7)) is None
    assert pool.find(1, key(8)) is None


def test_a_digest_that_collides_is_not_taken_for_the_same_tokens() -> None:
    pool = BlockPool(5)
    published(pool, 1, first=7)
    assert pool.find(0, BlockKey(key(7).digest, b"else")) is None


def test_a_block_is_found_when_freed_and_no_more_once_it_is_taken_again() -> None:
    pool = BlockPool(4)
    table = published(pool, 2)
    pool.free(table)
    assert [pool.find(0, key(0)), pool.find(0, key(1))] == table
    assert allocated(pool, 2) == [3, 2]
    assert [pool.find(0, key(0)), pool.find(0, key(1))] == [1, None]
    assert pool.num_cached == 1


def test_of_two_blocks_that_hold_the_same_the_first_is_found_and_the_second_is_as_good_as_empty() -> None:
    pool = BlockPool(6)
    first, second = published(pool, 1), published(pool, 1)
    assert pool.find(0, key(0)) == first[0]
    assert pool.num_cached == 1
    pool.free(first)
    pool.free(second)
    assert pool.free_list() == [*second, 3, 4, 5, *first]
    pool.check_integrity([])


def test_a_block_keeps_the_name_that_it_was_published_under() -> None:
    pool = BlockPool(3)
    table = published(pool, 1)
    pool.publish(table[0], 0, key(5))
    assert (pool.find(0, key(0)), pool.find(0, key(5))) == (table[0], None)


def test_a_block_that_nobody_holds_cannot_be_published() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="block 2 is published and held by nobody"):
        pool.publish(2, 0, key(0))


def test_the_cached_blocks_are_those_that_can_be_found_held_or_not() -> None:
    pool = BlockPool(8)
    first, _, second = published(pool, 2), allocated(pool, 1), published(pool, 1, first=5)
    pool.free(first)
    assert pool.cached_block_ids() == [*first, *second]
    assert pool.num_cached == 3


def test_resetting_the_cache_forgets_everything_when_nothing_is_held() -> None:
    pool = BlockPool(8)
    pool.free(published(pool, 3))
    assert pool.reset_cache()
    assert [pool.find(0, key(name)) for name in range(3)] == [None] * 3
    assert (pool.num_cached, pool.cached_block_ids()) == (0, [])
    pool.check_integrity([])


def test_resetting_the_cache_is_refused_and_changes_nothing_while_a_block_is_held() -> None:
    pool = BlockPool(8)
    table = published(pool, 3)
    pool.free(table[1:])
    assert not pool.reset_cache()
    assert [pool.find(0, key(name)) for name in range(3)] == table


# What the integrity check notices.


def test_the_integrity_check_accepts_any_split_of_the_held_blocks_into_tables() -> None:
    pool = BlockPool(7)
    held = allocated(pool, 5)
    pool.check_integrity([(0, held)])
    pool.check_integrity([(0, held[:2]), (1, []), (1, [NULL_BLOCK_ID, *held[2:]])])


@pytest.mark.parametrize("tables", [[[1, 2]], [[1, 2, 3], [3]], [[1, 2, 3, 4]], []])
def test_the_integrity_check_notices_tables_that_disagree_with_the_reference_counts(tables: list[list[int]]) -> None:
    pool = BlockPool(6)
    allocated(pool, 3)
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check_integrity([(0, table) for table in tables])


def test_the_integrity_check_notices_a_block_that_is_neither_free_nor_held() -> None:
    pool = BlockPool(6)
    pool.ref_counts[allocated(pool, 1)[0]] = 0
    with pytest.raises(AssertionError, match="a block is lost"):
        pool.check_integrity([])


def test_the_integrity_check_notices_a_block_that_is_held_and_still_in_the_free_list() -> None:
    pool = BlockPool(6)
    pool.ref_counts[4] += 1
    with pytest.raises(AssertionError, match="free and held"):
        pool.check_integrity([(0, [4])])


def test_the_integrity_check_notices_a_wrong_count_of_free_blocks() -> None:
    pool = BlockPool(6)
    pool.num_free -= 1
    with pytest.raises(AssertionError, match="free list is broken"):
        pool.check_integrity([])


def test_the_integrity_check_notices_a_wrong_count_of_cached_blocks() -> None:
    pool = BlockPool(6)
    table = published(pool, 1)
    pool.num_cached += 1
    with pytest.raises(AssertionError):
        pool.check_integrity([(0, table)])
