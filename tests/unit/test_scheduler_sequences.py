"""Sequences of one prompt: forks of n > 1 requests, and beams of a search; also when aborted or preempted."""

import pytest
from scheduling import STOP, add, add_search, alternatives, ids, lens, run, sample, scheduler, step, steps_while, table

from jaxpage.requests.request import RequestStatus
from jaxpage.scheduler.policies import Priority
from jaxpage.scheduler.step_plan import RowFork
from jaxpage.wire import BeamOutput, TokenLogprobs, TokenOutput

# Forks.


def test_forks_wait_for_the_prompt_and_then_compute_only_its_last_token() -> None:
    target = scheduler(block_size=4, budget=8)
    request = add(target, "a", 14, 3, n=3)
    forks = list(request.forks)
    assert lens(step(target)[0]) == {"a": 8}
    assert lens(step(target)[0]) == {"a": 6}
    output, _ = step(target)
    assert lens(output) == {"a": 1, "a#1": 1, "a#2": 1}
    assert [(a.request, a.num_computed_tokens) for a in output.admitted] == [(forks[0], 13), (forks[1], 13)]
    assert output.block_copies == [(4, table(target, "a#1")[3]), (4, table(target, "a#2")[3])]
    assert table(target, "a#1")[:3] == table(target, "a#2")[:3] == [1, 2, 3]
    assert [fork.num_cached_tokens for fork in forks] == [13, 13]
    run(target)
    assert target.kv_cache.pool.usage == 0


def test_forks_are_served_before_requests_that_came_later() -> None:
    target = scheduler(seqs=2)
    add(target, "a", 4, 3, n=2)
    add(target, "b", 4, 3)
    step(target)
    assert ids(target.running) == ["a", "b"]
    output = next(output for output, _ in steps_while(target, lambda: True) if output.admitted)
    assert [admitted.request.request_id for admitted in output.admitted] == ["a#1"]


@pytest.mark.parametrize("caching", [True, False])
def test_forks_of_a_request_that_ends_with_its_first_token_compute_the_prompt_themselves(caching: bool) -> None:
    target = scheduler(block_size=4, caching=caching)
    add(target, "a", 10, 1, n=2)
    step(target)
    assert lens(step(target)[0]) == {"a#1": 2 if caching else 10}
    assert not target.has_requests


def test_a_fork_in_the_step_that_admits_its_source_anew_copies_nothing_that_is_not_computed_yet() -> None:
    target = scheduler(blocks=5, block_size=4, seqs=1)
    request = add(target, "a", 6, 4, n=2)
    step(target)
    target._preempt(request, None)
    target._free_rows = [1, 0]
    output, _ = step(target)
    assert lens(output) == {"a": 7, "a#1": 6}
    assert output.block_copies == []


def test_a_fork_copies_nothing_that_its_source_found_because_this_very_step_computes_it() -> None:
    target = scheduler(block_size=4, seqs=1, caching=True, policy=Priority())
    request = add(target, "a", 6, 9, n=2)
    for token_id in (7, 8, 9):
        step(target, token_id)
    target._preempt(request, None)
    target.kv_cache.reset_prefix_cache()
    add(target, "b", 12, priority=-1)
    target._free_rows = [2, 1, 0]
    output, _ = step(target)
    assert lens(output) == {"b": 12, "a": 1, "a#1": 2}
    assert output.block_copies == []


def test_aborting_a_fork_that_waits_for_the_prompt_leaves_the_others() -> None:
    target = scheduler(budget=8)
    request = add(target, "a", 10, 2, n=3)
    step(target)
    assert target.abort("a#1") is not None
    assert ids(request.forks) == ["a#2"]
    outputs = run(target)
    assert {name for output in outputs for name in lens(output)} == {"a", "a#2"}


