"""Drafts in the scheduler: room is made for as many as there may be, and what becomes of them is learnt later."""

import pytest
from scheduling import STOP, add, lens, scheduler, table

from jaxpage.requests.request import Request
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import SchedulerOutput
from jaxpage.wire import TokenLogprobs, TokenOutput

MAX_DRAFTS = 3


def speculated(target: Scheduler, request_id: str = "a", num_prompt: int = 5, max_tokens: int = 100) -> Request:
    """A request that may have drafts, behind its prompt's step, which has proposed `MAX_DRAFTS`."""
    [request] = all_speculated(target, {request_id: (num_prompt, max_tokens)})
    return request


def all_speculated(target: Scheduler, requests: dict[str, tuple[int, int]]) -> list[Request]:
    """The same for several, whose prompts are computed in one step; by name (prompt tokens, max_tokens)."""
    added = [add(target, request_id, *lengths) for request_id, lengths in requests.items()]
    for request in added:
        request.max_drafts = MAX_DRAFTS
    take(target, target.schedule(), {}, MAX_DRAFTS)
    return added


def take(
    target: Scheduler, output: SchedulerOutput, drawn: dict[str, list[int]], num_proposed: int
) -> list[TokenOutput]:
    """What the device says of a step: what it has drawn by request, [7] for others, and drafts for all."""
    tokens = [drawn.get(request.request_id, [7]) for request in output.requests]
    found = target.update(output, tokens, None, None, [num_proposed] * len(tokens))
    target.kv_cache.check_integrity()
    return [given for given in found if isinstance(given, TokenOutput)]


def test_a_step_has_room_for_the_last_token_and_the_drafts_behind_it() -> None:
    target = scheduler(block_size=4)
    request = speculated(target)
    output = target.schedule()
    assert (lens(output), output.num_drafts) == ({"a": 4}, {"a": 3})
    assert [new[2:] for new in output.new_blocks] == [(2, 3)]  # positions 5 to 8
    assert (request.num_surely_computed_tokens, request.num_computed_tokens) == (6, 9)


def test_rejected_drafts_are_computed_no_further() -> None:
    target = scheduler()
    request = speculated(target)
    [given] = take(target, target.schedule(), {"a": [1, 5]}, 2)
    assert given.token_ids == [1, 5]
    assert (request.num_tokens, request.num_computed_tokens, request.num_in_flight) == (8, 7, 0)
    assert lens(target.schedule()) == {"a": 3}


def test_with_a_step_in_flight_there_is_room_for_as_many_as_there_may_be() -> None:
    target = scheduler()
    request = speculated(target)
    first, second = target.schedule(), target.schedule()
    assert lens(second) == {"a": 4}
    assert (request.num_surely_computed_tokens, request.num_computed_tokens) == (7, 13)
    take(target, first, {"a": [1, 2, 3, 4]}, 0)
    assert (request.num_surely_computed_tokens, request.num_computed_tokens) == (10, 13)
    take(target, second, {"a": [9]}, 1)
    assert (request.num_surely_computed_tokens, request.num_computed_tokens) == (10, 10)


def test_where_the_last_known_step_has_proposed_nothing_the_next_one_has_no_room_for_drafts() -> None:
    target = scheduler()
    speculated(target)
    take(target, target.schedule(), {"a": [1]}, 0)
    first, second = target.schedule(), target.schedule()
    assert (lens(first), lens(second)) == ({"a": 1}, {"a": 1})
    take(target, first, {}, 2)
    assert lens(target.schedule()) == {"a": 4}  # one step is in flight, and may propose more


def test_log_probabilities_end_with_the_tokens() -> None:
    target = scheduler()
    speculated(target)
    output = target.schedule()
    found = [TokenLogprobs(-1.0 * place, 1, []) for place in range(3)]
    [given] = target.update(output, [[1, STOP, 3]], [found], None, [0])
    assert isinstance(given, TokenOutput)
    assert (given.token_ids, given.logprobs, given.stop_token_id) == ([1, STOP], found[:2], STOP)


@pytest.mark.parametrize(
    ("drawn", "given", "reason"),
    [
        ([1, 2, 3], [1, 2, 3], "length"),
        ([1, STOP, 3], [1, STOP], "stop"),
        ([1, 2, STOP], [1, 2, STOP], "stop"),
        ([STOP, STOP], [STOP], "stop"),
    ],
)
def test_b11_a_stop_token_within_a_run_that_reaches_max_tokens_cuts_it(
    drawn: list[int], given: list[int], reason: str
) -> None:
    target = scheduler()
    speculated(target, max_tokens=4)
    output = target.schedule()
    assert lens(output) == {"a": 3}
    [told] = take(target, output, {"a": drawn}, 0)
    assert (told.token_ids, told.finish_reason) == (given, reason)
    assert not target.has_requests


