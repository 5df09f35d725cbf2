"""Values that users of vLLM know: what its scheduler and KV cache were observed to do, one test for each."""

import jax.numpy as jnp
import pytest
from scheduling import STOP, add, ids, lens, run, sample, scheduler, step, table

from jaxpage.kv_cache.hashing import ExtraKeys, MediaItem, block_keys
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec
from jaxpage.requests.request import Request, RequestStatus
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler.policies import Priority
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.speculative.drafts import count_accepted
from jaxpage.wire import TokenOutput

FULL, WINDOW = KVSpec(1, 8), KVSpec(1, 8, window=32)


def cached(*, blocks: int = 10, seqs: int = 8, specs: tuple[KVSpec, ...] = (FULL,)) -> Scheduler:
    """Prefix caching over `blocks` usable blocks of 16 tokens."""
    return scheduler(blocks=blocks, seqs=seqs, caching=True, specs=specs)


def test_a_prompt_of_55_tokens_takes_blocks_1_to_4_and_the_same_prompt_again_hits_48_tokens_and_adds_block_5() -> None:
    target = cached()
    add(target, "a", 55)
    step(target)
    assert table(target, "a") == [1, 2, 3, 4]
    second = add(target, "b", 55)
    output, _ = step(target)
    assert table(target, "b") == [1, 2, 3, 5]
    assert (second.num_cached_tokens, lens(output)["b"]) == (48, 7)
    assert target.kv_cache.pool.ref_counts[1:6] == [2, 2, 2, 1, 1]


def test_after_both_are_freed_the_free_list_is_5_4_6_7_8_9_10_3_2_1() -> None:
    target = cached()
    for request_id in "ab":
        add(target, request_id, 55)
        step(target)
    target.abort("a")
    target.abort("b")
    assert target.kv_cache.pool.free_list() == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_a_48_token_prompt_that_is_fully_cached_hits_32() -> None:
    target = cached()
    add(target, "a", 48)
    step(target)
    second = add(target, "b", 48)
    output, _ = step(target)
    assert (second.num_cached_tokens, lens(output)["b"]) == (32, 16)


def test_two_requests_with_the_same_100_token_prompt_in_one_step_compute_100_and_4() -> None:
    target = cached(blocks=20)
    add(target, "a", 100)
    add(target, "b", 100)
    assert lens(step(target)[0]) == {"a": 100, "b": 4}


def test_a_cache_salt_is_part_of_the_first_blocks_key_and_a_different_one_does_not_hit() -> None:
    assert ExtraKeys(cache_salt="x").for_block(0, 16) != ()
    assert ExtraKeys(cache_salt="x").for_block(16, 32) == ()
    target = cached(blocks=40)
    hits = {}
    for arrival, (request_id, salt) in enumerate([("a", "x"), ("b", "y"), ("c", None), ("d", "x")]):
        params = SamplingParams(max_tokens=4)
        extra = None if salt is None else ExtraKeys(cache_salt=salt)
        request = Request(request_id, list(range(55)), params, 0, 4, frozenset(), arrival, extra_keys=extra)
        target.add(request)
        step(target)
        hits[request_id] = request.num_cached_tokens
    assert hits == {"a": 0, "b": 0, "c": 0, "d": 48}


def test_media_in_the_prompt_are_keyed_by_their_hash_and_their_offset_from_the_block_start() -> None:
    extra = ExtraKeys(media=(MediaItem("hash_a", 0, 5), MediaItem("hash_b", 10, 20)))
    assert extra.for_block(0, 16) == (("hash_a", 0), ("hash_b", 10))
    assert extra.for_block(16, 32) == (("hash_b", -6),)
    assert extra.for_block(32, 48) == ()
    prompt = [7] * 32
    plain = block_keys(prompt, 16)
    with_media = block_keys(prompt, 16, extra=extra)
    assert [one.digest == other.digest for one, other in zip(plain, with_media, strict=True)] == [False, False]


def test_resetting_the_prefix_cache_is_refused_while_any_block_is_held_and_done_after() -> None:
    target = cached()
    add(target, "a", 55)
    step(target)
    assert target.kv_cache.reset_prefix_cache() is False
    assert target.kv_cache.pool.num_cached == 3
    target.abort("a")
    assert target.kv_cache.reset_prefix_cache() is True
    again = add(target, "b", 55)
    step(target)
    assert again.num_cached_tokens == 0


def test_a_hit_of_96_without_room_for_the_rest_is_not_allocated_and_leaves_the_reference_counts() -> None:
    target = cached()
    add(target, "a", 97, max_tokens=1)
    step(target)
    add(target, "b", 48, max_tokens=20, start=500)
    step(target)
    kv_cache = target.kv_cache
    before = list(kv_cache.pool.ref_counts)
    long = add(target, "c", 130, max_tokens=1)
    hit = kv_cache.match(long.block_keys(16), 130)
    assert hit.num_tokens == 96
    assert not kv_cache.can_fit(130, hit)
    output, _ = step(target)
    assert ids(output.requests) == ["b"]
    assert (long.status, kv_cache.tables("c")) == (RequestStatus.WAITING, [[]])
    before[table(target, "b")[-1]] = 1  # b itself has grown
    assert kv_cache.pool.ref_counts == before
    assert kv_cache.match(long.block_keys(16), 130).num_tokens == 96