def test_aborting_the_first_sequence_lets_its_forks_live_on() -> None:
    target = scheduler(budget=8)
    add(target, "a", 10, 2, n=3)
    step(target)
    target.abort("a")
    assert ids(target.waiting) == ["a#1", "a#2"]
    run(target)
    assert not target.has_requests


def test_a_running_and_a_preempted_fork_can_be_aborted_alone() -> None:
    target = scheduler()
    request = add(target, "a", 10, 9, n=3)
    forks = list(request.forks)
    step(target)
    step(target)
    target.abort("a#1")
    target._preempt(forks[1], None)
    target.abort("a#2")
    assert [fork.status for fork in forks] == [RequestStatus.FINISHED] * 2
    assert ids(target.running) == ["a"]
    target.kv_cache.check_integrity()
    run(target)


def test_a_preempted_fork_that_has_output_starts_from_what_it_knows() -> None:
    target = scheduler(block_size=4)
    request = add(target, "a", 10, 9, n=2)
    (fork,) = request.forks
    step(target)
    step(target)
    target._preempt(fork, None)
    output, _ = step(target)
    assert [(a.token_ids, a.num_computed_tokens) for a in output.admitted] == [([*fork.prompt_token_ids, 7], 0)]


# Beams.


def test_a_search_begins_with_one_beam_and_a_row_for_each() -> None:
    target = scheduler(seqs=4)
    group = add_search(target, "s", 6, width=3, max_tokens=4)
    add(target, "a", 4)
    add(target, "b", 4)
    output, _ = step(target)
    assert lens(output) == {"s": 6, "a": 4}
    assert len({beam.row for beam in group.members} | {output.admitted[1].row}) == 4
    assert ids(target.waiting) == ["b"]


def test_each_beam_goes_on_in_its_row_as_a_fork_of_its_source() -> None:
    target = scheduler(block_size=4)
    group = add_search(target, "s", 6, width=3, max_tokens=4)
    step(target)
    output, _ = step(target)
    first = group.members[0].row
    assert output.row_forks == [RowFork(first, beam.row, 10 + index) for index, beam in enumerate(group.members)]
    assert lens(output) == {"s": 1, "s#1": 1, "s#2": 1}


def test_a_beam_that_goes_on_with_a_copied_block_tells_its_row_of_it() -> None:
    target = scheduler(block_size=4)
    group = add_search(target, "s", 6, width=3, max_tokens=4)
    step(target)
    output = target.schedule()
    assert [source for source, _ in output.block_copies] == [2, 2]
    assert output.new_blocks == [
        (beam.row, 0, 1, block_id) for beam, (_, block_id) in zip(group.members[1:], output.block_copies, strict=True)
    ]
    assert [table(target, beam.request_id)[1] for beam in group.members[1:]] == [b for _, b in output.block_copies]


def test_a_search_ends_with_all_its_sequences_at_once_and_frees_everything() -> None:
    target = scheduler()
    add_search(target, "s", 6, width=2, max_tokens=3)
    given = [outputs for _, outputs in steps_while(target, lambda: target.has_requests)]
    assert given[:-1] == [[], []]
    ((end,),) = given[-1:]
    assert isinstance(end, BeamOutput)
    assert [sequence.token_ids for sequence in end.sequences] == [[10, 10, 10], [10, 10, 11]]
    assert (target.kv_cache.pool.usage, sorted(target._free_rows)) == (0, list(range(8)))


def test_beams_that_the_budget_does_not_reach_are_computed_in_the_next_step_and_only_then_the_search_goes_on() -> None:
    target = scheduler(budget=3)
    group = add_search(target, "s", 3, width=4, max_tokens=3)
    step(target)
    assert lens(step(target)[0]) == {"s": 1, "s#1": 1, "s#2": 1}
    assert [beam.num_output_tokens for beam in group.members] == [1, 1, 1, 1]
    assert lens(step(target)[0]) == {"s#3": 1}
    assert [beam.num_output_tokens for beam in group.members] == [2, 2, 2, 2]


