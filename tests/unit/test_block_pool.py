"""The block pool: each block is free or held once, and nothing is taken when not all can be."""

import pytest

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool


def allocated(pool: BlockPool, count: int) -> list[int]:
    block_ids = pool.allocate(count)
    assert block_ids is not None
    return block_ids


def test_a_new_pool_is_free_but_for_the_null_block() -> None:
    pool = BlockPool(8)
    assert (pool.num_blocks, pool.num_usable, pool.num_free, pool.usage) == (8, 7, 7, 0.0)


def test_every_block_but_the_null_block_can_be_held_at_once() -> None:
    pool = BlockPool(8)
    assert sorted(allocated(pool, 7)) == [1, 2, 3, 4, 5, 6, 7]
    assert (pool.num_free, pool.usage) == (0, 1.0)


def test_the_first_blocks_of_a_new_pool_are_taken_in_order() -> None:
    assert allocated(BlockPool(11), 4) == [1, 2, 3, 4]


def test_nothing_is_taken_when_too_few_blocks_are_free() -> None:
    pool = BlockPool(5)
    held = allocated(pool, 2)
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    pool.check_integrity([held])
    assert len(allocated(pool, 2)) == 2


def test_asking_for_no_blocks_gives_none_of_them_even_when_the_pool_is_full() -> None:
    pool = BlockPool(3)
    allocated(pool, 2)
    assert pool.allocate(0) == []


def test_blocks_held_at_once_are_distinct() -> None:
    pool = BlockPool(10)
    first, second = allocated(pool, 4), allocated(pool, 3)
    pool.free(first)
    third = allocated(pool, 5)
    assert len({*second, *third}) == 8
    pool.check_integrity([second, third])


def test_the_blocks_freed_last_are_taken_first() -> None:
    pool = BlockPool(10)
    first, second = allocated(pool, 2), allocated(pool, 2)
    pool.free(first)
    pool.free(second)
    assert sorted(allocated(pool, 2)) == sorted(second)
    assert sorted(allocated(pool, 2)) == sorted(first)


def test_usage_is_the_share_of_the_usable_blocks_that_is_held() -> None:
    pool = BlockPool(9)
    held = allocated(pool, 6)
    assert pool.usage == 0.75
    pool.free(held[:4])
    assert pool.usage == 0.25
    pool.free(held[4:])
    assert pool.usage == 0.0


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


def test_the_integrity_check_accepts_any_split_of_the_held_blocks_into_tables() -> None:
    pool = BlockPool(7)
    held = allocated(pool, 5)
    pool.check_integrity([held])
    pool.check_integrity([held[:2], [], held[2:]])


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([[1, 2]], "lost"),
        ([[1, 2, 3], [3]], "two tables"),
        ([[1, 2, 3, 4]], "free and held"),
        ([[1, 2, 3, NULL_BLOCK_ID]], "null block"),
        ([[1, 2, 3, 99]], "lost"),
    ],
)
def test_the_integrity_check_notices_tables_that_disagree_with_the_pool(
    tables: list[list[int]], complaint: str
) -> None:
    pool = BlockPool(6)
    assert sorted(allocated(pool, 3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match=complaint):
        pool.check_integrity(tables)


def test_freed_blocks_return_tail_first() -> None:
    pool = BlockPool(10)
    table = pool.allocate(3)
    assert table == [1, 2, 3]
    pool.free(table)
    assert pool.allocate(3) == [3, 2, 1]
