"""Recurrent states in the scheduler: where prompts are cut, what is saved when, and who goes on from it."""

import pytest
from scheduling import add, add_search, lens, run, sample, scheduler, step

from jaxpage.ops.state_spec import KVSpec, RecurrentSpec, StateSpec
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import SchedulerOutput

FULL, STATE = KVSpec(1, 8), RecurrentSpec((16,), "float32", (None,))


def hybrid(
    *, caching: bool = True, budget: int = 64, blocks: int = 200, threshold: int = 0, seqs: int = 8
) -> Scheduler:
    """A scheduler of a model with both kinds of states, in blocks of 4 tokens, each as large as a checkpoint."""
    return scheduler(
        blocks=blocks, block_size=4, caching=caching, budget=budget, threshold=threshold, specs=(FULL, STATE)
    )


def saved(output: SchedulerOutput) -> list[tuple[int, int]]:
    """(row, position) of what a step saves."""
    return [(save.row, save.position) for save in output.saves]


def loaded(output: SchedulerOutput) -> list[tuple[int, int]]:
    """(row, position) of what a step loads."""
    return [(load.row, load.position) for load in output.loads]


def test_a_prompt_is_cut_at_the_last_block_boundary_before_its_end_and_saved_by_the_next_step() -> None:
    target = hybrid()
    request = add(target, "a", 11)
    steps = [step(target)[0] for _ in range(3)]
    assert [output.query_lens for output in steps] == [[8], [3], [1]]
    assert [saved(output) for output in steps] == [[], [(request.row, 8)], []]


def test_a_prompt_of_whole_blocks_is_cut_where_a_hit_may_end() -> None:
    target = hybrid()
    request = add(target, "a", 8)
    steps = [step(target)[0] for _ in range(3)]
    assert [output.query_lens for output in steps] == [[4], [4], [1]]
    assert [saved(output) for output in steps] == [[], [(request.row, 4)], [(request.row, 8)]]


def test_chunks_end_at_block_boundaries() -> None:
    target = hybrid(budget=10)
    add(target, "a", 30)
    assert [output.query_lens[0] for output in run(target)[:5]] == [8, 8, 8, 4, 2]


def test_chunks_smaller_than_a_block_go_on_within_it() -> None:
    target = hybrid(threshold=3)
    add(target, "a", 10)
    steps = [step(target)[0] for _ in range(5)]
    assert [output.query_lens[0] for output in steps] == [3, 1, 3, 1, 2]


def test_without_prefix_caching_prompts_are_not_cut_and_nothing_is_saved() -> None:
    target = hybrid(caching=False)
    add(target, "a", 30, max_tokens=10)
    steps = run(target)
    assert [output.query_lens for output in steps] == [[30]] + [[1]] * 9
    assert not any(output.saves or output.loads for output in steps)


def test_a_second_request_loads_what_the_first_has_saved() -> None:
    target = hybrid()
    add(target, "a", 11)
    step(target)
    first = step(target)[0]
    second = add(target, "b", 11)
    output = step(target)[0]
    assert loaded(output) == [(second.row, 8)]
    assert output.loads[0].block_ids == first.saves[0].block_ids
    assert lens(output)[second.request_id] == 3
    assert output.admitted[0].num_computed_tokens == second.num_cached_tokens == 8


def test_a_request_that_comes_with_the_save_loads_in_the_same_step() -> None:
    target = hybrid()
    first = add(target, "a", 11)
    step(target)
    second = add(target, "b", 11)
    output = step(target)[0]
    assert (saved(output), loaded(output)) == ([(first.row, 8)], [(second.row, 8)])
    assert output.loads[0].block_ids == output.saves[0].block_ids


def test_nobody_finds_a_checkpoint_in_the_step_before_it_is_written() -> None:
    target = hybrid()
    add(target, "a", 11)
    second = add(target, "b", 11)
    output = step(target)[0]
    assert lens(output)[second.request_id] == 8
    assert loaded(output) == []