def test_a_search_that_is_preempted_after_some_beams_have_reported_computes_all_of_them_anew() -> None:
    target = scheduler(budget=5)
    group = add_search(target, "s", 3, width=6, max_tokens=3)
    step(target)
    assert len(lens(step(target)[0])) == 5
    known = [list(beam.token_ids) for beam in group.members]
    target._preempt(group.members[3], None)
    assert group.take(group.members[5], TokenLogprobs(0.0, 1, [])) is None, "what the others have reported is forgotten"
    group.forget()
    assert (ids(target.running), ids(target.waiting)) == ([], ["s"])
    assert [beam.row for beam in group.members] == [-1] * 6
    computed = {beam.request_id: 0 for beam in group.members}
    while [list(beam.token_ids) for beam in group.members] == known:
        output, outputs = step(target)
        assert outputs == []
        for name, count in lens(output).items():
            computed[name] += count
    assert set(computed.values()) == {4}


def test_a_preempted_search_finds_what_one_of_its_beams_computes_in_the_same_step() -> None:
    target = scheduler(block_size=4, caching=True)
    group = add_search(target, "s", 11, width=3, max_tokens=3)
    step(target)
    target._preempt(group.members[0], None)
    assert target.kv_cache.reset_prefix_cache()
    assert lens(step(target)[0]) == {"s": 12, "s#1": 4, "s#2": 4}


def test_the_results_of_a_search_that_was_preempted_meanwhile_count_for_nothing() -> None:
    target = scheduler()
    group = add_search(target, "s", 3, width=2, max_tokens=3)
    output = target.schedule()
    target._preempt(group.members[0], None)
    assert target.update(output, sample(output), alternatives(output)) == []
    assert group.members[0].num_output_tokens == 0
    assert lens(step(target)[0]) == {"s": 3}


def test_a_search_without_room_for_its_copies_is_preempted_and_goes_on_when_there_is() -> None:
    target = scheduler(blocks=7, block_size=4)
    add(target, "a", 15, 6)
    add_search(target, "s", 5, width=3, max_tokens=2)
    step(target)  # 4 + 2 blocks: one is free, and two copies are needed
    assert (target.num_preemptions, ids(target.waiting)) == (1, ["s"])
    ends = [given for _, outputs in steps_while(target, lambda: target.has_requests) for given in outputs]
    assert [isinstance(given, BeamOutput) for given in ends].count(True) == 1
    assert target.kv_cache.pool.usage == 0


def test_aborting_a_search_calls_off_what_its_rows_and_blocks_wait_for() -> None:
    target = scheduler(block_size=4, seqs=3)
    add_search(target, "s", 6, width=3, max_tokens=4)
    add(target, "a", 6, 2, n=1)
    step(target)
    target.abort("s")
    output, _ = step(target)
    assert (output.row_forks, output.block_copies) == ([], [])
    assert lens(output) == {"a": 6}


def test_the_forks_of_one_search_survive_the_abort_of_another() -> None:
    target = scheduler(block_size=4)
    kept, gone = add_search(target, "s", 6, width=2, max_tokens=4), add_search(target, "t", 6, width=2, max_tokens=4)
    step(target)
    targets = [beam.row for beam in kept.members]
    target.abort(gone.members[0].request_id)
    output, _ = step(target)
    assert [fork.target for fork in output.row_forks] == targets
    assert len(output.block_copies) == 1


@pytest.mark.parametrize(("width", "blocks"), [(9, 1000), (4, 7)])
def test_a_search_that_could_never_run_is_refused_on_arrival(width: int, blocks: int) -> None:
    target = scheduler(blocks=blocks, block_size=4, seqs=8)
    with pytest.raises(AssertionError, match="s needs more"):
        add_search(target, "s", 5, width=width, max_tokens=2)
    assert not target.has_requests


# Policies.


