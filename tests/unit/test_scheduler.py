"""The scheduler: who computes how many tokens in each step, and what happens when budget, rows or blocks run out."""

from collections.abc import Callable

import pytest
from scheduling import STOP, add, ids, lens, run, scheduler, step, steps_while, table

from jaxpage.ops.state_spec import KVSpec
from jaxpage.requests.request import Request, RequestStatus
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.wire import TokenOutput


@pytest.mark.parametrize("num_prompt_tokens", [31, 32, 33, 63, 64, 65])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks_and_gives_its_token_at_the_end(
    num_prompt_tokens: int,
) -> None:
    target = scheduler(budget=32)
    add(target, "a", num_prompt_tokens, 1)
    chunks, tokens = [], []
    for output, given in steps_while(target, lambda: target.has_requests):
        chunks.append(output.num_tokens)
        tokens.append(given)
    full, rest = divmod(num_prompt_tokens, 32)
    assert chunks == [32] * full + [rest] * (rest > 0)
    assert tokens[:-1] == [[]] * (len(chunks) - 1)
    assert tokens[-1] == [TokenOutput("a", [7], "length")]


def test_running_requests_are_served_before_a_waiting_prompt_takes_the_rest_of_the_budget() -> None:
    target = scheduler(budget=20)
    add(target, "a", 5)
    step(target)
    add(target, "b", 50)
    assert lens(step(target)[0]) == {"a": 1, "b": 19}
    assert lens(step(target)[0]) == {"a": 1, "b": 19}
    assert lens(step(target)[0]) == {"a": 1, "b": 12}
    assert lens(step(target)[0]) == {"a": 1, "b": 1}


def test_a_request_that_the_budget_does_not_reach_waits_for_the_next_step() -> None:
    target = scheduler(budget=10)
    add(target, "a", 10)
    add(target, "b", 3)
    assert lens(step(target)[0]) == {"a": 10}
    assert ids(target.waiting) == ["b"]
    assert lens(step(target)[0]) == {"a": 1, "b": 3}


def test_the_threshold_leaves_budget_for_others() -> None:
    target = scheduler(budget=16, threshold=6)
    add(target, "a", 30)
    add(target, "b", 30)
    add(target, "c", 2)
    assert lens(step(target)[0]) == {"a": 6, "b": 6, "c": 2}


def test_an_admitted_request_comes_in_full_and_only_once() -> None:
    target = scheduler(budget=4)
    request = add(target, "a", 6)
    admitted = step(target)[0].admitted
    assert [(a.request, a.row, a.token_ids, a.num_computed_tokens, a.block_tables) for a in admitted] == [
        (request, request.row, [1, 2, 3, 4, 5, 6], 0, [[1]])
    ]
    assert step(target)[0].admitted == []


def test_an_admission_does_not_change_when_the_request_grows() -> None:
    target = scheduler(block_size=2)
    add(target, "a", 2)
    admitted = step(target)[0].admitted[0]
    step(target)
    assert (admitted.token_ids, admitted.block_tables) == ([1, 2], [[1]])
    assert len(table(target, "a")) == 2


def test_blocks_that_are_new_after_the_admission_are_told_once_with_their_place() -> None:
    target = scheduler(block_size=4, budget=6, specs=[KVSpec(1, 8), KVSpec(1, 8, window=100)])
    request = add(target, "a", 9, 10)
    output, _ = step(target)
    assert output.new_blocks == []
    told = {
        (group, index): block_id
        for group, table in enumerate(output.admitted[0].block_tables)
        for index, block_id in enumerate(table)
    }
    counts = []
    for _ in range(6):
        output, _ = step(target)
        for row, group, index, block_id in output.new_blocks:
            assert row == request.row
            assert (group, index) not in told
            told[group, index] = block_id
        assert told == {
            (group, index): block_id
            for group, table in enumerate(target.kv_cache.tables("a"))
            for index, block_id in enumerate(table)
        }
        counts.append(len(output.new_blocks))
    assert counts == [2, 0, 0, 0, 2, 0]


def test_rows_are_unique_and_no_more_than_allowed_run() -> None:
    target = scheduler(seqs=3)
    for request_id in "abcde":
        add(target, request_id, 4)
    output, _ = step(target)
    assert sorted(output.rows) == [0, 1, 2]
    assert (ids(target.running), ids(target.waiting)) == (["a", "b", "c"], ["d", "e"])


def test_a_row_is_reused_as_soon_as_its_request_has_finished() -> None:
    target = scheduler(seqs=2)
    first = add(target, "a", 4, 1)
    add(target, "b", 4)
    last = add(target, "c", 4)
    before, _ = step(target)
    assert (first.row, last.row) == (-1, -1)
    after, _ = step(target)
    assert ids(after.requests) == ["b", "c"]
    assert after.rows == before.rows[::-1]


