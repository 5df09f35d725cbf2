"""Checkpoints of recurrent states in the block pool: how they are found, evicted, replaced and gone on from."""

from collections.abc import Sequence

import pytest
from kv_caches import FULL, WINDOW, begin, compute, grow, keys_of, kv_cache

from jaxpage.kv_cache.checkpoints import Checkpoint
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.ops.state_spec import RecurrentSpec, StateSpec

STATE = RecurrentSpec((80,), "float32", (None,))
"""320 bytes: 3 blocks of 4 tokens of `FULL`, of 128 bytes each."""
TOKENS = list(range(100, 120))


def save(
    manager: KVCacheManager, request_id: str, token_ids: Sequence[int], num_tokens: int, *, output: bool = False
) -> Checkpoint | None:
    made = manager.save(request_id, keys_of(manager, token_ids), num_tokens, output=output)
    manager.check_integrity()
    return made


def test_a_checkpoint_takes_free_blocks_and_none_of_them_is_held() -> None:
    manager = kv_cache(20, FULL, STATE)
    compute(manager, "a", TOKENS)
    usage = manager.pool.usage
    made = save(manager, "a", TOKENS, 16)
    assert made is not None
    assert len(set(made.block_ids)) == 3
    assert manager.pool.usage == usage
    assert manager.pool.num_cached == 5 + 3


def test_a_prefix_is_found_as_far_as_there_is_a_checkpoint_behind_it() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    assert manager.match(keys_of(manager, TOKENS), 20).num_tokens == 0
    made = [save(manager, "a", TOKENS, num_tokens) for num_tokens in (4, 12)]
    hit = manager.match(keys_of(manager, TOKENS), 20)
    assert (hit.num_tokens, hit.num_shared) == (12, 16)
    assert made[1] is not None
    assert hit.checkpoint == made[1].block_ids
    assert len(hit.tables[0]) == 3
    assert manager.match(keys_of(manager, TOKENS), 12).num_tokens == 4, "the last token is left to compute"


def test_a_checkpoint_without_the_kv_before_it_is_no_hit() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    save(manager, "a", TOKENS, 12)
    manager.pool._forget(manager.tables("a")[0][1])
    hit = manager.match(keys_of(manager, TOKENS), 20)
    assert (hit.num_tokens, hit.checkpoint) == (0, [])


def test_a_checkpoint_that_has_lost_a_block_is_none_and_can_be_made_again() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    made = save(manager, "a", TOKENS, 12)
    assert made is not None
    assert manager.holds(made)
    manager.pool.discard(made.block_ids[1])
    manager.check_integrity()
    assert not manager.holds(made)
    assert manager.match(keys_of(manager, TOKENS), 20).num_tokens == 0
    again = save(manager, "a", TOKENS, 12)
    assert again is not None
    assert manager.match(keys_of(manager, TOKENS), 20).checkpoint == again.block_ids
    assert manager.pool.num_cached == 5 + 3


def test_what_is_saved_already_is_not_saved_again() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    assert save(manager, "a", TOKENS, 12) is not None
    assert save(manager, "a", TOKENS, 12) is None


def test_without_room_nothing_is_saved_and_nobody_loses_anything() -> None:
    manager = kv_cache(7, FULL, STATE)
    compute(manager, "a", TOKENS)
    assert save(manager, "a", TOKENS, 12) is None
    assert manager.pool.num_free == 2


def test_of_checkpoints_behind_its_output_a_request_keeps_the_newest() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    kept, old, new = (save(manager, "a", TOKENS, n, output=n > 4) for n in (4, 8, 12))
    assert kept is not None
    assert old is not None
    assert new is not None
    assert [manager.holds(made) for made in (kept, old, new)] == [True, False, True]
    manager.free("a")
    assert manager.holds(new), "what follows on an answer may find it"


def test_a_checkpoint_that_was_of_use_is_evicted_after_others() -> None:
    manager = kv_cache(40, FULL, STATE)
    compute(manager, "a", TOKENS)
    used, unused = (save(manager, "a", TOKENS[:n], n) for n in (12, 16))
    assert used is not None
    assert unused is not None
    begin(manager, "b", TOKENS[:14])
    assert manager.checkpoint_of("b") == used.block_ids
    order = manager.pool.free_list()
    assert max(map(order.index, unused.block_ids)) < min(map(order.index, used.block_ids))


def test_only_forks_find_what_is_saved_for_them_and_only_while_the_first_runs() -> None:
    manager = kv_cache(60, FULL, STATE)
    compute(manager, "a", TOKENS)
    assert manager.fork("a", "early", 19) is None
    made = manager.save_for_forks("a")
    assert made is not None
    assert manager.match(keys_of(manager, TOKENS), 20).num_tokens == 0
    assert manager.fork("a", "b", 19) is not None
    assert manager.checkpoint_of("b") == made.block_ids
    manager.free("a")
    assert not manager.holds(made)
    manager.check_integrity()


def test_a_fork_at_the_first_token_needs_no_checkpoint() -> None:
    manager = kv_cache(20, FULL, STATE)
    compute(manager, "a", [1])
    assert manager.fork("a", "b", 0) is not None
    assert manager.checkpoint_of("b") == []


@pytest.mark.parametrize("specs", [(STATE,), (STATE, STATE)])
def test_a_model_without_paged_kv_finds_checkpoints_of_a_block_each(specs: tuple[StateSpec, ...]) -> None:
    manager = kv_cache(3, *specs)
    begin(manager, "a", TOKENS)
    assert grow(manager, "a", 0, 20) == {}
    made = save(manager, "a", TOKENS, 16)
    assert made is not None
    assert len(made.block_ids) == 1
    hit = begin(manager, "b", TOKENS)
    assert (hit.num_tokens, hit.tables, hit.checkpoint) == (16, [], made.block_ids)
    assert manager.num_blocks_for(10**6) == 0


def test_windows_and_checkpoints_agree_on_the_same_prefix() -> None:
    manager = kv_cache(40, FULL, WINDOW, STATE)
    compute(manager, "a", TOKENS)
    save(manager, "a", TOKENS, 4)
    save(manager, "a", TOKENS, 16)
    manager.pool._forget(manager.tables("a")[1][3])
    assert manager.match(keys_of(manager, TOKENS), 20).num_tokens == 4
