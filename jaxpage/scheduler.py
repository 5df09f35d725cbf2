"""The unified scheduler: each step, who computes how many tokens. Pure host logic; knows nothing of JAX.

There are no phases. Every request chases `num_tokens`: a prompt of 1,000 tokens and a request that generates differ
only in how many known tokens are not computed yet. Each step spends at most `max_num_batched_tokens`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.request import Request, RequestStatus
from jaxpage.wire import TokenOutput


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that gets a row in this step, in full. A resumed one carries its output as known tokens."""

    row: int
    request: Request
    token_ids: list[int]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what changed since the last one, and how many tokens each row computes."""

    admitted: list[AdmittedRequest]
    requests: list[Request]
    """Scheduled requests, in the order of the step's tokens."""
    rows: list[int]
    """Their rows."""
    query_lens: list[int]
    """Their tokens in this step, each at least 1."""
    new_blocks: list[tuple[int, int, int]]
    """(row, index in its block table, block id)."""

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


class Scheduler:
    """Continuous batching with chunked prefill, and preemption by recomputing, first come first served."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv_cache = kv_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[str, Request] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. It must fit: prompt and output within the pool (the engine checks on arrival)."""
        assert request.request_id not in self._requests, f"request id {request.request_id} is in use"
        assert request.num_prompt_tokens + request.max_tokens <= self.kv_cache.max_request_tokens + 1
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> Request | None:
        """Drop a request wherever it is and free what it holds. Returns it, or None if it is not known (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._finish(request)
        return request

    def schedule(self) -> SchedulerOutput:
        """Spend the token budget: running requests first, then waiting ones, unless somebody had to be preempted."""
        step = _Step(self._max_num_batched_tokens)
        preempted = self._schedule_running(step)
        if not preempted:
            self._schedule_waiting(step)
        return SchedulerOutput(step.admitted, step.requests, step.rows, step.query_lens, step.new_blocks)

    def update(self, output: SchedulerOutput, sampled: Sequence[int]) -> list[TokenOutput]:
        """Take in the tokens of a step: `sampled[i]` belongs to `output.requests[i]`, -1 where its prompt goes on."""
        outputs = []
        for request, token_id in zip(output.requests, sampled, strict=True):
            if token_id < 0 or request.status is not RequestStatus.RUNNING:
                continue
            finish_reason, stop_token_id = request.append(token_id)
            if finish_reason is not None:
                self.running.remove(request)
                self._finish(request)
            outputs.append(TokenOutput(request.request_id, [token_id], finish_reason, stop_token_id))
        return outputs

    def _schedule_running(self, step: "_Step") -> bool:
        """Returns whether anybody was preempted."""
        preempted = False
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_new = min(request.num_tokens - request.num_computed_tokens, self._chunk, step.budget)
            added = self.kv_cache.grow(request.request_id, request.num_computed_tokens + num_new)
            if added is None:
                preempted = True
                if self._preempt_last() is request:
                    break
                continue
            step.take(request, num_new, added, len(self.kv_cache.table(request.request_id)) - len(added))
            index += 1
        return preempted

    def _schedule_waiting(self, step: "_Step") -> None:
        while self.waiting and step.budget > 0 and self._free_rows:
            request = self.waiting[0]
            # All of it must fit now, though only a part may be computed: else it would be preempted half-way.
            if not self.kv_cache.can_fit(request.num_tokens):
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            request.row = self._free_rows.pop()
            self.running.append(request)
            step.admitted.append(
                AdmittedRequest(request.row, request, list(request.token_ids), request.num_computed_tokens)
            )
            num_new = min(request.num_tokens - request.num_computed_tokens, self._chunk, step.budget)
            added = self.kv_cache.grow(request.request_id, request.num_computed_tokens + num_new)
            assert added is not None, "can_fit promised these blocks"
            step.take(request, num_new, added, 0)

    def _preempt_last(self) -> Request:
        """Take the last running request off: its KV is dropped and will be computed again. It goes first in the queue.

        The victim was not yet scheduled in this step: requests are scheduled in order, and the one that needs a block
        comes no later than the last.
        """
        request = self.running.pop()
        self.num_preemptions += 1
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)
        return request

    def _finish(self, request: Request) -> None:
        self._release(request)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        self.kv_cache.free(request.request_id)
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row = -1


class _Step:
    """A step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.admitted: list[AdmittedRequest] = []
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.query_lens: list[int] = []
        self.new_blocks: list[tuple[int, int, int]] = []

    def take(self, request: Request, num_tokens: int, added: list[int], first_index: int) -> None:
        """Schedule `num_tokens` of a request whose table grew by `added` from `first_index` on."""
        self.budget -= num_tokens
        self.requests.append(request)
        self.rows.append(request.row)
        self.query_lens.append(num_tokens)
        self.new_blocks.extend((request.row, first_index + i, block_id) for i, block_id in enumerate(added))
        request.num_computed_tokens += num_tokens
