"""Benches of the whole engine, through the same API that users have. Prompts are random token ids, EOS is ignored."""

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxpage.bench import host, masks, sampler
from jaxpage.bench import speculation as guessing
from jaxpage.llm import LLM
from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import SamplingParams

Result = dict[str, float | int | str]
_FIRST_REQUEST_TOKENS = 32
_LOOK_SECONDS = 0.1


def throughput(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Tokens per second when all requests arrive at once; the run's time includes the prompts."""
    with _make_llm(options, input_len + output_len, num_prompts) as llm:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        _run(llm, 1, input_len, params, seed=-1)  # the first run of a process pays for page faults and caches
        seconds = [_timed(llm, num_prompts, input_len, params, seed)[0] for seed in range(repeat)]
        elapsed = statistics.median(seconds)
        return {
            "num_prompts": num_prompts,
            "input_len": input_len,
            "output_len": output_len,
            "elapsed_s": elapsed,
            "requests_per_s": num_prompts / elapsed,
            "output_tokens_per_s": num_prompts * output_len / elapsed,
            "total_tokens_per_s": num_prompts * (input_len + output_len) / elapsed,
            **_programs(llm),
        }


def latency(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Seconds of one batch: to the first token, per token after it, and in all."""
    with _make_llm(options, input_len + output_len, num_prompts) as llm:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        _run(llm, 1, input_len, params, seed=-1)
        runs = [_timed(llm, num_prompts, input_len, params, seed) for seed in range(repeat)]
        ttft = [output.metrics.time_to_first_token or 0.0 for _, outputs in runs for output in outputs]
        tpot = [_seconds_per_token(output) for _, outputs in runs for output in outputs]
        return {
            "num_prompts": num_prompts,
            "input_len": input_len,
            "output_len": output_len,
            "latency_s": statistics.median(seconds for seconds, _ in runs),
            "ttft_median_s": statistics.median(ttft),
            "tpot_median_s": statistics.median(tpot),
            **_programs(llm),
        }


def startup(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Seconds from the start to servable and to the first token, on an empty program cache and on a full one.

    And how much longer the first request of a cold start takes, of 32 tokens, than the same when all is compiled.
    Every start is a new engine process; the first one also fills the operating system's file cache.
    """
    cold: list[_Start] = []
    warm: list[_Start] = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(_start(options | {"compile_cache_dir": folder}, input_len, wait_for_all=True))
            warm.append(_start(options | {"compile_cache_dir": folder}, input_len, wait_for_all=False))
    return {
        "cold_ready_s": statistics.median(start.ready for start in cold),
        "cold_first_token_s": statistics.median(start.first_token for start in cold),
        "cold_first_request_s": statistics.median(start.first_request for start in cold),
        "warm_ready_s": statistics.median(start.ready for start in warm),
        "warm_first_token_s": statistics.median(start.first_token for start in warm),
        "first_request_over_warm": statistics.median(start.first_request / start.later_request for start in cold),
    }


def prefix(options: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int) -> Result:
    """Seconds to the first token of a prompt that was never seen, and of the same one again."""
    cold: list[float] = []
    warm: list[float] = []
    with _make_llm(options, input_len + output_len, 1) as llm:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        _run(llm, 1, input_len, params, seed=-1)
        for seed in range(num_prompts * repeat):
            for seconds in (cold, warm):
                (output,) = _run(llm, 1, input_len, params, seed)
                seconds.append(output.metrics.time_to_first_token or 0.0)
        num_cached = output.num_cached_tokens
    return {
        "num_prompts": num_prompts * repeat,
        "input_len": input_len,
        "num_cached_tokens": num_cached,
        "cold_ttft_s": statistics.median(cold),
        "warm_ttft_s": statistics.median(warm),
        "speedup": statistics.median(cold) / statistics.median(warm),
    }


def speculation(options: dict[str, Any], **sizes: int) -> Result:
    """See `bench.speculation`."""
    return guessing.speculation(options, **sizes, make_llm=_make_llm)


@dataclass(frozen=True)
class Bench:
    """A bench and its usual size."""

    run: Callable[..., Result]
    help: str
    num_prompts: int = 32
    input_len: int = 128
    output_len: int = 128
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    """How long things take that are simulated, by option."""


BENCHES: dict[str, Bench] = {
    "throughput": Bench(throughput, "tokens per second of a batch that arrives at once"),
    "latency": Bench(latency, "time to first token and per token of a batch"),
    "startup": Bench(startup, "seconds to servable and to the first token, on an empty and on a full program cache"),
    "prefix": Bench(prefix, "time to first token of a new prompt and of a cached one", 5, 1000, 4),
    "speculation": Bench(speculation, "what drafts gain on texts that repeat themselves, against none", 1, 256, 256),
    "sampler": Bench(sampler.sampler, "what options of sampling cost a batch, and filters alone", 32, 64, 64),
    "scheduler": Bench(host.scheduler, "host milliseconds per step, without a model", 256, 128, 256),
    "loop": Bench(
        host.loop,
        "how busy each engine mode keeps a simulated device, and host time",
        256,
        128,
        128,
        {"device_ms": 5.0},
    ),
    "plan": Bench(host.plan, "bytes sent to the device per step, without a model", 256, 128, 128),
    "masks": Bench(
        masks.masks,
        "what a slow grammar costs the requests that have none, on a simulated device",
        64,
        16,
        128,
        {"device_ms": 5.0, "mask_ms": 30.0},
    ),
    "kv": Bench(host.kv, "allocated KV slots that hold nothing, for mixed lengths, without a model", 64, 161, 338),
}


def _make_llm(options: dict[str, Any], num_tokens: int, num_prompts: int) -> LLM:
    """An engine sized for the bench, as far as the user's options do not say otherwise."""
    sized = {"max_model_len": num_tokens, "max_num_seqs": min(num_prompts, 256)}
    return LLM(**(sized | {"background_compile": False} | options))


def _run(llm: LLM, num_prompts: int, input_len: int, params: SamplingParams, seed: int) -> list[RequestOutput]:
    rng = random.Random(seed)
    vocab_size = llm.tokenizer.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(input_len)] for _ in range(num_prompts)]
    return llm.generate(prompts, params, use_tqdm=False)


