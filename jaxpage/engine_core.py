"""The inner loop: scheduler and runner, one step at a time. Lives in the engine process, or in the caller's."""

import logging
import time
from collections.abc import Callable

from jaxpage.config import EngineConfig
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.models.loading import open_checkpoint
from jaxpage.request import Request
from jaxpage.runner.runner import Runner
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS
from jaxpage.scheduler import Scheduler
from jaxpage.wire import AddRequest, Ready, TokenOutput

logger = logging.getLogger(__name__)


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
    """Requests in, tokens out. The loop is synchronous: schedule, run, wait, update.

    step N:    schedule  plan ─┐            ┌─ update
    device:                    └── forward ─┘
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Load and warm up; `progress(done, total)` counts compiled programs.

        Raises `ModelLoadError` or `ConfigError`.
        """
        checkpoint = open_checkpoint(config.model)
        self.runner = Runner(config, checkpoint)
        self.scheduler = Scheduler(
            KVCacheManager(self.runner.num_blocks, config.block_size),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
        )
        self._eos_token_ids = eos_token_ids(checkpoint.generation_config, checkpoint.config)[:MAX_STOP_TOKEN_IDS]
        self.ready = Ready(
            max_model_len=self.runner.max_model_len,
            vocab_size=self.runner.model_config.vocab_size,
            eos_token_ids=self._eos_token_ids,
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
        )
        self.runner.warm_up(background=config.background_compile, progress=progress)

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def add(self, message: AddRequest) -> None:
        """Queue a request, checked before against the limits of `ready`."""
        eos = () if message.params.ignore_eos else self._eos_token_ids
        self.scheduler.add(
            Request(
                request_id=message.request_id,
                prompt_token_ids=message.prompt_token_ids,
                params=message.params,
                seed=message.seed,
                max_tokens=message.max_tokens,
                stop_token_ids=frozenset((*message.params.stop_token_ids, *eos)),
                arrival_time=time.time(),
            )
        )

    def abort(self, request_id: str) -> None:
        """Drop a request and free what it holds; an unknown id is ignored."""
        self.scheduler.abort(request_id)

    def step(self) -> list[TokenOutput]:
        """Run one step over everything that can run. Returns what it gave each request, if anything."""
        output = self.scheduler.schedule()
        if not output.requests:
            return []
        return self.scheduler.update(output, self.runner.fetch(self.runner.dispatch(output)))

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
            **self.runner.stats,
        }