def test_no_step_is_scheduled_once_the_last_token_is_surely_in_flight() -> None:
    target = scheduler()
    speculated(target, max_tokens=3)
    first, second = target.schedule(), target.schedule()
    assert (lens(first), lens(second)) == ({"a": 2}, {"a": 1})  # the fewest that they give are two tokens
    assert target.schedule().requests == []
    [given] = take(target, first, {"a": [1, 2]}, 0)
    assert given.finish_reason == "length"
    assert take(target, second, {"a": []}, 0) == []


def test_drafts_take_only_what_is_left_when_all_that_run_have_a_token() -> None:
    target = scheduler(seqs=4, budget=6)
    all_speculated(target, dict.fromkeys("abcd", (1, 100)))
    assert lens(target.schedule()) == {"a": 3, "b": 1, "c": 1, "d": 1}


def test_drafts_leave_half_of_the_budget_to_those_that_wait() -> None:
    target = scheduler(budget=12)
    all_speculated(target, dict.fromkeys("ab", (6, 100)))
    add(target, "c", 30)
    assert lens(target.schedule()) == {"a": 4, "b": 2, "c": 6}


def test_nobody_is_preempted_for_a_draft() -> None:
    target = scheduler(blocks=3, block_size=4)
    all_speculated(target, dict.fromkeys("ab", (3, 9)))
    output = target.schedule()
    assert (lens(output), target.num_preemptions) == ({"a": 4, "b": 1}, 0)
    assert [new[0] for new in output.new_blocks] == [target.running[0].row]


def test_a_draft_is_found_by_nobody_until_it_is_verified() -> None:
    target = scheduler(block_size=4, caching=True)
    request = speculated(target, num_prompt=6)
    guessed = [*range(1, 7), 7, 8, 9]
    output = target.schedule()  # positions 6 to 9: the second block would be full
    assert lens(output) == {"a": 4}
    other = add(target, "b", 1)
    other.prompt_token_ids[:] = other.token_ids[:] = guessed
    target.schedule()
    assert other.num_cached_tokens == 4
    take(target, output, {"a": [8, 9, 1]}, 0)
    assert request.token_ids == [*guessed, 1]
    again = add(target, "c", 1)
    again.prompt_token_ids[:] = again.token_ids[:] = guessed
    target.schedule()
    assert again.num_cached_tokens == 8


def test_acceptance_is_counted_by_position_and_only_of_drafts_that_were_there() -> None:
    target = scheduler()
    speculated(target)
    first, second = target.schedule(), target.schedule()
    take(target, first, {"a": [1, 2, 3]}, 1)  # two of three kept
    take(target, second, {"a": [4, 5]}, 0)  # room for three, one proposed, and kept
    assert target.acceptance.stats() == {
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 4,
        "spec_decode_num_accepted_tokens": 3,
        "spec_decode_num_accepted_tokens_per_pos:0": 2,
        "spec_decode_num_accepted_tokens_per_pos:1": 1,
        "spec_decode_num_accepted_tokens_per_pos:2": 0,
    }


def test_a_request_is_scheduled_as_long_as_it_may_not_have_reached_its_end() -> None:
    target = scheduler()
    request = speculated(target, max_tokens=6)
    assert [lens(target.schedule()) for _ in range(4)] == [{"a": 4}, {"a": 4}, {"a": 3}, {"a": 2}]
    assert request.num_surely_computed_tokens == 9
    assert table(target, "a") == [1]  # of 16 tokens; 10 are the most that it computes


def test_the_last_token_is_not_found_in_the_cache_though_a_step_in_flight_had_room_for_it() -> None:
    target = scheduler(block_size=4, caching=True)
    speculated(target, max_tokens=3)
    first, _ = target.schedule(), target.schedule()
    take(target, first, {"a": [8, 9]}, 0)
    answered = add(target, "b", 9)
    answered.prompt_token_ids[:] = answered.token_ids[:] = [1, 2, 3, 4, 5, 7, 8, 9, 10]
    target.schedule()
    assert answered.num_cached_tokens == 4


def test_a_resumed_request_has_no_drafts() -> None:
    target = scheduler()
    speculated(target)
    target.preempt_all()
    assert [lens(target.schedule()) for _ in range(2)] == [{"a": 6}, {"a": 1}]