def test_all_rows_come_back_however_often_they_were_used() -> None:
    target = scheduler(seqs=3)
    for turn in range(5):
        for index in range(3):
            add(target, f"{turn}-{index}", 4, 2)
        output, _ = step(target)
        assert sorted(output.rows) == [0, 1, 2]
        run(target)


def test_a_finished_request_frees_everything_and_is_told_why() -> None:
    target = scheduler()
    limited = add(target, "a", 20, 1)
    assert step(target)[1] == [TokenOutput("a", [7], "length")]
    stopped = add(target, "b", 20)
    assert step(target, STOP)[1] == [TokenOutput("b", [STOP], "stop", STOP)]
    for request in (limited, stopped):
        assert (request.status, request.row) == (RequestStatus.FINISHED, -1)
        assert table(target, request.request_id) == []
    assert not target.has_requests
    assert (target.running, list(target.waiting), target.kv_cache.pool.usage) == ([], [], 0)


def test_an_id_can_be_used_again_after_its_request_has_finished() -> None:
    target = scheduler()
    add(target, "a", 4, 1)
    run(target)
    add(target, "a", 4, 1)
    assert len(run(target)) == 1


def test_an_idle_scheduler_schedules_nothing() -> None:
    output = scheduler().schedule()
    assert (output.num_tokens, output.requests, output.admitted, output.new_blocks) == (0, [], [], [])


# When blocks run out.


def crowded() -> tuple[Scheduler, Request, Request, Request]:
    """Two requests in 3 blocks of 4 tokens, both about to need their second block; a third one waits."""
    target = scheduler(blocks=3, block_size=4)
    a, b = add(target, "a", 4, 6), add(target, "b", 4, 6)
    step(target)
    c = add(target, "c", 2, 2)
    return target, a, b, c


def test_the_last_running_request_gives_way_when_blocks_run_out() -> None:
    target, a, b, _ = crowded()
    output, _ = step(target)
    assert lens(output) == {"a": 1}
    assert (a.status, b.status) == (RequestStatus.RUNNING, RequestStatus.PREEMPTED)
    assert (b.num_computed_tokens, b.row, table(target, "b")) == (0, -1, [])
    assert target.num_preemptions == 1


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    target, _, _, _ = crowded()
    assert target.kv_cache.can_fit(2)
    output, _ = step(target)
    assert target.num_preemptions == 1
    assert output.admitted == []
    assert target.kv_cache.can_fit(2)


def test_a_preempted_request_resumes_before_newer_ones() -> None:
    target, _, _, _ = crowded()
    step(target)
    assert ids(target.waiting) == ["b", "c"]
    order = [admitted.request.request_id for output in run(target) for admitted in output.admitted]
    assert order[:2] == ["b", "c"]


def test_a_resumed_request_recomputes_everything_it_knows() -> None:
    target, _, b, _ = crowded()
    step(target)
    known = list(b.token_ids)
    assert known == [1, 2, 3, 4, 7]
    *_, (output, _) = steps_while(target, lambda: b.status is RequestStatus.PREEMPTED)
    admitted = next(a for a in output.admitted if a.request is b)
    assert (admitted.token_ids, admitted.num_computed_tokens) == (known, 0)
    assert lens(output)["b"] == 5


def test_preemption_neither_loses_nor_doubles_tokens() -> None:
    target = scheduler(blocks=9, block_size=16)
    requests = [add(target, request_id, 5, 100) for request_id in "abc"]
    given: dict[str, list[int]] = {request_id: [] for request_id in "abc"}
    for _ in range(1000):
        output = target.schedule()
        sampled = [
            [100 + request.num_output_tokens] if request.num_computed_tokens == request.num_tokens else []
            for request in output.requests
        ]
        for token in target.update(output, sampled):
            assert isinstance(token, TokenOutput)
            given[token.sequence_id] += token.token_ids
    assert not target.has_requests
    assert target.num_preemptions > 0
    expected = list(range(100, 200))
    assert all(tokens == expected for tokens in given.values())
    assert all(request.token_ids[5:] == expected for request in requests)


def test_several_requests_give_way_to_one_and_keep_their_order() -> None:
    target = scheduler(blocks=4, block_size=4, threshold=8)
    add(target, "a", 16, 1)
    add(target, "b", 2, 5)
    add(target, "c", 2, 5)
    assert lens(step(target)[0]) == {"a": 8, "b": 2, "c": 2}
    assert lens(step(target)[0]) == {"a": 8}
    assert (target.num_preemptions, ids(target.waiting)) == (2, ["b", "c"])
    assert lens(step(target)[0]) == {"b": 3, "c": 3}


def test_the_request_that_needs_a_block_gives_way_itself_when_it_is_the_last() -> None:
    target = scheduler(blocks=3, block_size=4)
    add(target, "a", 6, 6)
    b = add(target, "b", 4, 6)
    step(target)
    output, _ = step(target)
    assert lens(output) == {"a": 1}
    assert b.status is RequestStatus.PREEMPTED
    assert b.num_tokens == 5


