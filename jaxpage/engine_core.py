"""The engine: scheduler, runner and the loop around them. Lives in the engine process, or in the caller's."""

import logging
from collections.abc import Callable
from typing import Any

from jaxpage.beam_group import BeamGroup
from jaxpage.beam_search import BeamSearch
from jaxpage.config import EngineConfig
from jaxpage.kv_cache.hashing import ExtraKeys
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.snapshot import take_snapshot
from jaxpage.kv_cache.spec import max_request_tokens
from jaxpage.loops import LOOPS
from jaxpage.models.loading import open_checkpoint
from jaxpage.policies import load_policy
from jaxpage.request import Request
from jaxpage.runner.runner import Runner
from jaxpage.sampling_params import MAX_BEAM_WIDTH, MAX_STOP_TOKEN_IDS, nth_seed
from jaxpage.scheduler import Scheduler
from jaxpage.wire import AddRequest, BeamOutput, Ready, TokenOutput, sequence_id

logger = logging.getLogger(__name__)

UTILITIES = ("reset_prefix_cache", "kv_cache_snapshot")
"""What a client may call by name."""


def eos_token_ids(generation_config: dict[str, object], config: dict[str, object]) -> list[int]:
    """The model's end-of-sequence ids: generation_config's word first, then config's; one id or a list."""
    for source in (generation_config, config):
        match source.get("eos_token_id"):
            case int() as token_id:
                return [token_id]
            case list() as token_ids:
                return [int(token_id) for token_id in token_ids]
    return []


class EngineCore:
    """Requests in, tokens out."""

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Load and warm up; `progress(done, total)` counts compiled programs.

        Raises `ModelLoadError` or `ConfigError`.
        """
        policy = load_policy(config.scheduling_policy)  # before the weights: a mistake is told at once
        checkpoint = open_checkpoint(config.model)
        self.runner = Runner(config, checkpoint)
        scheduler = Scheduler(
            KVCacheManager(
                self.runner.num_blocks,
                self.runner.layout,
                max_step_tokens=config.max_step_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            max_num_partial_prefills=config.max_num_partial_prefills,
            policy=policy,
        )
        self._eos_token_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)[:MAX_STOP_TOKEN_IDS]
        self.loop = LOOPS[config.engine_mode](scheduler, self.runner)
        self._num_arrived = 0
        self.ready = Ready(
            max_model_len=self.runner.max_model_len,
            vocab_size=self.runner.model_config.vocab_size,
            eos_token_ids=self._eos_token_ids,
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_beam_tokens=[
                max_request_tokens(self.runner.layout, (self.runner.num_blocks - 1) // width, config.max_step_tokens)
                for width in range(1, MAX_BEAM_WIDTH + 1)
            ],
        )
        self.runner.warm_up(background=config.background_compile, progress=progress)

    @property
    def scheduler(self) -> Scheduler:
        return self.loop.scheduler

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add(self, message: AddRequest) -> None:
        """Queue a request, checked before against the limits of `ready`: all its sequences, or all beams."""
        eos = () if message.params.ignore_eos else self._eos_token_ids
        self._num_arrived += 1
        width = message.beam.beam_width if message.beam is not None else message.params.n
        sequences = [
            Request(
                request_id=sequence_id(message.request_id, index),
                prompt_token_ids=message.prompt_token_ids,
                params=message.params,
                seed=nth_seed(message.seed, index),
                max_tokens=message.max_tokens,
                stop_token_ids=frozenset((*message.params.stop_token_ids, *eos)),
                arrival=self._num_arrived,
                index=index,
                priority=message.priority,
                num_logprobs=-1 if message.params.logprobs is None else max(message.params.logprobs, 0),
                num_prompt_logprobs=None if index else message.params.prompt_logprobs,
                bad_words=message.bad_words,
                extra_keys=None if message.cache_salt is None else ExtraKeys(cache_salt=message.cache_salt),
            )
            for index in range(width)
        ]
        first, *others = sequences
        if message.beam is not None:
            search = BeamSearch(message.beam, first.stop_token_ids)
            BeamGroup(search, sequences)
            for beam in sequences:
                beam.num_logprobs = search.num_candidates
        else:
            for other in others:
                other.prefix = first
            first.forks = others
        self.scheduler.add(first)

    def abort(self, sequence: str) -> None:
        """Drop a sequence (`sequence_id`; all beams by the first one's), and free what it holds.

        An unknown one is ignored.
        """
        self.scheduler.abort(sequence)

    def call(self, utility: str) -> Any:
        """Run one of `UTILITIES`, which only look at or change what stands between two steps."""
        assert utility in UTILITIES, utility
        return getattr(self, utility)()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Refused (False) while any request holds blocks."""
        return self.scheduler.kv_cache.reset_prefix_cache()

    def kv_cache_snapshot(self) -> dict[str, Any]:
        """How the KV cache stands; see `kv_cache.snapshot.take_snapshot`."""
        return take_snapshot(self.scheduler.kv_cache, self.scheduler.running)

    def step(self) -> list[TokenOutput | BeamOutput]:
        """Take the loop one step on. Returns what is known to have been generated, if anything."""
        return self.loop.step()

    def close(self) -> None:
        """Stop whatever still goes on in the background."""
        self.runner.close()

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
            **self.runner.stats,
        }