def test_full_and_window_groups_share_a_3_block_hit_with_null_blocks_behind_the_window() -> None:
    target = cached(blocks=30, specs=(FULL, WINDOW, WINDOW))
    add(target, "a", 55)
    step(target)
    assert target.kv_cache.tables("a") == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    tokens = list(range(1, 56))
    hit = target.kv_cache.match(block_keys(tokens, 16), 55)
    assert (hit.num_tokens, hit.tables) == (48, [[1, 2, 3], [0, 6, 7], [0, 10, 11]])
    add(target, "b", 55)
    step(target)
    assert target.kv_cache.tables("b") == [[1, 2, 3, 13], [0, 6, 7, 14], [0, 10, 11, 15]]


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 32, 33, 34, 64])
def test_a_window_hit_takes_window_minus_1_tokens_of_contiguous_blocks_rounded_up(window: int) -> None:
    manager = KVCacheManager(100, plan_layout([[KVSpec(1, 8, window=window)]], 16), max_step_tokens=1024)
    tokens = list(range(200))
    keys = block_keys(tokens, 16)
    manager.admit("a", manager.match(keys, 200))
    assert manager.grow("a", 0, 200) is not None
    manager.publish("a", keys, 200)
    hit = manager.match(keys, 200)
    needed = -(-(window - 1) // 16)
    assert hit.num_tokens == 192
    assert [block_id != 0 for block_id in hit.tables[0]] == [False] * (12 - needed) + [True] * needed
    assert hit.tables[0][12 - needed :] == manager.tables("a")[0][12 - needed : 12]


def test_a_budget_of_1024_and_a_threshold_of_400_split_three_prompts_of_800() -> None:
    target = scheduler(budget=1024, threshold=400)
    for request_id in "abc":
        add(target, request_id, 800)
    assert [list(step(target)[0].query_lens) for _ in range(3)] == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_fcfs_preempts_the_last_running_request_delivers_its_token_in_flight_and_resumes_it_before_newer_ones() -> None:
    target = scheduler(blocks=4, block_size=4, threshold=4)
    add(target, "a", 16, max_tokens=1)
    step(target)
    step(target)
    b = add(target, "b", 3, max_tokens=5)
    first = target.schedule()
    sampled = sample(first)
    assert lens(first) == {"a": 4, "b": 3}
    second = target.schedule()  # a needs a fourth block
    assert lens(second) == {"a": 4}
    assert (b.status, target.kv_cache.tables("b"), target.num_preemptions) == (RequestStatus.PREEMPTED, [[]], 1)
    c = add(target, "c", 3, max_tokens=5)
    assert target.update(first, sampled) == [TokenOutput("b", [7])]
    assert target.waiting == [b, c]
    assert target.update(second, sample(second)) == [TokenOutput("a", [7], "length")]
    third, _ = step(target)
    assert [(admitted.request, admitted.token_ids) for admitted in third.admitted] == [
        (b, [1, 2, 3, 7]),
        (c, [1, 2, 3]),
    ]
    assert lens(third) == {"b": 4, "c": 3}


def test_preemption_by_priority_takes_the_largest_priority_and_of_equals_the_last_arrival() -> None:
    target = scheduler(blocks=6, block_size=4, policy=Priority())
    for request_id in "ab":
        add(target, request_id, 6, 9, priority=5)
    step(target)
    add(target, "urgent", 7, 9, priority=0)
    step(target)
    assert ids(target.running) == ["a", "b", "urgent"]
    assert lens(step(target)[0]) == {"a": 1, "b": 1, "urgent": 1}
    assert lens(step(target)[0]) == {"a": 1, "urgent": 1}  # each of the three needed a block
    assert ids(target.waiting) == ["b"]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_m_on_a_prompt_of_10_schedules_exactly_10_plus_m_minus_1_tokens(max_tokens: int) -> None:
    target = scheduler()
    for request_id in "abc":
        add(target, request_id, 10, max_tokens)
    outputs = run(target)
    assert len(outputs) == max_tokens
    for request_id in "abc":
        assert sum(lens(output).get(request_id, 0) for output in outputs) == 10 + max_tokens - 1


def test_a_stop_token_inside_accepted_drafts_cuts_the_output_and_the_rest_is_dropped() -> None:
    target = scheduler()
    request = add(target, "a", 10)
    request.max_drafts = 3
    target.update(target.schedule(), [[7]], None, None, [3])
    output = target.schedule()
    assert lens(output) == {"a": 4}
    assert target.update(output, [[8, STOP, 9, 10]]) == [TokenOutput("a", [8, STOP], "stop", STOP)]
    assert request.token_ids[10:] == [7, 8, STOP]


def test_greedy_verification_of_drafts_1_2_3_against_targets_1_5_accepts_1_and_emits_5_behind_it() -> None:
    drafts, targets = jnp.array([[1, 2, 3]]), jnp.array([[1, 5, 3, 4]])
    [accepted] = count_accepted(targets, drafts, jnp.array([3]))
    assert targets[0, : accepted + 1].tolist() == [1, 5]