def test_a_waiting_request_is_not_admitted_unless_all_it_knows_fits() -> None:
    target = scheduler(blocks=4, block_size=4, budget=4)
    add(target, "a", 4, 3)
    step(target)
    b = add(target, "b", 16, 1)
    for _ in range(2):
        output, _ = step(target)
        assert lens(output) == {"a": 1}
        assert (b.status, table(target, "b")) == (RequestStatus.WAITING, [])
    assert lens(step(target)[0]) == {"b": 4}
    assert target.num_preemptions == 0


def test_a_request_behind_one_that_does_not_fit_does_not_overtake_it() -> None:
    target = scheduler(blocks=4, block_size=4)
    add(target, "a", 8, 2)
    step(target)
    add(target, "big", 12, 1)
    add(target, "small", 1, 1)
    assert lens(step(target)[0]) == {"a": 1}
    assert lens(step(target)[0]) == {"big": 12, "small": 1}


def test_a_request_that_fills_the_pool_alone_runs_to_its_end() -> None:
    target = scheduler(blocks=4, block_size=4)
    request = add(target, "a", 10, 7)
    run(target)
    assert (request.num_output_tokens, target.num_preemptions) == (7, 0)


def test_a_request_that_could_never_fit_is_refused_on_arrival() -> None:
    target = scheduler(blocks=4, block_size=4)
    with pytest.raises(AssertionError, match="a needs more blocks than there are"):
        add(target, "a", 10, 8)
    assert not target.has_requests


def test_an_id_in_use_is_refused() -> None:
    target = scheduler()
    add(target, "a", 4)
    with pytest.raises(AssertionError, match="request id a is in use"):
        add(target, "a", 4)


# Aborts.


def waiting(target: Scheduler) -> Request:
    return add(target, "x", 6, 10)


def amid_its_prompt(target: Scheduler) -> Request:
    request = add(target, "x", 20, 10)
    step(target)
    assert 0 < request.num_computed_tokens < 20
    return request


def generating(target: Scheduler) -> Request:
    request = add(target, "x", 6, 10)
    step(target)
    step(target)
    assert request.num_output_tokens == 2
    return request


def preempted(target: Scheduler) -> Request:
    add(target, "older", 12, 10)
    step(target)
    request = add(target, "x", 16, 20)
    for _ in steps_while(target, lambda: request.status is not RequestStatus.PREEMPTED):
        pass
    return request


@pytest.mark.parametrize("state", [waiting, amid_its_prompt, generating, preempted])
def test_an_abort_frees_everything_in_every_state(state: Callable[[Scheduler], Request]) -> None:
    target = scheduler(blocks=9, block_size=4, seqs=2, budget=16)
    request = state(target)
    assert target.abort("x") is request
    target.kv_cache.check_integrity()
    assert (request.status, request.row) == (RequestStatus.FINISHED, -1)
    assert table(target, "x") == []
    assert request not in target.running
    assert request not in target.waiting
    assert target.abort("x") is None
    run(target)
    assert target.kv_cache.pool.usage == 0
    for request_id in "pq":
        add(target, request_id, 2, 1)
    assert sorted(target.schedule().rows) == [0, 1]


def test_aborting_an_unknown_or_finished_request_changes_nothing() -> None:
    target = scheduler()
    add(target, "a", 4, 1)
    add(target, "b", 4, 2)
    step(target)
    assert target.abort("a") is None
    assert target.abort("nobody") is None
    assert ids(target.running) == ["b"]


def test_the_token_of_a_request_aborted_during_the_step_is_dropped() -> None:
    target = scheduler()
    a = add(target, "a", 4)
    add(target, "b", 4)
    output = target.schedule()
    target.abort("a")
    assert target.update(output, [[7], [8]]) == [TokenOutput("b", [8])]
    assert a.num_output_tokens == 0


def test_the_freed_blocks_of_an_abort_let_the_next_one_in() -> None:
    target = scheduler(blocks=4, block_size=4)
    add(target, "a", 12, 5)
    step(target)
    add(target, "b", 12, 1)
    assert lens(step(target)[0]) == {"a": 1}
    target.abort("a")
    assert lens(step(target)[0]) == {"b": 12}


@pytest.mark.parametrize(("budget", "threshold"), [(4, 0), (7, 3), (16, 5), (64, 0)])
def test_no_step_exceeds_the_budget_or_the_threshold_and_none_is_empty(budget: int, threshold: int) -> None:
    target = scheduler(blocks=20, block_size=4, seqs=4, budget=budget, threshold=threshold)
    for index in range(10):
        add(target, str(index), 1 + 7 * index % 40, 1 + 5 * index % 12)
    outputs = run(target)
    assert all(1 <= output.num_tokens <= budget for output in outputs)
    assert all(1 <= n <= (threshold or budget) for output in outputs for n in output.query_lens)
    assert all(len(set(output.rows)) == len(output.rows) for output in outputs)
