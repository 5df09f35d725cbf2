"""The engine: scheduler, runner and the loop around them. Lives in the engine process, or in the caller's."""

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from jaxpage.config import EngineConfig
from jaxpage.engine.loops import LOOPS
from jaxpage.errors import ConfigError, JaxpageError, RequestError
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.snapshot import take_snapshot
from jaxpage.kv_cache.spec import max_request_tokens
from jaxpage.models.served_model import ServedModel
from jaxpage.requests.request import Request
from jaxpage.requests.sequences import sequences_of
from jaxpage.runner.model import open_model
from jaxpage.runner.runner import Runner
from jaxpage.sampling_params import MAX_BEAM_WIDTH, MAX_STOP_TOKEN_IDS
from jaxpage.scheduler.policies import load_policy
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.structured.constraint import Grammars
from jaxpage.wire import AddRequest, Call, Outputs, Ready, Returned, SequenceOutput, TokenOutput, sequence_id

if TYPE_CHECKING:
    from jaxpage.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GRAMMAR_SECONDS = 0.01
"""How long an idle engine waits for a grammar or a program before it looks for messages again."""

UTILITIES = (
    *("reset_prefix_cache", "kv_cache_snapshot", "pause", "resume", "is_paused"),
    *("sleep", "wake_up", "is_sleeping", "start_profile", "stop_profile", "update_params"),
)
"""What a client may call by name."""
WHEN_UPDATED = ("keep", "recompute", "abort")
"""What becomes of requests that have begun when weights change."""


