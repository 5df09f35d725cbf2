"""When recurrent states are kept for others to go on from, and where steps end for it. No JAX.

A step can keep only what is behind the last tokens that earlier steps have computed. So prompts are cut where a
checkpoint is of use, and what a step ends with is saved by the next one.
"""

from collections.abc import Iterable, Sequence

from jaxpage.kv_cache.checkpoints import Checkpoint
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.requests.request import Request, RequestStatus
from jaxpage.scheduler.step_plan import StateLoad, StateSave


class StateSaves:
    """The checkpoints that running requests leave, in an engine whose model has recurrent states."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self._planned: list[tuple[StateSave, Checkpoint]] = []
        """For the next step that is run."""

    def cut(self, request: Request, num_tokens: int) -> int:
        """How many of a request's next `num_tokens` to compute in this step, so that it ends where something is saved.

        That is where its tokens part from those of others, at the last block boundary before the end of what is known,
        and at the prompt's last token if forks wait for it; a chunk that ends elsewhere ends at a boundary as well.
        """
        start = request.num_computed_tokens
        ends = [start + num_tokens]
        if self._kv_cache.enable_prefix_caching:
            grain = self._kv_cache.grain
            ends.append(min(ends[0], request.num_tokens - 1) // grain * grain)
            ends.append(self._kv_cache.num_shared_tokens(request.request_id))
        if request.forks:
            ends.append(request.num_prompt_tokens - 1)
        return min(end for end in ends if end > start) - start

    def plan(self, requests: Iterable[Request]) -> None:
        """Plan to save what the last step left of these, where it is of use and its tokens are known."""
        for request in requests:
            position, num_prompt_tokens = request.num_computed_tokens, request.num_prompt_tokens
            if request.status is not RequestStatus.RUNNING or not 0 < position <= request.num_tokens:
                continue
            if request.num_drafts_in_flight or (request.group is not None and position >= num_prompt_tokens):
                continue  # nobody knows yet where the row stands, or whose tokens it holds
            if request.forks and position == num_prompt_tokens - 1:
                self._add(request, self._kv_cache.save_for_forks(request.request_id))
            if self._kv_cache.enable_prefix_caching and position % self._kv_cache.grain == 0:
                keys, output = request.block_keys(self._kv_cache.block_size), position > num_prompt_tokens
                self._add(request, self._kv_cache.save(request.request_id, keys, position, output=output))

    def take(self, loads: Sequence[StateLoad]) -> list[StateSave]:
        """What a step saves that loads these: without what was evicted again while the step was put together."""
        loaded = [load.block_ids for load in loads]
        planned, self._planned = self._planned, []
        return [save for save, made in planned if save.block_ids in loaded or self._kv_cache.holds(made)]

    def _add(self, request: Request, made: Checkpoint | None) -> None:
        if made is not None:
            self._planned.append((StateSave(request.row, request.num_computed_tokens, made.block_ids), made))
