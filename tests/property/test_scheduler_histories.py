"""Whatever happens to requests, in whatever order: each gets its own tokens, and nothing is lost or kept.

The scheduler drives a device made of plain lists. Its "model" reads the tokens it was given back from the KV cache,
through its own copy of the block tables, so that a wrong, stale or shared block gives wrong tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.request import Request, RequestStatus
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler import Scheduler, SchedulerOutput

VOCAB_SIZE = 11
STALE = 10**6
"""What entries of the device's tables hold that were never written."""


def next_token(seen: Iterable[tuple[int, int]]) -> int:
    """The model: a token that depends on every (position, token) before it."""
    state = 1
    for position, token_id in seen:
        state = (state * 31 + position * 7 + token_id + 1) % 100_003
    return state % VOCAB_SIZE


def expected_output(request: Request) -> tuple[list[int], str]:
    """The tokens that the request must get, and why it ends, from its prompt and options alone."""
    tokens = list(request.prompt_token_ids)
    for count in range(1, request.max_tokens + 1):
        tokens.append(next_token(enumerate(tokens)))
        if tokens[-1] in request.stop_token_ids and count > request.params.min_tokens:
            return tokens[request.num_prompt_tokens :], "stop"
    return tokens[request.num_prompt_tokens :], "length"


@dataclass
class DeviceRow:
    """A row of the batch. Left-overs of the last request stay until they are overwritten, as on a real device."""

    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=lambda: [STALE] * 64)


