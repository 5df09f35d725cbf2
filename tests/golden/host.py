"""An engine in this process whose host side is exchanged for a while: the compiled programs stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager

from jaxpage import LLM
from jaxpage.engine.core import EngineCore
from jaxpage.engine.loops import LOOPS
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.scheduler.scheduler import Scheduler


def core_of(llm: LLM) -> EngineCore:
    """The engine of an `LLM(multiprocess=False)`."""
    core = llm._engine._core  # type: ignore[union-attr]
    assert isinstance(core, EngineCore)
    return core


@contextmanager
def exchanged_host(
    llm: LLM,
    *,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    mode: str = "resident",
    caching: bool = True,
) -> Iterator[Scheduler]:
    """Serve with an empty cache, at most as many blocks, rows and tokens per step as the engine has, in the mode given.

    At the end nothing may be left running.
    """
    core = core_of(llm)
    config, runner, loop = core.runner.plan.config, core.runner, core.loop
    max_step_tokens = config.max_step_tokens
    kv_cache = KVCacheManager(
        num_blocks or runner.plan.num_blocks,
        runner.plan.layout,
        max_step_tokens=max_step_tokens,
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(
        kv_cache,
        max_num_seqs=max_num_seqs or config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens or config.max_num_batched_tokens,
    )
    core.loop = LOOPS[mode](scheduler, runner)
    try:
        yield scheduler
        kv_cache.check_integrity()
        assert kv_cache.pool.usage == 0
    finally:
        core.loop = loop
        loop.scheduler.kv_cache.reset_prefix_cache()  # what it had cached has been overwritten
