"""What a slow grammar costs the requests that have none, without a model."""

import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxpage.bench.host import Result, make_requests, make_scheduler, sized
from jaxpage.config import SizedConfig
from jaxpage.engine.loops import LOOPS
from jaxpage.engine.simulated_device import SimulatedDevice

if TYPE_CHECKING:
    from jaxpage.structured.constraint import Constraint


def masks(
    options: dict[str, Any],
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    repeat: int,
    device_ms: float,
    mask_ms: float,
) -> Result:
    """Milliseconds between two tokens of requests without a grammar, alone and beside one whose masks are slow."""
    config = sized(num_prompts, options)
    gaps: dict[bool, list[float]] = {False: [], True: []}
    num_masked_tokens = []
    for seed in range(repeat):
        for with_masks in gaps:
            ms_per_token, num_tokens = _run(
                *(config, num_prompts, input_len, output_len, seed, device_ms, mask_ms if with_masks else None)
            )
            gaps[with_masks].append(ms_per_token)
            if with_masks:
                num_masked_tokens.append(num_tokens)
    alone, beside = (statistics.median(gaps[with_masks]) for with_masks in (False, True))
    return {
        "num_requests": num_prompts,
        "device_ms": device_ms,
        "mask_ms": mask_ms,
        "alone_ms_per_token": alone,
        "beside_ms_per_token": beside,
        "delay_ms_per_token": beside - alone,
        "masked_tokens_meanwhile": statistics.median(num_masked_tokens),
    }


class _SlowMask:
    """Stands in for a grammar that allows everything, after a while."""

    def __init__(self, pool: ThreadPoolExecutor, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds
        self.mask: Future[np.ndarray] = pool.submit(self._compute)

    @property
    def is_ready(self) -> bool:
        return self.mask.done()

    def accept(self, token_id: int) -> bool:
        self.mask = self._pool.submit(self._compute)
        return True

    def _compute(self) -> np.ndarray:
        time.sleep(self._seconds)
        return np.full(1, -1, np.int32)


def _run(
    config: SizedConfig,
    num_prompts: int,
    input_len: int,
    output_len: int,
    seed: int,
    device_ms: float,
    mask_ms: float | None,
) -> tuple[float, int]:
    """Milliseconds per step while all requests without a grammar decode, and how many tokens the other one got."""
    device = SimulatedDevice(device_ms / 1e3, num_prompts, input_len + output_len, config.block_size)
    target = LOOPS[config.engine_mode](make_scheduler(config, num_prompts * (input_len + output_len)), device)
    requests = make_requests([(input_len, output_len)] * num_prompts, seed)
    masked, plain = requests[0], requests[1:]
    with ThreadPoolExecutor(1) as pool:
        if mask_ms is not None:
            masked.constraint = cast("Constraint", _SlowMask(pool, mask_ms / 1e3))
        for request in requests:
            target.scheduler.add(request)
        while not all(request.num_output_tokens > 1 for request in plain):
            target.step()
        before, started = plain[0].num_output_tokens, time.perf_counter()
        while not any(request.is_finished for request in plain):
            target.step()
        seconds = time.perf_counter() - started
        num_masked = masked.num_output_tokens
        for request in requests:
            target.scheduler.abort(request.request_id)
        target.drain()
    device.close()
    return 1e3 * seconds / (plain[0].num_output_tokens - before), num_masked