@pytest.mark.parametrize("specs", [(FULL, STATE), (STATE,)])
def test_the_place_where_prompts_part_is_saved_for_the_third(specs: tuple[StateSpec, ...]) -> None:
    target = scheduler(block_size=4, caching=True, specs=specs)
    for request_id, start in (("a", 100), ("b", 200), ("c", 300)):
        request = add(target, request_id, 30, max_tokens=1)
        request.prompt_token_ids[12:] = request.token_ids[12:] = range(start, start + 18)
        steps = run(target)
        assert [position for _, position in loaded(steps[0])] == ([12] if request_id == "c" else [])
        assert sum(output.num_tokens for output in steps) == {"a": 30, "b": 30, "c": 18}[request_id]
    assert target.kv_cache.num_hit_tokens == 12


def test_a_request_that_generates_saves_at_each_block_and_keeps_the_newest() -> None:
    target = hybrid()
    request = add(target, "a", 3, max_tokens=16)
    positions = [save.position for output in run(target) for save in output.saves]
    assert positions == [4, 8, 12, 16]
    keys = request.block_keys(4)
    found = [target.kv_cache.match(keys[:count], 4 * count + 1).num_tokens for count in (1, 2, 3, 4)]
    assert found == [0, 0, 0, 16]


def test_with_drafts_in_flight_nothing_is_saved() -> None:
    target = hybrid()
    request = add(target, "a", 3, max_tokens=40)
    request.max_drafts = 2
    for _ in range(8):
        output = target.schedule()
        ahead = target.schedule()  # before it is known what becomes of the drafts
        assert not (output.num_drafts and ahead.saves)
        for each in (output, ahead):
            target.update(each, [[7]] * len(each.requests), num_proposed=[2] * len(each.requests))
    assert target.acceptance.num_draft_tokens > 0


def test_a_save_waits_for_a_step_that_is_run() -> None:
    target = hybrid()
    request = add(target, "a", 7, max_tokens=2)
    first = target.schedule()
    target.update(first, sample(first))
    assert first.query_lens == [4]
    target.token_budget = 0
    idle = target.schedule()
    assert (idle.requests, idle.saves) == ([], [])
    target.token_budget = 64
    assert saved(target.schedule()) == [(request.row, 4)]


def test_forks_go_on_from_all_of_the_prompt_but_its_last_token() -> None:
    for caching in (True, False):
        target = hybrid(caching=caching)
        request = add(target, "a", 11, max_tokens=20, n=3)
        steps = [step(target)[0] for _ in range(6)]
        cuts = [output.query_lens[0] for output in steps]
        assert cuts[:3] == ([8, 2, 1] if caching else [10, 1, 1])
        (begins,) = [output for output in steps if output.admitted and output is not steps[0]]
        assert sorted(position for _, position in loaded(begins)) == [10, 10]
        assert (request.row, 10) in [save for output in steps for save in saved(output)]
        run(target)
        assert target.kv_cache.pool.usage == 0
        if not caching:
            assert target.kv_cache.pool.num_cached == 0


def test_forks_of_a_prompt_of_one_token_load_nothing() -> None:
    target = hybrid(caching=False)
    add(target, "a", 1, max_tokens=5, n=2)
    assert not any(output.saves or output.loads for output in run(target))


def test_a_preempted_request_resumes_from_its_newest_checkpoint() -> None:
    target = hybrid()
    request = add(target, "a", 3, max_tokens=30)
    for _ in range(12):
        step(target)
    target.preempt_all()
    assert loaded(step(target)[0]) == [(request.row, 12)]


def test_beams_save_their_prompt_alone() -> None:
    target = hybrid()
    add_search(target, "s", 11, width=3, max_tokens=12)
    assert [save.position for output in run(target) for save in output.saves] == [8]


def test_what_is_evicted_while_a_step_is_put_together_is_not_saved() -> None:
    target = hybrid(blocks=3)
    add(target, "a", 9, max_tokens=4)
    assert step(target)[0].query_lens == [8]
    output = step(target)[0]
    assert output.query_lens == [1]
    assert output.saves == [], "the only free block now holds KV"
    target.kv_cache.check_integrity()


def test_other_models_have_neither_cuts_nor_saves() -> None:
    target = scheduler(block_size=4, caching=True, specs=(FULL,))
    add(target, "a", 11, max_tokens=9)
    steps = run(target)
    assert steps[0].query_lens == [11]
    assert not any(output.saves or output.loads for output in steps)
