"""Schedulers to test, requests for them, and steps without a device."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec, StateSpec
from jaxpage.requests.beam_group import BeamGroup
from jaxpage.requests.beam_search import BeamSearch
from jaxpage.requests.request import Request
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.scheduler.policies import Policy
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import SchedulerOutput
from jaxpage.wire import SequenceOutput, TokenLogprobs, sequence_id

STOP = 99


def scheduler(
    *,
    blocks: int = 1000,
    block_size: int = 16,
    seqs: int = 8,
    budget: int = 1024,
    threshold: int = 0,
    max_partial: int = 0,
    caching: bool = False,
    policy: Policy | None = None,
    specs: Sequence[StateSpec] = (KVSpec(1, 8),),
) -> Scheduler:
    """A scheduler over `blocks` usable blocks."""
    return Scheduler(
        KVCacheManager(
            blocks + 1,
            plan_layout([[spec] for spec in specs], block_size),
            max_step_tokens=threshold or budget,
            enable_prefix_caching=caching,
        ),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=max_partial,
        policy=policy,
    )


arrivals = itertools.count()


def add(
    target: Scheduler,
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int = 100,
    *,
    n: int = 1,
    priority: int = 0,
    start: int = 1,
    skip_reading: bool = False,
) -> Request:
    """Queue a request whose prompt is `start`, `start + 1`, ..., and its `n - 1` forks, named by their index."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP,), skip_reading_prefix_cache=skip_reading, n=n)
    prompt = list(range(start, start + num_prompt_tokens))
    arrival = next(arrivals)
    request, *forks = [
        Request(
            sequence_id(request_id, index),
            prompt,
            params,
            seed=index,
            max_tokens=max_tokens,
            stop_token_ids=frozenset({STOP}),
            arrival=arrival,
            index=index,
            priority=priority,
        )
        for index in range(n)
    ]
    for fork in forks:
        fork.prefix = request
    request.forks = forks
    target.add(request)
    return request


def add_search(target: Scheduler, request_id: str, num_prompt_tokens: int, width: int, max_tokens: int) -> BeamGroup:
    """Queue a beam search whose prompt is 1, 2, ..."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    search = BeamSearch(BeamSearchParams(beam_width=width, max_tokens=max_tokens), frozenset())
    prompt, arrival = list(range(1, num_prompt_tokens + 1)), next(arrivals)
    beams = [
        Request(
            sequence_id(request_id, index),
            prompt,
            params,
            seed=0,
            max_tokens=max_tokens,
            stop_token_ids=frozenset(),
            arrival=arrival,
            index=index,
            num_logprobs=search.num_candidates,
        )
        for index in range(width)
    ]
    group = BeamGroup(search, beams)
    target.add(beams[0])
    return group


def sample(output: SchedulerOutput, token_id: int = 7) -> list[list[int]]:
    """What a device gives: a token to every row whose known tokens are all computed by now, else none."""
    return [[token_id] if request.num_computed_tokens == request.num_tokens else [] for request in output.requests]


def alternatives(output: SchedulerOutput) -> list[list[TokenLogprobs] | None]:
    """What a device gives to those who ask for it: tokens 10, 11, ..., each half as probable as the one before."""
    return [
        [TokenLogprobs(0.0, 1, [(10 + i, -0.7 * (i + 1)) for i in range(request.num_logprobs)])]
        if request.num_logprobs >= 0
        else None
        for request in output.requests
    ]


def step(target: Scheduler, token_id: int = 7) -> tuple[SchedulerOutput, list[SequenceOutput]]:
    output = target.schedule()
    tokens = target.update(output, sample(output, token_id), alternatives(output))
    target.kv_cache.check_integrity()
    return output, tokens


def steps_while(target: Scheduler, going: Callable[[], bool]) -> Iterator[tuple[SchedulerOutput, list[SequenceOutput]]]:
    for _ in range(1000):
        if not going():
            return
        yield step(target)
    pytest.fail("the scheduler makes no progress")


def run(target: Scheduler) -> list[SchedulerOutput]:
    """Step until nobody is left."""
    return [output for output, _ in steps_while(target, lambda: target.has_requests)]


def lens(output: SchedulerOutput) -> dict[str, int]:
    return {r.request_id: n for r, n in zip(output.requests, output.query_lens, strict=True)}


def table(target: Scheduler, request_id: str) -> list[int]:
    """The block table of a request that has a single one."""
    (only,) = target.kv_cache.tables(request_id)
    return only


def ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
