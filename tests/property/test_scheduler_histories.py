"""Whatever happens to requests, in whatever order: each gets what it would get alone, and nothing is lost or kept."""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import VOCAB_SIZE, Device, Results, expected_beams, expected_tokens, layers_of

from jaxpage.kv_cache.hashing import ExtraKeys
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.spec import max_request_tokens, num_blocks_for, plan_layout
from jaxpage.ops.state_spec import KVSpec, RecurrentSpec, StateSpec
from jaxpage.requests.beam_group import BeamGroup
from jaxpage.requests.beam_search import BeamSearch
from jaxpage.requests.request import Request, RequestStatus
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.scheduler.policies import load_policy
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import SchedulerOutput
from jaxpage.wire import BeamOutput, BeamSequence, sequence_id

FULL, WINDOW, CHUNK = KVSpec(1, 8), KVSpec(1, 8, window=5), KVSpec(1, 8, chunk=6)
SMALL_WINDOW = KVSpec(1, 4, window=7)
"""Keeps half as much per token: its blocks are twice as large."""
RECURRENT, LARGE = RecurrentSpec((2, 4), "float32", (None, None)), RecurrentSpec((60,), "bfloat16", (None,))
"""A checkpoint of the one fits into a small block, one of the other takes several."""
KINDS: dict[str, tuple[StateSpec, ...]] = {
    "full": (FULL, FULL),
    "window": (WINDOW, WINDOW),
    "chunk": (CHUNK,),
    "full and windows": (WINDOW, FULL, WINDOW, WINDOW),
    "full and chunk": (CHUNK, FULL),
    "full and a window of one": (FULL, KVSpec(1, 8, window=1)),
    "unequal blocks": (FULL, SMALL_WINDOW),
    "all": (SMALL_WINDOW, CHUNK, FULL),
    "recurrent": (RECURRENT, LARGE),
    "full and recurrent": (RECURRENT, FULL, RECURRENT, RECURRENT),
    "window and recurrent": (WINDOW, LARGE),
    "all and recurrent": (SMALL_WINDOW, RECURRENT, FULL, LARGE),
}
BASES = ([0] * 24, [0, 1] * 12, [0, 0, 0, 0, 0, 1, 2, 0] * 3)
"""Prompts begin alike, so that they share blocks."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How an engine is made."""

    specs: tuple[StateSpec, ...] = (FULL,)
    blocks: int = 40
    """Usable blocks."""
    block_size: int = 4
    max_num_seqs: int = 4
    budget: int = 64
    threshold: int = 0
    max_partial: int = 0
    caching: bool = True
    policy: str = "fcfs"
    depth: int = 1
    """Steps that are scheduled before the first of them is updated."""
    max_drafts: int = 0
    """Drafts that the device may propose for a sequence."""

    @property
    def max_step_tokens(self) -> int:
        return max(self.threshold or self.budget, 1 + self.max_drafts * self.depth)

    @property
    def longest(self) -> int:
        """Most tokens whose KV a request may need."""
        return self.longest_of(1)

    def longest_of(self, num_beams: int) -> int:
        layout = plan_layout(layers_of(self.specs), self.block_size)
        return min(max_request_tokens(layout, self.blocks // num_beams, self.max_step_tokens), 40)


@dataclass
class Live:
    """A sequence or a search that has not ended."""

    request: Request
    search: tuple[BeamSearchParams, frozenset[int]] | None = None
    received: list[int] = field(default_factory=list)


class Engine:
    """Scheduler and device in step, with everything checked that must hold after each."""

    def __init__(self, options: Options) -> None:
        self.options = options
        layout = plan_layout(layers_of(options.specs), options.block_size)
        self.layout = layout
        self.kv_cache = KVCacheManager(
            options.blocks + 1,
            layout,
            max_step_tokens=options.max_step_tokens,
            enable_prefix_caching=options.caching,
        )
        self.policy = load_policy(options.policy)
        self.scheduler = Scheduler(
            self.kv_cache,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.budget,
            long_prefill_token_threshold=options.threshold,
            max_num_partial_prefills=options.max_partial,
            policy=self.policy,
        )
        self.device = Device(options.max_num_seqs, layout, options.max_drafts)
        self.live: dict[str, Live] = {}
        """In order of arrival."""
        self.finished: list[list[int]] = []
        """Prompts with their outputs, in order of their ends."""
        self.outputs: dict[str, list[int]] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.num_steps = 0
        self._arrivals = 0
        self._in_flight: deque[tuple[SchedulerOutput, Results]] = deque()

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        stops: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        priority: int = 0,
        salt: str | None = None,
        skip_reading: bool = False,
    ) -> str:
        """Queue a request of `n` sequences, cut to what fits. Returns its name."""
        prompt = prompt[: self.options.longest]
        max_tokens = min(max_tokens, self.options.longest + 1 - len(prompt))
        params = SamplingParams(
            temperature=0 if n == 1 else 1,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            skip_reading_prefix_cache=skip_reading,
        )
        first, *forks = self._sequences(prompt, params, stops, n, priority, salt)
        for fork in forks:
            fork.prefix = first
        first.forks = forks
        for sequence in (first, *forks):
            sequence.max_drafts = self.options.max_drafts
            self.live[sequence.request_id] = Live(sequence)
            self.outputs[sequence.request_id] = []
        self.scheduler.add(first)
        return first.request_id

    def add_search(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        *,
        eos: frozenset[int] = frozenset(),
        priority: int = 0,
        salt: str | None = None,
    ) -> str:
        """Queue a search, narrower if there are not as many rows; its prompt and output are cut to what fits."""
        width = params.beam_width
        longest = self.options.longest_of(width)
        while width > 1 and (width > self.options.max_num_seqs or longest < 1):
            width -= 1
            longest = self.options.longest_of(width)
        prompt = prompt[:longest]
        params = BeamSearchParams(
            beam_width=width,
            max_tokens=min(params.max_tokens, longest + 1 - len(prompt)),
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        search = BeamSearch(params, eos)
        sampling = SamplingParams(temperature=0, max_tokens=params.max_tokens)
        beams = self._sequences(prompt, sampling, eos, width, priority, salt)
        for beam in beams:
            beam.num_logprobs = search.num_candidates
        BeamGroup(search, beams)
        self.live[beams[0].request_id] = Live(beams[0], search=(params, eos))
        self.scheduler.add(beams[0])
        return beams[0].request_id

    def abort(self, index: int) -> None:
        """Abort one of the live sequences or searches, if there are any."""
        if self.live:
            request_id = list(self.live)[index % len(self.live)]
            assert self.scheduler.abort(request_id) is self.live.pop(request_id).request

    def reset_prefix_cache(self) -> None:
        unused = self.kv_cache.pool.usage == 0
        assert self.kv_cache.reset_prefix_cache() == unused
        assert not unused or self.kv_cache.pool.num_cached == 0

    def step(self, abort_during: int | None = None) -> None:
        """Schedule and run a step, then take in what is due."""
        preemptions_before = self.scheduler.num_preemptions
        output = self.scheduler.schedule()
        self._check_step(output, preempted=self.scheduler.num_preemptions > preemptions_before)
        if output.requests:
            self.num_steps += 1
            self._in_flight.append((output, self.device.run(output)))
            self._check_device(output)
        if abort_during is not None:
            self.abort(abort_during)
        if self._in_flight and (len(self._in_flight) == self.options.depth or not output.requests):
            self._update(*self._in_flight.popleft())
        self.check()

    def drain(self) -> None:
        """Step until every request has ended, which takes a bounded number of steps."""
        for _ in range(5_000):
            if not self.live and not self._in_flight:
                break
            self.step()
        assert not self.live, "the scheduler makes no progress"
        assert not self.scheduler.has_requests
        assert self.kv_cache.pool.usage == 0
        assert sorted(self.scheduler._free_rows) == list(range(self.options.max_num_seqs))

    def _sequences(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: frozenset[int],
        count: int,
        priority: int,
        salt: str | None,
    ) -> list[Request]:
        self._arrivals += 1
        return [
            Request(
                sequence_id(f"r{self._arrivals}", index),
                prompt,
                params,
                seed=1000 * self._arrivals + index,
                max_tokens=params.max_tokens or 0,
                stop_token_ids=stops,
                arrival=self._arrivals,
                index=index,
                priority=priority,
                extra_keys=None if salt is None else ExtraKeys(cache_salt=salt),
            )
            for index in range(count)
        ]

    def _update(self, output: SchedulerOutput, results: Results) -> None:
        for given in self.scheduler.update(output, *results):
            live = self.live[given.sequence_id]
            if isinstance(given, BeamOutput):
                assert live.search is not None
                expected = expected_beams(self.options.specs, live.request, *live.search)
                assert given.sequences == [
                    BeamSequence(list(beam.token_ids), beam.cumulative_logprob, beam.score, beam.finish_reason)
                    for beam in expected
                ]
                self._end(live)
                continue
            if not live.received:
                assert given.num_cached_tokens < live.request.num_prompt_tokens
                if not live.request.reads_prefix_cache and live.request.prefix is None:
                    assert given.num_cached_tokens == 0
                self.num_cached_tokens[given.sequence_id] = given.num_cached_tokens
            live.received += given.token_ids
            self.outputs[given.sequence_id] = live.received
            if given.finish_reason is not None:
                assert (live.received, given.finish_reason) == expected_tokens(self.options.specs, live.request)
                self._end(live)

    def _end(self, live: Live) -> None:
        assert live.request.status is RequestStatus.FINISHED
        self.finished.append(live.request.prompt_token_ids + live.received)
        del self.live[live.request.request_id]

    def _check_step(self, output: SchedulerOutput, *, preempted: bool) -> None:
        options = self.options
        if not output.requests:
            assert not self.live or self._in_flight, "a step must do something when there is something to do"
            assert (output.row_forks, output.block_copies, output.admitted) == ([], [], []), "a step is not run"
            assert (output.saves, output.loads) == ([], []), "a step is not run"
        assert output.num_tokens <= options.budget
        assert all(1 <= query_len <= (options.threshold or options.budget) for query_len in output.query_lens)
        assert len(set(output.rows)) == len(output.rows)
        assert not (preempted and output.admitted), "a request was admitted in a step that preempted"
        assert output.rows == [request.row for request in output.requests]
        # What a plan has room for.
        targets = [fork.target for fork in output.row_forks]
        assert len(set(targets)) == len(targets)
        assert len(output.block_copies) <= options.max_num_seqs * len(self.layout.groups)
        written = [target for _, target in output.block_copies]
        assert len(set(written)) == len(written)
        assert not any(source in written[:index] for index, (source, _) in enumerate(output.block_copies))
        most = sum(len(output.rows) + output.num_tokens // group.block_size for group in self.layout.groups)
        assert len(output.new_blocks) <= most

    def _check_device(self, output: SchedulerOutput) -> None:
        """Whether the device knows the scheduled requests as the host does."""
        for request in output.requests:
            row = self.device.rows[request.row]
            assert row.num_computed_tokens <= request.num_computed_tokens
            assert row.num_computed_tokens >= min(request.num_surely_computed_tokens, request.max_computed_tokens)
            known = min(request.num_tokens, request.num_computed_tokens)  # those in flight follow
            assert row.token_ids[:known] == request.token_ids[:known]
            for group, (known, table) in enumerate(
                zip(row.tables, self.kv_cache.tables(request.request_id), strict=True)
            ):
                size = self.layout.groups[group].block_size
                needed = -(-min(request.num_computed_tokens, request.max_computed_tokens) // size)
                assert len(table) == needed or (len(table) > needed and request.max_drafts)
                assert all(there in (0, here) for here, there in zip(known, table, strict=False))

    def check(self) -> None:
        """What holds between steps."""
        self.kv_cache.check_integrity()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert waiting == sorted(waiting, key=self.policy.key)
        known = [*running, *waiting, *(fork for request in (*running, *waiting) for fork in request.forks)]
        assert len({id(request) for request in known}) == len(known)
        heads = [request for request in known if request.group is None or request is request.group.members[0]]
        assert {request.request_id for request in heads} == self.live.keys()
        owners = [r for head in heads for r in ([head] if head.group is None else head.group.members)]
        assert all(0 <= owner.num_drafts_in_flight <= owner.num_in_flight for owner in owners)
        rows = [request.row for request in owners if request.row >= 0]
        assert sorted([*rows, *self.scheduler._free_rows]) == list(range(self.options.max_num_seqs))
        for head in heads:
            if head in running:
                members = [head] if head.group is None else head.group.live
                first = running.index(head)
                assert running[first : first + len(members)] == members, "the beams of a search do not stand together"
                assert all(request.status is RequestStatus.RUNNING for request in members)
            else:
                assert head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                assert (head.row, head.num_computed_tokens) == (-1, 0)
                assert self.kv_cache.tables(head.request_id) == [[] for _ in self.layout.groups]


prompts = st.builds(
    lambda base, length, tail: base[:length] + tail,
    st.sampled_from(BASES),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
salts = st.sampled_from([None, None, None, "a", "bb"])
stop_sets = st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1)
priorities = st.integers(-1, 1)


@st.composite
def engine_options(draw: st.DrawFn) -> Options:
    """Engines that are too small for what comes, or barely large enough."""
    specs = KINDS[draw(st.sampled_from(sorted(KINDS)))]
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_num_seqs = draw(st.sampled_from([1, 2, 3, 4, 5, 6]))
    budget = max_num_seqs + draw(st.integers(0, 12))
    threshold = draw(st.one_of(st.just(0), st.integers(1, budget)))
    max_drafts = draw(st.sampled_from([0, 0, 1, 4]))
    max_step_tokens = max(threshold or budget, 1 + 2 * max_drafts)
    needed = num_blocks_for(plan_layout(layers_of(specs), block_size), draw(st.integers(4, 16)), max_step_tokens)
    return Options(
        specs=specs,
        blocks=max(1, needed) + draw(st.integers(0, 4)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        budget=budget,
        threshold=threshold,
        max_partial=draw(st.integers(0, 2)) if threshold else 0,
        caching=draw(st.sampled_from([True, True, False])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        depth=draw(st.sampled_from([1, 1, 2])),
        max_drafts=max_drafts,
    )


class SchedulerHistories(RuleBasedStateMachine):
    """Requests come, fork, search, are aborted and computed in any order, in a pool that is too small for them."""

    @initialize(options=engine_options())
    def start(self, options: Options) -> None:
        self.engine = Engine(options)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 16),
        n=st.sampled_from([1, 1, 2, 3]),
        stops=stop_sets,
        min_tokens=st.sampled_from([0, 0, 3]),
        priority=priorities,
        salt=salts,
        skip_reading=st.sampled_from([False, False, False, True]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        n: int,
        stops: frozenset[int],
        min_tokens: int,
        priority: int,
        salt: str | None,
        skip_reading: bool,
    ) -> None:
        self.engine.add(
            prompt,
            max_tokens,
            n=n,
            stops=stops,
            min_tokens=min_tokens,
            priority=priority,
            salt=salt,
            skip_reading=skip_reading,
        )

    @rule(
        prompt=prompts,
        width=st.integers(1, 3),
        max_tokens=st.integers(1, 8),
        early_stopping=st.sampled_from([False, True, "never"]),
        eos=stop_sets,
        priority=priorities,
        salt=salts,
    )
    def add_a_search(
        self,
        prompt: list[int],
        width: int,
        max_tokens: int,
        early_stopping: bool,
        eos: frozenset[int],
        priority: int,
        salt: str | None,
    ) -> None:
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, early_stopping=early_stopping)
        self.engine.add_search(prompt, params, eos=eos, priority=priority, salt=salt)

    @precondition(lambda self: self.engine.finished)
    @rule(index=st.integers(0, 9), more=st.lists(st.integers(0, 2), max_size=3), max_tokens=st.integers(1, 6))
    def add_what_follows_on_an_answer(self, index: int, more: list[int], max_tokens: int) -> None:
        self.engine.add(self.engine.finished[index % len(self.engine.finished)] + more, max_tokens)

    @precondition(lambda self: self.engine.live)
    @rule(index=st.integers(0, 10))
    def abort(self, index: int) -> None:
        self.engine.abort(index)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.engine.live)
    @rule(index=st.integers(0, 10))
    def step_with_an_abort_in_its_midst(self, index: int) -> None:
        self.engine.step(abort_during=index)

    @rule()
    def reset_the_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def everything_is_consistent(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedulerHistories = SchedulerHistories.TestCase
TestSchedulerHistories.settings = settings(
    derandomize=True, max_examples=80, stateful_step_count=30, deadline=None, database=None
)


# Histories that must happen, whatever Hypothesis finds.


def long_history(options: Options, times: int = 60) -> Engine:
    """Requests of all kinds arrive at random, faster than they can be served, then all are served."""
    rng = random.Random(repr(options))
    engine = Engine(options)
    for _ in range(times):
        base = rng.choice(BASES)
        prompt = base[: rng.randrange(14)] + [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        priority, salt = rng.randint(-1, 1), rng.choice([None, None, None, "a"])
        match rng.randrange(4):
            case 0:
                params = BeamSearchParams(beam_width=rng.randint(1, 3), max_tokens=rng.randint(1, 10))
                engine.add_search(prompt, params, priority=priority, salt=salt)
            case 1:
                engine.add(prompt, rng.randint(1, 16), n=rng.randint(2, 3), priority=priority, salt=salt)
            case _:
                engine.add(prompt, rng.randint(1, 16), priority=priority, salt=salt)
        for _ in range(rng.randrange(6)):
            engine.step(abort_during=rng.randrange(99) if rng.random() < 0.03 else None)
    engine.drain()
    return engine


@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_long_history_in_a_pool_that_is_too_small_preempts_and_finds_and_gives_everyone_their_own(
    kind: str, policy: str, depth: int, scale: int
) -> None:
    specs = KINDS[kind]
    layout = plan_layout(layers_of(specs), 2)
    blocks = scale * (num_blocks_for(layout, 10, 7) or 5)
    options = Options(
        specs=specs, blocks=blocks, block_size=2, max_num_seqs=5, budget=9, threshold=7, policy=policy, depth=depth
    )
    engine = long_history(options)
    assert engine.scheduler.num_preemptions > 0 or not layout.groups  # nobody needs blocks to go on
    assert engine.kv_cache.num_hit_tokens > 0 or layout.recurrent  # few checkpoints survive here
    assert len(engine.finished) > 60


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["recurrent", "full and recurrent", "window and recurrent", "all and recurrent"])
def test_a_long_history_of_recurrent_states_goes_on_from_what_was_saved(kind: str, depth: int, caching: bool) -> None:
    options = Options(
        specs=KINDS[kind], blocks=60, block_size=2, max_num_seqs=5, budget=9, depth=depth, caching=caching
    )
    engine = long_history(options)
    assert min(engine.device.num_saves, engine.device.num_loads) > (10 if caching else 0)
    assert (engine.kv_cache.num_hit_tokens > 0) == caching


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["full", "full and windows", "unequal blocks", "full and recurrent"])
def test_a_long_history_with_drafts_keeps_some_and_rejects_some_and_gives_everyone_their_own(
    kind: str, depth: int
) -> None:
    specs, max_drafts = KINDS[kind], 4
    blocks = num_blocks_for(plan_layout(layers_of(specs), 2), 12, 1 + depth * max_drafts)
    options = Options(
        specs=specs,
        blocks=blocks,
        block_size=2,
        max_num_seqs=5,
        budget=20,
        policy="fcfs" if depth == 1 else "priority",
        depth=depth,
        max_drafts=max_drafts,
    )
    engine = long_history(options)
    assert engine.scheduler.num_preemptions > 0
    assert engine.kv_cache.num_hit_tokens > 0 or engine.layout.recurrent  # few checkpoints survive here
    accepted = engine.scheduler.acceptance
    assert accepted.num_draft_tokens > accepted.num_accepted_tokens > 20
    assert accepted.num_accepted_tokens_per_pos == sorted(accepted.num_accepted_tokens_per_pos, reverse=True)
    assert len(accepted.num_accepted_tokens_per_pos) == max_drafts
    assert sum(accepted.num_accepted_tokens_per_pos) == accepted.num_accepted_tokens


def test_a_pool_that_is_far_too_small_preempts_and_still_gives_every_request_its_tokens() -> None:
    engine = Engine(Options(blocks=7, max_num_seqs=4, budget=9, threshold=5))
    names = [engine.add([length % VOCAB_SIZE] * length, max_tokens=13) for length in (3, 11, 1, 7, 16, 5, 2, 9)]
    engine.drain()
    assert engine.scheduler.num_preemptions >= 5
    assert all(len(engine.outputs[name]) == 13 for name in names)


def test_requests_alone_and_together_get_the_same_tokens() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [4], [5, 6, 0, 1, 2, 3]]
    together = Engine(Options(blocks=5, block_size=2, budget=5, threshold=2))
    names = [together.add(prompt, max_tokens=5) for prompt in prompts]
    together.drain()
    assert together.scheduler.num_preemptions > 0
    for name, prompt in zip(names, prompts, strict=True):
        alone = Engine(Options(blocks=40, block_size=16, max_num_seqs=1, caching=False))
        alone_name = alone.add(prompt, max_tokens=5)
        alone.drain()
        assert alone.outputs[alone_name] == together.outputs[name]
