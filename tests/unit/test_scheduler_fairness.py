"""Fairness: a flood of long prompts starves nobody, and nobody waits longer than what came before takes."""

import itertools

from scheduling import add, ids, lens, scheduler, step

from jaxpage.scheduler.scheduler import Scheduler

SHORT_TOKENS = 5
"""What each short request generates."""


def slowest_short_request(target: Scheduler, *, steps: int = 200) -> int:
    """Most steps that a short request takes from its arrival to its end amid a flood of long prompts.

    In every step a prompt of 2,000 tokens arrives, which is more than the budget of one; in every tenth a short one.
    """
    begun: dict[str, int] = {}
    took = [0]
    for now in range(steps):
        add(target, f"long-{now}", 2000, 2)
        if now % 10 == 0:
            begun[f"short-{now}"] = now
            add(target, f"short-{now}", 10, SHORT_TOKENS)
        for given in step(target)[1]:
            if given.finish_reason is not None and given.sequence_id in begun:
                took.append(now - begun.pop(given.sequence_id) + 1)
    return max(*took, *(steps - arrived for arrived in begun.values()))


def test_a_flood_of_long_prompts_does_not_starve_short_ones_when_few_of_them_may_be_computed_at_once() -> None:
    target = scheduler(blocks=5000, seqs=32, budget=1024, threshold=256, max_partial=2)
    assert slowest_short_request(target) <= SHORT_TOKENS + 2


def test_without_that_limit_the_same_flood_starves_them() -> None:
    target = scheduler(blocks=5000, seqs=32, budget=1024, threshold=256)
    assert slowest_short_request(target) > 50


def test_a_long_prompt_at_a_time_is_computed_at_full_speed_while_short_ones_pass() -> None:
    target = scheduler(budget=64, threshold=32, max_partial=1)
    add(target, "a", 100)
    add(target, "b", 100)
    add(target, "c", 10)
    assert lens(step(target)[0]) == {"a": 32, "c": 10}
    assert lens(step(target)[0]) == {"a": 32, "c": 1}
    # What is left of a takes more than a step no longer, once this one is computed: b may begin.
    assert lens(step(target)[0]) == {"a": 32, "c": 1, "b": 31}
    assert lens(step(target)[0]) == {"a": 4, "c": 1, "b": 32}


def test_long_prompts_admitted_in_one_step_count_for_each_other() -> None:
    target = scheduler(budget=1024, threshold=32, max_partial=2)
    for request_id in "abcd":
        add(target, request_id, 100)
    assert lens(step(target)[0]) == {"a": 32, "b": 32}
    assert ids(target.waiting) == ["c", "d"]


def test_long_prompts_do_not_wait_for_short_ones_for_ever() -> None:
    target = scheduler(seqs=4, budget=64, threshold=16, max_partial=1)
    long = add(target, "long", 200, 1)
    for now in itertools.count():
        add(target, f"short-{now}", 10, 2)
        step(target)
        if long.is_finished:
            break
        assert now < 30


def test_a_long_prompt_that_waits_its_turn_keeps_its_place() -> None:
    target = scheduler(seqs=3, budget=64, threshold=16, max_partial=1)
    add(target, "a", 60, 1)
    add(target, "b", 60, 1)
    for index in range(12):
        add(target, f"short-{index}", 5, 20)
    while "b" in ids(target.waiting):
        step(target)
    assert len(target.waiting) >= 10
