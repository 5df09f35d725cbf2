"""The unified scheduler: each step, who computes how many tokens. Pure host logic; knows nothing of JAX.

There are no phases. Every request chases `num_tokens`: a prompt of 1,000 tokens and a request that generates differ
only in how many known tokens are not computed yet. Each step spends at most `max_num_batched_tokens`. A step may be
scheduled before the tokens of the last one are known: they are in flight, and count as if they were.
"""

import bisect
from collections.abc import Sequence

from jaxpage.kv_cache.manager import BlockCopy, KVCacheManager, NewBlocks
from jaxpage.requests.request import Request, RequestStatus
from jaxpage.requests.request_group import RequestGroup
from jaxpage.scheduler.policies import FirstComeFirstServed, Policy
from jaxpage.scheduler.state_saves import StateSaves
from jaxpage.scheduler.step_plan import (
    AdmittedRequest,
    PooledStates,
    PromptLogprobs,
    PromptPiece,
    RowFork,
    SchedulerOutput,
    StateLoad,
)
from jaxpage.speculative.acceptance import Acceptance
from jaxpage.wire import SequenceOutput, TokenLogprobs, TokenOutput


class Scheduler:
    """Continuous batching with chunked prefill, prefix sharing, forks, and preemption by recomputing."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        long_prefill_token_threshold: int = 0,
        max_num_partial_prefills: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.waiting: list[Request] = []
        """In the policy's order."""
        self.running: list[Request] = []
        """In order of admission; the members of a group stand together."""
        self.num_preemptions = 0
        self.acceptance = Acceptance()
        self._policy = policy or FirstComeFirstServed()
        self.token_budget = max_num_batched_tokens
        """Most tokens of a step; at most what it was made with."""
        self._chunk = long_prefill_token_threshold or max_num_batched_tokens
        self._max_num_partial_prefills = max_num_partial_prefills if long_prefill_token_threshold else 0
        self._max_num_seqs = max_num_seqs
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._requests: dict[str, Request] = {}
        self._row_forks: list[RowFork] = []
        self._block_copies: list[BlockCopy] = []
        self._state_saves = StateSaves(kv_cache) if kv_cache.layout.recurrent else None
        self._last_requests: list[Request] = []
        """What the newest step computes."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request. It must fit alone: prompt and output, of all its group (checked on arrival).

        Its `forks` are queued when its prompt is computed.
        """
        num_rows = len(_members(request))
        num_blocks = num_rows * self.kv_cache.num_blocks_for(request.num_prompt_tokens + request.max_tokens - 1)
        assert num_rows <= self._max_num_seqs, f"{request.request_id} needs more rows than there are"
        assert num_blocks <= self.kv_cache.pool.num_usable, f"{request.request_id} needs more blocks than there are"
        for sequence in (request, *request.forks):
            assert sequence.request_id not in self._requests, f"request id {sequence.request_id} is in use"
            self._requests[sequence.request_id] = sequence
        self._wait(request)

    def abort(self, request_id: str) -> Request | None:
        """Drop a request wherever it is and free what it holds. Returns it, or None if it is not known (any more).

        Requests that would fork from it live on; a group is dropped whole.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            for member in _live_members(request):
                self.running.remove(member)
        elif request in self.waiting:
            self.waiting.remove(request)
        elif request.prefix is not None:
            request.prefix.forks.remove(request)
        self._finish(request)
        return request

    def hold_back(self, request: Request) -> None:
        """Take back the token that the newest step draws for a request, with all earlier steps known.

        Its last known token will be computed again, and what follows is drawn then.
        """
        assert request.num_in_flight == 1, "only the newest step is in flight"
        request.num_in_flight = 0
        request.num_computed_tokens -= 1

    def preempt_all(self) -> None:
        """Take every running request off; nothing of theirs may be in flight. They resume in their order."""
        while self.running:
            self._preempt(self.running[-1], None)

    def schedule(self) -> SchedulerOutput:
        """Spend the token budget: running requests first, then waiting ones, unless somebody had to be preempted."""
        step = _Step(self.token_budget)
        if self._state_saves is not None:
            self._state_saves.plan(self._last_requests)
            self._last_requests = step.requests
        preempted = self._schedule_running(step)
        block_size = self.kv_cache.block_size
        for request, query_len in zip(step.requests, step.query_lens, strict=True):
            # Only now: a request that was preempted after it had been scheduled will not fill its blocks.
            if query_len > 1 or request.num_computed_tokens % block_size == 0:
                self._publish(request)
        if not preempted:
            self._schedule_waiting(step)
        row_forks, self._row_forks = self._row_forks, []
        block_copies, self._block_copies = self._block_copies, []
        rows = [request.row for request in step.requests]
        saves = self._state_saves.take(step.loads) if self._state_saves is not None and rows else []
        return SchedulerOutput(
            *(row_forks, block_copies, step.admitted, step.requests, rows),
            *(step.query_lens, step.new_blocks, step.num_drafts, saves, step.loads),
        )

    def update(
        self,
        output: SchedulerOutput,
        sampled: Sequence[list[int]],
        logprobs: Sequence[list[TokenLogprobs] | None] | None = None,
        pieces: Sequence[PromptPiece | None] | None = None,
        num_proposed: Sequence[int] | None = None,
    ) -> list[SequenceOutput]:
        """Take in the results of a step: `sampled[i]` belongs to `output.requests[i]`, empty where its prompt goes on.

        It holds the drafts that the step accepted and the token behind them; `num_proposed[i]` says how many new drafts
        there are. Tokens of a request that was preempted meanwhile are delivered all the same; they will be
        computed as known. What follows a token that ends a request is dropped.
        """
        outputs: list[SequenceOutput] = []
        block_size = self.kv_cache.block_size
        for index, (request, token_ids) in enumerate(zip(output.requests, sampled, strict=True)):
            if pieces is not None:
                _take_piece(request, pieces[index])
            if not token_ids or request.status is RequestStatus.FINISHED:
                continue  # its prompt goes on, or the step was dispatched before its end was known
            found = logprobs[index] if logprobs is not None else None
            if request.group is not None:
                # Members that were preempted start anew together.
                if (
                    request.status is RequestStatus.RUNNING
                    and found is not None
                    and (result := self._advance(request.group, request, found[0])) is not None
                ):
                    outputs.append(result)
                continue
            if request.forks:
                self._release_forks(request)
            num_cached, of_prompt = 0, None
            if not request.num_output_tokens:
                num_cached = request.num_cached_tokens or 0
                of_prompt = None if request.num_prompt_logprobs is None else request.prompt_logprobs
            request.num_in_flight -= 1
            if request.max_drafts:
                proposed = 0 if num_proposed is None else num_proposed[index]
                self._settle(request, output.num_drafts.get(request.request_id, 0), len(token_ids), proposed)
            finish_reason, stop_token_id = request.append(token_ids[0])
            num_kept = 1
            if len(token_ids) > 1:
                while finish_reason is None and num_kept < len(token_ids):
                    finish_reason, stop_token_id = request.append(token_ids[num_kept])
                    num_kept += 1
                token_ids, found = token_ids[:num_kept], None if found is None else found[:num_kept]
            num_tokens = len(request.token_ids)
            if num_tokens % block_size < num_kept and request.num_computed_tokens > num_tokens - num_kept:
                self._publish(request)
            if finish_reason is not None:
                (self.running if request.status is RequestStatus.RUNNING else self.waiting).remove(request)
                self._finish(request)
            in_text = finish_reason == "stop" and token_ids[-1] not in request.stop_token_ids
            if request.pooling is not None:
                pooled = request.embedding.tobytes()
                outputs.append(TokenOutput(request.request_id, [], "stop", num_cached_tokens=num_cached, pooled=pooled))
                continue
            # By position: this is the one thing that is made for every token.
            given = TokenOutput(
                request.request_id, token_ids, finish_reason, stop_token_id, num_cached, found, of_prompt, in_text
            )
            outputs.append(given)
        return outputs

    def _settle(self, request: Request, num_drafts: int, num_emitted: int, num_proposed: int) -> None:
        """Take in what became of a request's drafts in a step, which let it check at most `num_drafts`."""
        self.acceptance.count(min(num_drafts, request.num_drafts), num_emitted - 1)
        request.num_drafts = num_proposed
        request.num_in_flight -= num_drafts
        request.num_drafts_in_flight -= num_drafts
        if request.status is RequestStatus.RUNNING:
            request.num_computed_tokens -= 1 + num_drafts - num_emitted

    def _schedule_running(self, step: "_Step") -> bool:
        """Returns whether anybody was preempted."""
        running, grow = self.running, self.kv_cache.grow
        preempted = False
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new = len(request.token_ids) + request.num_in_flight - num_computed
            if num_new > 1:
                num_new = min(num_new, self._chunk, step.budget)
                if self._state_saves is not None:
                    num_new = self._state_saves.cut(request, num_new)
            elif num_new == 0 or num_computed - request.num_drafts_in_flight >= request.max_computed_tokens:
                index += 1  # it waits for the others of its group, or one whose last token is in flight
                continue
            if num_new == 1 and request.max_drafts:
                # Drafts take what is left when all that follow have a token, and those that wait half of the budget.
                kept = len(running) - index + (self.token_budget // 2 if self.waiting else 0)
                num_new, added = self._grow_with_drafts(request, step.budget - kept)
            else:
                added = grow(request.request_id, num_computed, num_computed + num_new)
            if added is None:
                preempted = True
                victim = self._policy.victim(running)
                index -= sum(running.index(member) < index for member in _live_members(victim))
                self._preempt(victim, step)
                continue
            step.take(request, num_new, added)
            index += 1
        return preempted

    def _grow_with_drafts(self, request: Request, budget: int) -> tuple[int, Sequence[NewBlocks] | None]:
        """Room for a request's last token and for drafts behind it, at most `budget`: their number, and as `grow`.

        Drafts are guesses: nobody is preempted for them.
        """
        surely, most = request.num_surely_computed_tokens, request.max_computed_tokens
        num_drafts = max(0, min(request.num_expected_drafts, self._chunk - 1, budget, most - surely - 1))
        for num_new in (1 + num_drafts, 1):
            added = self.kv_cache.grow(request.request_id, surely, min(request.num_computed_tokens + num_new, most))
            if added is not None:
                return num_new, added
        return 1, None

    def _schedule_waiting(self, step: "_Step") -> None:
        num_long = sum(map(self._is_long, self.running))
        index = 0
        while index < len(self.waiting) and step.budget > 0:
            request = self.waiting[index]
            if request.num_in_flight:
                break  # preempted, and its last tokens are not known yet: they will be in the next step
            if not request.can_begin or (self._is_long(request) and num_long >= self._max_num_partial_prefills):
                index += 1  # others go before it
                continue
            live, members = _live_members(request), _members(request)
            if len(members) > len(self._free_rows) or not self._has_room_for(live):
                break
            if not self._begin(request, step):
                break
            del self.waiting[index]
            for member in members:
                member.row = self._free_rows.pop()
            self._start(request, step)
            for member in live[1:]:
                begun = self._begin(member, step)
                assert begun, "all of a group were promised room"
                self._start(member, step)
            num_long += sum(map(self._is_long, live))

    def _is_long(self, request: Request) -> bool:
        """Whether it counts for `max_num_partial_prefills`: it takes more than one further step to compute."""
        return self._max_num_partial_prefills > 0 and request.num_tokens - request.num_computed_tokens > self._chunk

    def _has_room_for(self, members: Sequence[Request]) -> bool:
        """Whether several would fit without finding anything; a single one is judged with what is found for it."""
        needed = sum(self.kv_cache.num_blocks_for(member.num_tokens) for member in members)
        return len(members) == 1 or needed <= self.kv_cache.pool.num_free

    def _begin(self, request: Request, step: "_Step") -> bool:
        """Give a request its first blocks: forked, found or none. Returns False and changes nothing without room.

        All of it must fit now, though only a part may be computed: else it would be preempted half-way.
        """
        copies = self._fork(request, step)
        if copies is not None:
            self._block_copies += copies
            request.num_computed_tokens = request.num_prompt_tokens - 1
        else:
            reads_cache = request.reads_prefix_cache and self.kv_cache.enable_prefix_caching
            keys = request.block_keys(self.kv_cache.block_size) if reads_cache else []
            hit = self.kv_cache.match(keys, request.num_tokens)
            if not self.kv_cache.can_fit(request.num_tokens, hit):
                return False
            self.kv_cache.admit(request.request_id, hit)
            request.num_computed_tokens = hit.num_tokens
            if request.num_cached_tokens is None and reads_cache:
                self.kv_cache.num_queried_tokens += request.num_tokens
                self.kv_cache.num_hit_tokens += hit.num_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        return True

    def _fork(self, request: Request, step: "_Step") -> list[BlockCopy] | None:
        """Fork a request that has generated nothing from the one with the same prompt, if that still runs."""
        prefix = request.prefix
        if prefix is None or prefix.status is not RequestStatus.RUNNING or request.num_output_tokens:
            return None
        num_tokens = request.num_prompt_tokens - 1  # the last token is computed again: its logits are needed
        if step.num_computed_before(prefix) < num_tokens:
            return None  # blocks are copied before the step computes anything
        return self.kv_cache.fork(prefix.request_id, request.request_id, num_tokens)

    def _start(self, request: Request, step: "_Step") -> None:
        """Let an admitted request run, with what is left of the budget."""
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        num_computed = request.num_computed_tokens
        request.num_drafts = 0
        num_new = min(request.num_tokens - num_computed, self._chunk, step.budget)
        if self._state_saves is not None:
            if num_new:
                num_new = self._state_saves.cut(request, num_new)
            if num_computed:
                block_ids = self.kv_cache.checkpoint_of(request.request_id)
                step.loads.append(StateLoad(request.row, num_computed, block_ids))
        added = self.kv_cache.grow(request.request_id, num_computed, num_computed + num_new)
        assert added is not None, "its blocks were promised"
        tables = [list(table) for table in self.kv_cache.tables(request.request_id)]
        step.admitted.append(AdmittedRequest(request.row, request, list(request.token_ids), num_computed, tables))
        if num_new:
            step.take(request, num_new, ())
            self._publish(request)

    def _publish(self, request: Request) -> None:
        keys = request.block_keys(self.kv_cache.block_size) if self.kv_cache.enable_prefix_caching else ()
        # What is computed of tokens in flight has no name yet; `update` gives it one. The last token is never computed,
        # though steps in flight may have room for it.
        num_tokens = min(request.num_computed_tokens, request.num_tokens, request.max_computed_tokens)
        self.kv_cache.publish(request.request_id, keys, num_tokens)

    def _wait(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self._policy.key)

    def _release_forks(self, request: Request) -> None:
        """Queue those that waited for this request's prompt."""
        for fork in request.forks:
            self._wait(fork)
        request.forks = []

    def _advance(self, group: RequestGroup[Request], request: Request, found: TokenLogprobs) -> SequenceOutput | None:
        """Take in what a step gave a member of a group, and let the group go on or end when it knows how."""
        before = group.live
        result = group.take(request, found)
        if result is None:
            return None
        first = self.running.index(before[0])
        if not isinstance(result, Sequence):
            del self.running[first : first + len(before)]
            self._finish(group.members[0])
            return result
        self.running[first : first + len(before)] = group.live
        for member in group.live:
            member.status = RequestStatus.RUNNING
        copies = self.kv_cache.reorder(
            [member.request_id for member in group.members],
            [continuation.source for continuation in result],
            group.members[0].num_computed_tokens,
        )
        if copies is None:
            self._preempt(group.members[0], None)
            return None
        self._block_copies += copies
        self._row_forks += [
            RowFork(before[continuation.source].row, member.row, continuation.token_id)
            for member, continuation in zip(group.live, result, strict=True)
        ]
        return None

    def _preempt(self, victim: Request, step: "_Step | None") -> None:
        """Take a running request off: its KV is dropped and will be computed again. It queues before newer ones.

        What `step` has scheduled of it is taken back. All of a group go together.
        """
        self.num_preemptions += 1
        for member in _live_members(victim):
            self.running.remove(member)
            if step is not None:
                step.drop(member)
            member.status = RequestStatus.PREEMPTED
            member.num_computed_tokens = 0
        if victim.group is not None:
            victim.group.forget()
            victim = victim.group.members[0]
        self._release(victim)
        self._wait(victim)

    def _finish(self, request: Request) -> None:
        self._release_forks(request)
        self._release(request)
        for member in _members(request):
            member.status = RequestStatus.FINISHED
        del self._requests[request.request_id]

    def _release(self, request: Request) -> None:
        """Give back the blocks and rows of a request, of all its group; copies into them are called off."""
        rows = [member.row for member in _members(request) if member.row >= 0]
        self._free_rows += rows
        for member in _members(request):
            self.kv_cache.free(member.request_id)
            member.row = -1
        ref_counts = self.kv_cache.pool.ref_counts
        self._row_forks = [fork for fork in self._row_forks if fork.target not in rows]
        self._block_copies = [(source, target) for source, target in self._block_copies if ref_counts[target] > 0]


def _live_members(request: Request) -> Sequence[Request]:
    """The requests that compute together: the live ones of its group, or the request itself."""
    return [request] if request.group is None else request.group.live


def _take_piece(request: Request, piece: PromptPiece | None) -> None:
    match piece:
        case PromptLogprobs(first, found):
            request.add_prompt_logprobs(first, found)
        case PooledStates(first, total):
            request.add_pooled(first, total)


def _members(request: Request) -> Sequence[Request]:
    """The requests that have a row as long as this one has: all of its group, or the request itself."""
    return [request] if request.group is None else request.group.members


class _Step:
    """A step being put together."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.admitted: list[AdmittedRequest] = []
        self.requests: list[Request] = []
        self.query_lens: list[int] = []
        self.num_drafts: dict[str, int] = {}
        self.loads: list[StateLoad] = []
        self.new_blocks: list[tuple[int, int, int, int]] = []

    def take(self, request: Request, num_tokens: int, added: Sequence[NewBlocks]) -> None:
        """Schedule `num_tokens` of a request whose tables grew by `added`."""
        self.budget -= num_tokens
        self.requests.append(request)
        self.query_lens.append(num_tokens)
        for new in added:
            for index, block_id in enumerate(new.block_ids, new.first_index):
                self.new_blocks.append((request.row, new.group, index, block_id))
        request.num_computed_tokens += num_tokens
        num_drafts = request.num_computed_tokens - len(request.token_ids) - request.num_in_flight
        if num_drafts >= 0 and request.group is None:  # a group goes on when all its results are there
            request.num_in_flight += 1 + num_drafts
            if num_drafts:
                request.num_drafts_in_flight += num_drafts
                self.num_drafts[request.request_id] = num_drafts

    def num_computed_before(self, request: Request) -> int:
        """Tokens of a running request whose KV is there before the step computes anything. O(requests).

        What was found for one that this step admits counts for nothing: others may compute it in this very step.
        """
        if any(admitted.request is request for admitted in self.admitted):
            return 0
        num_scheduled = self.query_lens[self.requests.index(request)] if request in self.requests else 0
        return request.num_computed_tokens - num_scheduled

    def drop(self, request: Request) -> None:
        """Take back what was scheduled of a request, if anything."""
        if request in self.requests:
            index = self.requests.index(request)
            self.budget += self.query_lens[index]
            if request.num_in_flight and request.num_computed_tokens == request.num_tokens + request.num_in_flight - 1:
                num_drafts = self.num_drafts.pop(request.request_id, 0)
                request.num_in_flight -= 1 + num_drafts
                request.num_drafts_in_flight -= num_drafts
            del self.requests[index], self.query_lens[index]
            self.new_blocks = [new for new in self.new_blocks if new[0] != request.row]