class EngineCore:
    """Requests in, tokens out."""

    def __init__(
        self,
        config: EngineConfig,
        model: ServedModel | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Load and warm up; `progress(done, total)` counts compiled programs.

        model: what is served in place of what the options name. Raises `ModelLoadError` or `ConfigError`.
        """
        if config.process_id:
            raise ConfigError(
                f"--process-id is {config.process_id}: only process 0 takes requests; start this one as "
                f"`jaxpage serve --process-id {config.process_id}`, which follows it"
            )
        policy = load_policy(config.scheduling_policy)  # before the weights: a mistake is told at once
        config, model = open_model(config, model)
        self.runner = Runner(config, model, progress)
        plan = self.runner.plan
        sized = plan.config
        scheduler = Scheduler(
            KVCacheManager(
                plan.num_blocks,
                plan.layout,
                max_step_tokens=sized.max_step_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=sized.max_num_seqs,
            max_num_batched_tokens=sized.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            policy=policy,
        )
        self._max_drafts = config.max_drafts
        self._eos_token_ids = list(model.eos_token_ids[:MAX_STOP_TOKEN_IDS])
        self.loop = LOOPS[config.engine_mode](scheduler, self.runner)
        self._grammars = Grammars(partial(_load_tokenizer, config), model.vocab_size, self._eos_token_ids)
        self._watched: list[Request] = []
        """Requests that wait for programs, and those whose text must fit a grammar, until they end."""
        self._num_arrived = 0
        self._is_paused = False
        self._keeps_running = False
        """While paused: whether what runs is kept as it stands."""
        self._held: list[AddRequest] = []
        """Requests that came while the engine was paused."""
        self._ended_early: list[SequenceOutput] = []
        """What the next step gives besides its own."""
        self._is_traced = False
        self.weight_version = 0
        """Of the weights that the next step computes with."""
        self._reported_version = 0
        """Of those that gave what the last step gave."""
        self._num_weight_updates = 0
        self._broken: str | None = None
        """Why no step may follow."""
        self.ready = Ready(
            max_model_len=plan.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=self._eos_token_ids,
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_num_seqs=sized.max_num_seqs,
            logits_processors=[processor.name for processor in plan.processors],
            max_beam_tokens=[
                max_request_tokens(plan.layout, (plan.num_blocks - 1) // width, sized.max_step_tokens)
                for width in range(1, MAX_BEAM_WIDTH + 1)
            ],
            embedding_size=model.embed_size,
        )
        self.runner.warm_up()
        self.ready = msgspec.structs.replace(self.ready, stats=self.stats())

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return (
            bool(self._ended_early) or self.loop.has_steps_in_flight or (self.has_requests and not self._stands_still)
        )

    @property
    def _stands_still(self) -> bool:
        return self.runner.is_sleeping or (self._is_paused and self._keeps_running)

    def try_add(self, message: AddRequest) -> list[SequenceOutput]:
        """Queue a request, or hold it while paused. One that makes us fail ends with an error; the others go on."""
        if self._is_paused:
            self._held.append(message)
            return []
        try:
            self.add(message)
        except Exception:
            logger.exception("request %s fails", message.request_id)
            width = message.params.n if message.beam is None else 1
            sequence_ids = [sequence_id(message.request_id, index) for index in range(width)]
            for failed in sequence_ids:
                self.abort(failed)
            return [TokenOutput(failed, [], "error") for failed in sequence_ids]
        return []

    def add(self, message: AddRequest) -> None:
        """Queue a request with all its sequences, checked before against the limits of `ready`."""
        self._num_arrived += 1
        sequences = sequences_of(
            message,
            arrival=self._num_arrived,
            eos_token_ids=self._eos_token_ids,
            max_drafts=self._max_drafts,
            processors=self.ready.logits_processors,
            weights=self._num_weight_updates,
        )
        if (structured := message.params.structured_outputs) is not None:
            for sequence in sequences:
                sequence.constraint = self._grammars.constrain(structured, ignore_eos=message.params.ignore_eos)
        first = sequences[0]
        first.awaited = self.runner.programs_for(first)
        self.scheduler.add(first)
        if structured is not None:
            self._watched += sequences
        elif first.awaited:
            self._watched.append(first)

    def abort(self, sequence: str) -> None:
        """Drop a sequence (`sequence_id`; a whole group by its first one's), and free what it holds.

        An unknown one is ignored.
        """
        self._held = [message for message in self._held if message.request_id != sequence]
        self.scheduler.abort(sequence)

    def answer(self, call: Call) -> Returned:
        """Run one of `UTILITIES`, which only look at or change what stands between two steps."""
        assert call.utility in UTILITIES, call.utility
        try:
            return Returned(call.call_id, getattr(self, call.utility)(*call.args))
        except JaxpageError as error:
            return Returned(call.call_id, None, str(error))

    def pause(self, keep: bool) -> None:
        """Hold what comes from now on; what is here goes on to its end or, with `keep`, stands still."""
        self._is_paused, self._keeps_running = True, keep

    def resume(self) -> None:
        """Go on, with what has come meanwhile. Raises `RequestError` while asleep."""
        if self.runner.is_sleeping:
            raise RequestError("the engine is asleep: wake it up first")
        self._is_paused = False
        held, self._held = self._held, []
        for message in held:
            self._ended_early += self.try_add(message)

    def is_paused(self) -> bool:
        return self._is_paused

    def sleep(self, offload_weights: bool) -> None:
        """Free the KV cache's memory; with `offload_weights`, move the weights to the host. What ran is kept."""
        if self.runner.is_sleeping:
            return
        self._ended_early += self.loop.drain()
        self.scheduler.preempt_all()
        self.scheduler.kv_cache.reset_prefix_cache()
        self.runner.sleep(offload_weights=offload_weights)

    def wake_up(self) -> None:
        """Take the memory again; what ran is computed anew."""
        if self.runner.is_sleeping:
            self.runner.wake_up()

    def is_sleeping(self) -> bool:
        return self.runner.is_sleeping

    def update_params(self, params: Any, version: int | None = None, running: str = "keep") -> int:
        """Go on with other weights: a pytree as the model's own, of arrays on any devices of this process.

        version: what outputs call them; by default the number after the last one. running: what becomes of requests
        that have begun. "keep" goes on from the KV that the old weights gave, "recompute" computes that anew, "abort"
        ends them. No prefix that the old weights computed is found from now on. Returns the version. Raises
        `RequestError`, and changes nothing, where the weights do not fit by name, shape or kind, or are not finite.
        """
        version = self.weight_version + 1 if version is None else version
        if not isinstance(version, int) or version < 0:
            raise RequestError(f"version is {version!r}: it must be a whole number of at least 0", "version")
        if running not in WHEN_UPDATED:
            raise RequestError(f"running is {running!r}: choose from {', '.join(WHEN_UPDATED)}", "running")
        if self.runner.is_sleeping:
            raise RequestError("the engine is asleep: wake it up first")
        arrays = self.runner.check_params(params)
        self._ended_early += self.loop.drain()
        if running == "abort":
            self._ended_early += self._abort_begun()
        elif running == "recompute":
            self.scheduler.preempt_all()
        self._broken = "an update of the weights failed half-way"
        self.runner.update_params(arrays)
        self._broken = None
        self.weight_version, self._num_weight_updates = version, self._num_weight_updates + 1
        for request in self.scheduler.waiting:
            request.begin_anew(self._num_weight_updates)
        self.reset_prefix_cache()  # gives the memory back at once where nothing runs
        return version

    def _abort_begun(self) -> list[SequenceOutput]:
        """End the requests that have generated something, or may have."""
        begun = [it for it in (*self.scheduler.running, *self.scheduler.waiting) if it.num_cached_tokens is not None]
        for request in begun:
            self.abort(request.request_id)
        return [TokenOutput(request.request_id, [], "abort") for request in begun]

    def start_profile(self, folder: str) -> None:
        """Trace what this process and its devices do. Raises `RequestError` if it is being traced, or cannot be."""
        if self._is_traced:
            raise RequestError("a profile is being taken: wait for its end")
        try:
            self.runner.start_trace(folder)
        except Exception as error:  # whatever is wrong with the profiler, requests go on
            raise RequestError(f"no profile can be taken: {error}") from error
        self._is_traced = True

    def stop_profile(self) -> None:
        """Write the trace. Raises `RequestError` if that fails."""
        if not self._is_traced:
            return
        self._is_traced = False
        try:
            self.runner.stop_trace()
        except Exception as error:  # such as a full disk
            raise RequestError(f"the profile cannot be written: {error}") from error

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while any request holds blocks."""
        return self.scheduler.kv_cache.reset_prefix_cache()

    def kv_cache_snapshot(self) -> dict[str, Any]:
        """How the KV cache stands; see `kv_cache.snapshot.take_snapshot`."""
        return take_snapshot(self.scheduler.kv_cache, self.scheduler.running)

    def step(self) -> list[SequenceOutput]:
        """Take the loop one step on. Returns what is known to have been generated, if anything."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        outputs, self._ended_early = self._ended_early, []
        if outputs and self._reported_version != self.weight_version:
            return outputs  # what the weights before gave
        self._reported_version = self.weight_version
        self.scheduler.token_budget = self.runner.token_budget
        with self.runner.watched():
            outputs += self.loop.drain() if self._stands_still else self.loop.step()
        return outputs + self._look_at_watched() if self._watched else outputs

    def use_quiet_moment(self) -> bool:
        """Do what is better done while there is no work. Returns whether there may be more of that a little later."""
        return not self.loop.has_steps_in_flight and self.runner.use_quiet_moment()

    def _look_at_watched(self) -> list[SequenceOutput]:
        """End requests whose grammar cannot go on, or whose programs cannot be compiled.

        If nobody else has anything to do, wait for what they wait for a while.
        """
        failed: list[SequenceOutput] = []
        self._watched, watched = [], [request for request in self._watched if not request.is_finished]
        for request in watched:
            mask = request.constraint.mask if request.constraint is not None else None
            for work in (*request.awaited, *([mask] if mask is not None else [])):
                if work.done() and (error := work.exception()) is not None:
                    logger.warning("request %s fails: %s", request.request_id, error)
                    names = [it.request_id for it in (request, *(request.forks if request.awaited else ()))]
                    self.abort(request.request_id)
                    failed += [TokenOutput(name, [], "error") for name in names]
                    break
            else:
                if request.constraint is not None or not request.can_begin:
                    self._watched.append(request)
        waiting = self.scheduler.waiting
        waited_for = [it.constraint.mask for it in waiting if it.constraint is not None]
        waited_for += [work for it in waiting for work in it.awaited if not work.done()]
        if waited_for and not self.loop.has_steps_in_flight:
            wait(waited_for, _GRAMMAR_SECONDS, FIRST_COMPLETED)
        return failed

    def report(self, outputs: list[SequenceOutput]) -> Outputs:
        """What a client is told after a step, or after whatever else has changed how the engine stands."""
        loop = self.loop
        step_tokens, loop.step_tokens = loop.step_tokens, []
        started, loop.started = loop.started, []
        return Outputs(outputs, self.stats(), step_tokens, started, self._reported_version)

    def close(self) -> None:
        """Stop whatever still goes on in the background."""
        self.runner.close()
        self._grammars.close()

    def stats(self) -> dict[str, float]:
        """How the engine stands: counts, and the share of KV blocks in use (0 to 1)."""
        scheduler = self.scheduler
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": scheduler.kv_cache.pool.usage,
            "num_preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.kv_cache.num_queried_tokens,
            "prefix_cache_hits": scheduler.kv_cache.num_hit_tokens,
            "num_steps": self.loop.num_steps,
            **scheduler.acceptance.stats(),
            **{f"{phase}_seconds": seconds for phase, seconds in self.loop.seconds.items()},
            **self.runner.stats,
        }


def _load_tokenizer(config: EngineConfig) -> "Tokenizer":
    from jaxpage.text.tokenizer import load_tokenizer  # a tenth of a second that only grammars need

    return load_tokenizer(config.tokenizer_source)
