"""Benches of the host's part alone: scheduler, loops, plans and KV cache bookkeeping, without a model or a device."""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from jaxpage import wire
from jaxpage.config import EngineConfig, SizedConfig
from jaxpage.engine.loops import LOOPS, Loop, freeze_gc
from jaxpage.engine.simulated_device import SimulatedDevice, drawn
from jaxpage.errors import ConfigError
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec
from jaxpage.requests.request import Request
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler.policies import load_policy
from jaxpage.scheduler.scheduler import Scheduler

Result = dict[str, float | int | str]

_LENGTH_SPREAD = 0.8
"""Standard deviation of the logarithm of a length: a median conversation, and a few that are ten times as long."""


def scheduler(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Milliseconds per step that scheduling and taking in tokens cost, with every request generating."""
    config = sized(num_prompts, options)
    schedule_ms: list[float] = []
    update_ms: list[float] = []
    for seed in range(repeat):
        target = make_scheduler(config, num_prompts * (input_len + output_len))
        freeze_gc()
        for request in make_requests([(input_len, output_len)] * num_prompts, seed):
            target.add(request)
        while target.has_requests:
            started = time.perf_counter()
            output = target.schedule()
            scheduled = time.perf_counter()
            sampled = [drawn(request) for request in output.requests]
            fetched = time.perf_counter()
            target.update(output, sampled)
            updated = time.perf_counter()
            # All generate and nobody is done: the steady state.
            if output.query_lens == [1] * num_prompts and target.has_requests:
                schedule_ms.append(1e3 * (scheduled - started))
                update_ms.append(1e3 * (updated - fetched))
    return {
        "num_requests": num_prompts,
        "num_steps": len(schedule_ms),
        "schedule_ms": _mean(schedule_ms),
        "update_ms": _mean(update_ms),
        "schedule_update_ms": _mean(schedule_ms) + _mean(update_ms),
    }


def loop(
    options: dict[str, Any],
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    repeat: int,
    device_ms: float,
) -> Result:
    """Share of the time that a device of `device_ms` per step is busy, and the host's milliseconds, in each mode.

    All requests decode; the host's part ends with the encoded message for the client.
    """
    result: Result = {"num_requests": num_prompts, "device_ms": device_ms}
    for name, loop_type in LOOPS.items():
        busy: list[float] = []
        host: dict[str, list[float]] = {phase: [] for phase in ("schedule", "dispatch", "update", "encode")}
        for seed in range(repeat):
            config = sized(num_prompts, options)
            device = SimulatedDevice(device_ms / 1e3, num_prompts, input_len + output_len, config.block_size)
            target = loop_type(make_scheduler(config, num_prompts * (input_len + output_len)), device)
            freeze_gc()
            for request in make_requests([(input_len, output_len)] * num_prompts, seed):
                target.scheduler.add(request)
            _decode_all(target, num_prompts, host)
            device.close()
            ran = list(zip(device.started, device.ended, device.only_decodes, strict=True))
            steps = [(started, ended) for started, ended, only_decodes in ran if only_decodes]
            share = sum(ended - started for started, ended in steps) / (steps[-1][1] - steps[0][0]) if steps else 0.0
            busy.append(share)
        result[f"{name}_busy_fraction"] = statistics.median(busy)
        for phase, seconds in host.items():
            result[f"{name}_{phase}_ms"] = 1e3 * _mean(seconds)
        result[f"{name}_host_ms"] = sum(1e3 * _mean(seconds) for seconds in host.values())
    return result


def _decode_all(target: Loop, num_prompts: int, host: dict[str, list[float]]) -> None:
    """Run to the end; adds the seconds of each phase of every step in which all requests decode."""
    while target.scheduler.has_requests:
        before = dict(target.seconds)
        outputs = target.step()
        started = time.perf_counter()
        wire.encode(wire.Outputs(outputs, {}))
        encoded = time.perf_counter() - started
        if len(outputs) == num_prompts and target.scheduler.has_requests:
            for phase in ("schedule", "dispatch", "update"):
                host[phase].append(target.seconds[phase] - before[phase])
            host["encode"].append(encoded)


def plan(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Bytes that are sent to the device per step: while all requests decode, and over the whole run."""
    config = sized(num_prompts, options)
    decode: list[int] = []
    everything: list[int] = []
    for seed in range(repeat):
        device = SimulatedDevice(0, num_prompts, input_len + output_len, config.block_size)
        target = LOOPS[config.engine_mode](make_scheduler(config, num_prompts * (input_len + output_len)), device)
        for request in make_requests([(input_len, output_len)] * num_prompts, seed):
            target.scheduler.add(request)
        while target.scheduler.has_requests:
            target.step()
        device.close()
        everything += device.num_bytes
        decode += [count for count, only in zip(device.num_bytes, device.only_decodes, strict=True) if only]
    return {
        "num_requests": num_prompts,
        "num_steps": len(everything),
        "num_decode_steps": len(decode),
        "decode_bytes_per_step": _mean(decode),
        "mean_bytes_per_step": _mean(everything),
        "max_bytes_per_step": max(everything),
    }


def kv(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Share of the allocated KV slots that hold nothing, over all steps of requests with mixed lengths.

    Lengths are log-normal, with these means: by default those of ShareGPT's conversations that the PagedAttention paper
    (Kwon et al., 2023) gives.
    """
    config = sized(num_prompts, options)
    num_allocated = num_unwritten = 0
    for seed in range(repeat):
        lengths = _mixed_lengths(num_prompts, input_len, output_len, random.Random(seed))
        target = make_scheduler(config, sum(map(sum, lengths)))
        for request in make_requests(lengths, seed):
            target.add(request)
        while target.has_requests:
            output = target.schedule()
            for request in target.running:
                slots = len(target.kv_cache.tables(request.request_id)[0]) * config.block_size
                num_allocated += slots
                num_unwritten += slots - request.num_computed_tokens
            target.update(output, [drawn(request) for request in output.requests])
    return {
        "num_requests": num_prompts,
        "block_size": config.block_size,
        "mean_input_len": input_len,
        "mean_output_len": output_len,
        "waste_fraction": num_unwritten / num_allocated,
    }


def _mean(values: Sequence[float]) -> float:
    if not values:
        raise ConfigError("there was no step in which all requests decode: raise --output-len or lower --num-prompts")
    return statistics.fmean(values)


def sized(num_prompts: int, options: dict[str, Any]) -> SizedConfig:
    """An engine's options with a row for every request, as on a CPU."""
    return EngineConfig(**({"max_num_seqs": num_prompts} | options)).sized("cpu")


def make_scheduler(config: SizedConfig, num_tokens: int) -> Scheduler:
    """One that holds all of `num_tokens` at once, for a model of full attention."""
    layout = plan_layout([[KVSpec(num_kv_heads=1, head_dim=64)]], config.block_size)
    num_blocks = config.num_blocks or num_tokens // config.block_size + 2 * config.max_num_seqs
    kv_cache = KVCacheManager(
        num_blocks,
        layout,
        max_step_tokens=config.max_step_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return Scheduler(
        kv_cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        policy=load_policy(config.scheduling_policy),
    )


def make_requests(lengths: list[tuple[int, int]], seed: int) -> list[Request]:
    """Requests of random tokens, by (prompt, output) length."""
    rng = random.Random(seed)
    return [
        Request(
            str(index),
            [rng.randrange(50_000) for _ in range(num_prompt)],
            SamplingParams(max_tokens=num_output, ignore_eos=True),
            seed=0,
            max_tokens=num_output,
            stop_token_ids=frozenset(),
            arrival=index,
        )
        for index, (num_prompt, num_output) in enumerate(lengths)
    ]


def _mixed_lengths(count: int, input_len: int, output_len: int, rng: random.Random) -> list[tuple[int, int]]:
    def length(mean: int) -> int:
        # The mean of a log-normal variable is its median times exp(spread ** 2 / 2).
        return max(1, round(mean * rng.lognormvariate(-(_LENGTH_SPREAD**2) / 2, _LENGTH_SPREAD)))

    return [(length(input_len), length(output_len)) for _ in range(count)]