def _timed(
    llm: LLM, num_prompts: int, input_len: int, params: SamplingParams, seed: int
) -> tuple[float, list[RequestOutput]]:
    started = time.perf_counter()
    outputs = _run(llm, num_prompts, input_len, params, seed)
    return time.perf_counter() - started, outputs


def _seconds_per_token(output: RequestOutput) -> float:
    metrics, num_tokens = output.metrics, len(output.outputs[0].token_ids)
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    return (metrics.finished_time - metrics.first_token_time) / max(num_tokens - 1, 1)


class _Start(NamedTuple):
    """Seconds of one start, each from its beginning but for the requests' own."""

    ready: float
    first_token: float
    first_request: float
    later_request: float
    """Of one as long when all programs are ready, where that was waited for."""


def _start(options: dict[str, Any], input_len: int, *, wait_for_all: bool) -> _Start:
    """Start an engine and ask it once; `wait_for_all` stays until every program is on disk."""
    started = time.perf_counter()
    with LLM(**options) as llm:
        ready = time.perf_counter() - started
        params = SamplingParams(temperature=0, max_tokens=_FIRST_REQUEST_TOKENS, ignore_eos=True)
        first, (output,) = _timed(llm, 1, input_len, params, seed=0)
        later = math.nan
        if wait_for_all:
            _wait_for_programs(llm)
            later = statistics.median(_timed(llm, 1, input_len, params, seed)[0] for seed in range(1, 4))
        return _Start(ready, ready + (output.metrics.time_to_first_token or 0.0), first, later)


def _wait_for_programs(llm: LLM) -> None:
    """Until all programs are ready."""
    while llm.stats["num_programs"] < llm.stats["num_programs_wanted"]:
        llm.kv_cache_snapshot()  # the engine says how it stands with whatever it answers
        time.sleep(_LOOK_SECONDS)


def _programs(llm: LLM) -> Result:
    return {
        "num_programs": int(llm.stats["num_programs"]),
        "num_programs_loaded": int(llm.stats["num_programs_loaded"]),
        "compile_seconds": llm.stats["compile_seconds"],
    }