def test_a_request_that_preempts_itself_does_not_cost_those_behind_it_their_step() -> None:
    target = scheduler(blocks=4, block_size=4, policy=Priority())
    low = add(target, "low", 7, 6, priority=5)
    step(target)
    add(target, "urgent", 5, 4, priority=0)
    assert lens(step(target)[0]) == {"low": 1, "urgent": 5}
    assert lens(step(target)[0]) == {"urgent": 1}
    assert low.status is RequestStatus.PREEMPTED


def test_the_budget_of_what_is_taken_back_is_given_to_others() -> None:
    target = scheduler(blocks=40, block_size=4, budget=8, policy=Priority())
    for request_id, num_prompt_tokens, priority in (("low", 9, 5), ("urgent", 3, 0), ("long", 40, 1)):
        add(target, request_id, num_prompt_tokens, priority=priority)
        if request_id == "low":
            step(target)
    step(target)
    assert lens(step(target)[0]) == {"low": 1, "urgent": 1, "long": 6}
    target.kv_cache.pool.allocate(target.kv_cache.pool.num_free)
    output = target.schedule()  # urgent needs a block when low has been scheduled already
    assert lens(output) == {"urgent": 1, "long": 7}
    assert output.num_tokens == 8


def test_what_is_taken_back_is_not_published() -> None:
    target = scheduler(blocks=50, block_size=4, threshold=8, caching=True, policy=Priority())
    low = add(target, "low", 40, priority=5)
    step(target)
    add(target, "urgent", 4, priority=0, start=50)
    assert lens(step(target)[0]) == {"low": 8, "urgent": 4}
    target.kv_cache.pool.allocate(target.kv_cache.pool.num_free - 2)
    assert lens(target.schedule()) == {"urgent": 1}  # it needs a block when low has taken the last two
    assert target.kv_cache.match(low.block_keys(4), 40).num_tokens == 16


# Steps in flight.


def test_the_token_in_flight_of_a_preempted_request_can_end_it() -> None:
    target = scheduler()
    a = add(target, "a", 4, 5)
    output = target.schedule()
    target._preempt(a, None)
    assert target.update(output, [[STOP]]) == [TokenOutput("a", [STOP], "stop", STOP)]
    assert not target.has_requests
    assert target.waiting == []


def test_a_token_in_flight_is_scheduled_as_if_it_were_known_but_none_past_the_end() -> None:
    target = scheduler()
    add(target, "a", 4, 3)
    steps = [target.schedule() for _ in range(4)]
    assert [lens(output) for output in steps] == [{"a": 4}, {"a": 1}, {"a": 1}, {}]
    outputs = [given for output in steps[:3] for given in target.update(output, [[7]])]
    assert outputs == [TokenOutput("a", [7]), TokenOutput("a", [7]), TokenOutput("a", [7], "length")]


def test_what_was_scheduled_past_a_stop_is_dropped() -> None:
    target = scheduler()
    add(target, "a", 4, 9)
    first, second = target.schedule(), target.schedule()
    assert target.update(first, [[STOP]]) == [TokenOutput("a", [STOP], "stop", STOP)]
    assert target.update(second, [[7]]) == []
    assert not target.has_requests


def test_a_preempted_request_waits_for_its_token_in_flight_before_it_resumes() -> None:
    target = scheduler()
    a = add(target, "a", 4, 9)
    first = target.schedule()
    target._preempt(a, None)
    assert target.schedule().admitted == []
    target.update(first, [[7]])
    (admitted,) = target.schedule().admitted
    assert admitted.token_ids == [1, 2, 3, 4, 7]


def test_a_block_is_found_as_soon_as_its_tokens_are_known() -> None:
    target = scheduler(block_size=4, caching=True)
    add(target, "a", 3, 9)
    steps = [target.schedule() for _ in range(3)]  # the second one fills the block
    assert target.kv_cache.pool.num_cached == 0
    target.update(steps[0], [[7]])
    assert target.kv_cache.pool.num_cached == 1