class Device:
    """What a device knows: rows and KV slots, changed by nothing but the scheduler's outputs."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.rows = [DeviceRow() for _ in range(num_rows)]
        self._block_size = block_size
        self._kv: dict[int, tuple[int, int]] = {}

    def run(self, output: SchedulerOutput) -> list[int]:
        """One step. Returns a token for each scheduled row, -1 where the known tokens are not all computed."""
        for admitted in output.admitted:
            row = self.rows[admitted.row]
            row.token_ids, row.num_computed_tokens = list(admitted.token_ids), admitted.num_computed_tokens
        for row_index, index, block_id in output.new_blocks:
            self.rows[row_index].table[index] = block_id
        scheduled = [self.rows[row_index] for row_index in output.rows]
        for row, query_len in zip(scheduled, output.query_lens, strict=True):
            for position in range(row.num_computed_tokens, row.num_computed_tokens + query_len):
                self._kv[self._slot(row, position)] = position, row.token_ids[position]
            row.num_computed_tokens += query_len
        return [self._sample(row) for row in scheduled]

    def _sample(self, row: DeviceRow) -> int:
        if row.num_computed_tokens < len(row.token_ids):
            return -1
        token_id = next_token(self._kv[self._slot(row, position)] for position in range(row.num_computed_tokens))
        row.token_ids.append(token_id)
        return token_id

    def _slot(self, row: DeviceRow, position: int) -> int:
        return row.table[position // self._block_size] * self._block_size + position % self._block_size


class Engine:
    """Scheduler and device in step, with everything checked that must hold after each."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, budget: int, threshold: int) -> None:
        self.kv_cache = KVCacheManager(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.kv_cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
        )
        self.device = Device(max_num_seqs, block_size)
        self.max_num_seqs, self.budget, self.threshold = max_num_seqs, budget, threshold
        self.live: dict[str, Request] = {}
        """Requests that have not ended, in order of arrival."""
        self.received: dict[str, list[int]] = {}

    def add(self, prompt: list[int], max_tokens: int, stops: frozenset[int] = frozenset(), min_tokens: int = 0) -> None:
        room = self.kv_cache.max_request_tokens + 1 - len(prompt)
        max_tokens = min(max_tokens, room)
        params = SamplingParams(max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
        request_id = f"r{len(self.received)}"
        self.live[request_id] = Request(request_id, prompt, params, 0, max_tokens, stops, 0.0)
        self.received[request_id] = []
        self.scheduler.add(self.live[request_id])

    def abort(self, index: int) -> None:
        """Abort one of the live requests, if there are any."""
        if self.live:
            request_id = list(self.live)[index % len(self.live)]
            assert self.scheduler.abort(request_id) is self.live.pop(request_id)

    def step(self, abort_during: int | None = None) -> None:
        preemptions_before = self.scheduler.num_preemptions
        output = self.scheduler.schedule()
        self._check_step(output, preempted=self.scheduler.num_preemptions > preemptions_before)
        sampled = self.device.run(output)
        if abort_during is not None:
            self.abort(abort_during)
        for given in self.scheduler.update(output, sampled):
            request = self.live[given.request_id]
            self.received[given.request_id] += given.token_ids
            if given.finish_reason is not None:
                assert (self.received[given.request_id], given.finish_reason) == expected_output(request)
                assert request.status is RequestStatus.FINISHED
                del self.live[given.request_id]
        self.check()

    def drain(self) -> None:
        """Step until every request has ended, which takes a bounded number of steps."""
        for _ in range(10_000):
            if not self.live:
                break
            self.step()
        assert not self.live, "the scheduler makes no progress"
        assert not self.scheduler.has_requests
        assert self.kv_cache.pool.usage == 0

    def _check_step(self, output: SchedulerOutput, *, preempted: bool) -> None:
        assert bool(output.requests) == bool(self.live), (
            "a step must do something exactly when there is something to do"
        )
        assert output.num_tokens <= self.budget
        assert all(1 <= query_len <= (self.threshold or self.budget) for query_len in output.query_lens)
        assert len(set(output.rows)) == len(output.rows)
        assert not (preempted and output.admitted), "a request was admitted in a step that preempted"
        assert output.rows == [request.row for request in output.requests]

    def check(self) -> None:
        """What holds between steps."""
        self.kv_cache.check_integrity()
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert [*running, *waiting] == list(self.live.values()), "requests are not served in order of arrival"
        rows = [request.row for request in running]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(self.max_num_seqs))
        for request in running:
            table = self.kv_cache.table(request.request_id)
            row = self.device.rows[request.row]
            assert len(table) == -(-request.num_computed_tokens // self.kv_cache.block_size)
            assert row.table[: len(table)] == table, "the device's block table differs"
            assert row.num_computed_tokens == request.num_computed_tokens
            assert row.token_ids == request.token_ids
        for request in waiting:
            assert (request.row, request.num_computed_tokens) == (-1, 0)
            assert self.kv_cache.table(request.request_id) == []


class SchedulerHistories(RuleBasedStateMachine):
    """Requests come, are aborted and computed in any order, in a pool that is too small for them."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        extra_budget=st.integers(0, 10),
        threshold=st.integers(0, 6),
    )
    def start(self, num_blocks: int, block_size: int, max_num_seqs: int, extra_budget: int, threshold: int) -> None:
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            budget=max_num_seqs + extra_budget,
            threshold=threshold,
        )

    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 20),
        stops=st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1),
        min_tokens=st.integers(0, 5),
    )
    def add(self, data: st.DataObject, max_tokens: int, stops: frozenset[int], min_tokens: int) -> None:
        longest = min(self.engine.kv_cache.max_request_tokens, 20)
        prompt = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=longest), label="prompt")
        self.engine.add(prompt, max_tokens, stops, min_tokens)

    @precondition(lambda self: self.engine.live)
    @rule(index=st.integers(0, 10))
    def abort(self, index: int) -> None:
        self.engine.abort(index)

    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @precondition(lambda self: self.engine.live)
    @rule(index=st.integers(0, 10))
    def step_with_an_abort_in_its_midst(self, index: int) -> None:
        self.engine.step(abort_during=index)

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


def test_a_pool_that_is_far_too_small_preempts_and_still_gives_every_request_its_tokens() -> None:
    engine = Engine(num_blocks=8, block_size=4, max_num_seqs=4, budget=9, threshold=5)
    for length in (3, 11, 1, 7, 16, 5, 2, 9):
        engine.add([length % VOCAB_SIZE] * length, max_tokens=13)
    engine.drain()
    assert engine.scheduler.num_preemptions >= 5
    assert all(len(tokens) == 13 for tokens in engine.received.values())


def test_requests_alone_and_together_get_the_same_tokens() -> None:
    prompts = [[1, 2, 3], [1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    together = Engine(num_blocks=6, block_size=2, max_num_seqs=4, budget=5, threshold=2)
    for prompt in prompts:
        together.add(prompt, max_tokens=5)
    together.drain()
    assert together.scheduler.num_preemptions > 0
    for request_id, prompt in zip(together.received, prompts, strict=True):
        alone = Engine(num_blocks=40, block_size=16, max_num_seqs=1, budget=64, threshold=0)
        alone.add(prompt, max_tokens=5)
        alone.drain()
        assert alone.received["r0"] == together.received[request_id]
