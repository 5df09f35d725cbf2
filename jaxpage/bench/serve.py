"""`jaxpage bench serve`: many clients of a server at once, with vLLM's options and names of results.

In: the work, how it arrives, and a server's address, or none: then one is started for the bench. Out: times to first
token, per token and between tokens, throughput, and the CPU time of the server's API process.
"""

import argparse
import asyncio
import contextlib
import operator
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import uvloop

from jaxpage.bench.client import Answer, Exchange, ask, read
from jaxpage.bench.health import watched
from jaxpage.config import flag
from jaxpage.errors import ConfigError
from jaxpage.llm import LLM
from jaxpage.sampling_params import SamplingParams

Result = dict[str, float | int | str | None]
METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
METRICS |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}
_START_SECONDS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's options, as far as they are about random prompts."""
    add = parser.add_argument
    add("--base-url", metavar="URL", help="server to ask, such as http://127.0.0.1:8000; default: start one")
    add("--endpoint", default="/v1/completions", metavar="PATH", help="route to ask (%(default)s)")
    add("--served-model-name", metavar="NAME", help="model to ask for; default: whatever the server serves")
    add("--num-prompts", type=int, default=32, metavar="N", help="requests (%(default)s)")
    add("--random-input-len", "--input-len", type=int, default=128, metavar="N", help="prompt tokens (%(default)s)")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="N", help="output tokens (%(default)s)")
    add("--vocab-size", type=int, default=10_000, metavar="N", help="prompts are of token ids below it (%(default)s)")
    add("--request-rate", type=float, default=float("inf"), metavar="R", help="requests per second (%(default)s)")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson arrivals; less: in bursts (%(default)s)")
    add("--max-concurrency", type=int, metavar="N", help="most requests that are open at once; default: no limit")
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="M,...", help="of ttft,tpot,itl,e2el (%(default)s)")
    add("--metric-percentiles", default="99", metavar="P,...", help="percentiles to report (%(default)s)")
    add("--goodput", nargs="+", default=[], metavar="M:MS", help="bounds that a good request keeps, such as ttft:500")
    add("--watch-health", action="store_true", help="report how long /health takes meanwhile, asked every 20 ms")
    add(
        "--compare-offline",
        type=int,
        metavar="N",
        help="do as much work N times more over HTTP and with LLM.generate, in turns, and report the ratio",
    )
    add("--seed", type=int, default=0, metavar="S", help="of prompts, arrivals and engine (%(default)s)")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, engine_options: dict[str, Any]) -> Result:
    """Measure. Raises `ConfigError` for options that cannot be, or a server that does not answer."""
    _check(args)
    with contextlib.ExitStack() as stack:
        base_url = args.base_url
        if base_url is None:
            base_url = stack.enter_context(own_server(_sized(engine_options, args)))
        url = base_url.rstrip("/") + args.endpoint
        (first,) = uvloop.run(ask_all(url, _bodies(args, 1, seed=-1), [0.0], None))  # not counted, as in vLLM
        if first.error is not None:
            raise ConfigError(f"{url} does not answer as it should: {first.error}")
        delays = arrival_times(args.num_prompts, args.request_rate, args.burstiness, args.seed)
        cpu_before = api_cpu_seconds(base_url)
        health: list[float] = []
        with watched(base_url) if args.watch_health else contextlib.nullcontext(health) as health:
            bodies = _bodies(args, args.num_prompts, args.seed)
            answers = uvloop.run(ask_all(url, bodies, delays, args.max_concurrency))
        cpu_after = api_cpu_seconds(base_url)
        compared: Result = {}
        if args.compare_offline is not None:
            with LLM(**_sized(engine_options, args)) as llm:
                compared = compare_offline(url, llm, args)
    cpu = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    return summary(args, answers, cpu) | _of_health(health) | compared


def compare_offline(url: str, llm: LLM, args: argparse.Namespace) -> Result:
    """The same prompts over HTTP and offline, by engines that are alike and one at a time. Ratios are of each turn."""
    params = SamplingParams(temperature=0, max_tokens=args.random_output_len, ignore_eos=True)
    rates: dict[str, list[float]] = {"http": [], "offline": []}
    texts: dict[str, list[str]] = {}
    for turn in range(args.compare_offline + 1):
        bodies = _bodies(args, args.num_prompts, f"{args.seed} compared {turn}")
        prompts = [body["prompt"] for body in bodies]
        for way in ("http", "offline") if turn % 2 else ("offline", "http"):
            started = time.perf_counter()
            if way == "http":
                answers = uvloop.run(ask_all(url, bodies, [0.0] * len(bodies), args.max_concurrency))
                seconds = max(answer.ended for answer in answers) - started
                if failed := [answer.error for answer in answers if answer.error is not None]:
                    raise ConfigError(f"{len(failed)} of {len(answers)} requests were not answered: {failed[0]}")
                texts[way] = [answer.text for answer in answers]
            else:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - started
                texts[way] = [output.outputs[0].text for output in outputs]
            rates[way].append(args.num_prompts * args.random_output_len / seconds)
        if texts["http"] != texts["offline"]:
            raise ConfigError(f"{url} gives other texts than LLM.generate: no work of theirs can be compared")
    http, offline = rates["http"][1:], rates["offline"][1:]  # the first turn of either pays for page faults and caches
    ratios = [*map(operator.truediv, http, offline)]
    return {
        "http_output_throughput": statistics.median(http),
        "offline_output_throughput": statistics.median(offline),
        "http_of_offline": statistics.median(ratios),
        "http_of_offline_each": " ".join(f"{ratio:.3f}" for ratio in ratios),
    }


async def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], delays: Sequence[float], max_concurrency: int | None
) -> list[Answer]:
    """The answers to all requests, each sent so many seconds from now, or later if too many are open."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}

    async def ask_one(body: dict[str, Any], delay: float) -> Exchange:
        await asyncio.sleep(delay)
        async with places:
            return await ask(url, body, headers)

    return [read(exchange) for exchange in await asyncio.gather(*map(ask_one, bodies, delays))]


def arrival_times(num_requests: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are sent: gaps are gamma distributed, exponential for 1."""
    if rate == float("inf"):
        return [0.0] * num_requests
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def summary(args: argparse.Namespace, answers: Sequence[Answer], cpu_seconds: float | None) -> Result:
    """vLLM's numbers, and the CPU time per output token of the process that speaks HTTP."""
    good = [answer for answer in answers if answer.error is None]
    if not good:
        raise ConfigError(f"no request was answered: {answers[0].error}")
    duration = max(answer.ended for answer in answers) - min(answer.started for answer in answers)
    num_output = sum(answer.num_output_tokens for answer in good)
    num_input = sum(answer.num_input_tokens for answer in good)
    result: Result = {
        "completed": len(good),
        "failed": len(answers) - len(good),
        "refused": sum(answer.status == 429 for answer in answers),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "duration": duration,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
    }
    if args.goodput:
        bounds = _bounds(args.goodput)
        kept = [all(_of(answer, name) <= bound for name, bound in bounds.items()) for answer in good]
        result["request_goodput"] = sum(kept) / duration
    for name in args.percentile_metrics.split(","):
        values = [1e3 * gap for answer in good for gap in answer.gaps] if name == "itl" else []
        values = sorted(values or [_of(answer, name) for answer in good])
        result[f"mean_{name}_ms"] = statistics.fmean(values)
        result[f"median_{name}_ms"] = statistics.median(values)
        result[f"std_{name}_ms"] = statistics.pstdev(values)
        for percent in args.metric_percentiles.split(","):
            result[f"p{percent}_{name}_ms"] = percentile(values, float(percent))
    result["api_cpu_s"] = cpu_seconds
    result["api_cpu_us_per_token"] = None if cpu_seconds is None else 1e6 * cpu_seconds / num_output
    return result


def _of_health(times: Sequence[float]) -> Result:
    """Milliseconds that /health took, where it was watched."""
    if not times:
        return {}
    return {
        "health_answers": len(times),
        "median_health_ms": statistics.median(times),
        "p99_health_ms": percentile(sorted(times), 99),
        "max_health_ms": max(times),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, with linear interpolation between two."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def api_cpu_seconds(base_url: str) -> float | None:
    """CPU seconds of the process that answers /metrics, if it tells."""
    try:
        with urllib.request.urlopen(base_url.rstrip("/") + "/metrics", timeout=30) as response:
            text = response.read().decode()
    except OSError:
        return None
    found = re.search(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)
    return None if found is None else float(found[1])


@contextlib.contextmanager
def own_server(options: dict[str, Any]) -> Iterator[str]:
    """The URL of a server that runs meanwhile. Raises `ConfigError` with its last words if it does not start."""
    flags = [_given(name, value) for name, value in options.items()]
    command = [sys.executable, "-m", "jaxpage", "serve", "--port=0", "--no-log-requests", *flags]
    lines: list[str] = []
    announced = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("ready: "):
                announced.set()
        announced.set()

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        reader = threading.Thread(target=read)
        reader.start()
        try:
            announced.wait(_START_SECONDS)
            found = re.search(r"^ready: .* at (http\S+)/v1", "".join(lines), re.MULTILINE)
            if found is None:
                raise ConfigError(f"the server did not start: {(lines or ['it said nothing'])[-1].strip()}")
            yield found[1]
        finally:
            process.terminate()
            process.wait()
            reader.join()


def _given(name: str, value: Any) -> str:
    """An option with its value as one argument of the command line."""
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)}={','.join(value) if isinstance(value, tuple) else value}"


def _sized(engine_options: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """As in the other benches: an engine that holds all requests at once, as far as the user does not say otherwise."""
    sized: dict[str, Any] = {"max_model_len": args.random_input_len + args.random_output_len}
    sized["max_num_seqs"] = min(args.num_prompts, 256)
    return sized | {"background_compile": False} | engine_options


def _bodies(args: argparse.Namespace, num_requests: int, seed: int | str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    named = {} if args.served_model_name is None else {"model": args.served_model_name}
    fixed = named | {"max_tokens": args.random_output_len, "temperature": 0, "ignore_eos": True}
    return [
        fixed | {"prompt": [rng.randrange(args.vocab_size) for _ in range(args.random_input_len)]}
        for _ in range(num_requests)
    ]


def _of(answer: Answer, name: str) -> float:
    """A metric of one request in milliseconds; the gaps between its tokens by their mean."""
    if name == "itl":
        return 1e3 * statistics.fmean(answer.gaps or [0.0])
    return 1e3 * {"ttft": answer.ttft, "tpot": answer.tpot, "e2el": answer.latency}[name]


def _bounds(goodput: Sequence[str]) -> dict[str, float]:
    found = {}
    for bound in goodput:
        name, _, value = bound.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not re.fullmatch(r"\d+(\.\d+)?", value):
            raise ConfigError(f"--goodput {bound!r}: it must be ttft, tpot or e2el with milliseconds, such as ttft:500")
        found[name] = float(value)
    return found


def _check(args: argparse.Namespace) -> None:
    for name in (
        "num_prompts",
        "random_input_len",
        "random_output_len",
        "vocab_size",
        "max_concurrency",
        "compare_offline",
    ):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"{flag(name)} is {value}: it must be at least 1")
    if args.compare_offline is not None and args.base_url is not None:
        raise ConfigError("--compare-offline takes a server of the bench's own, with the same engine: drop --base-url")
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"{flag(name)} is {getattr(args, name)}: it must be more than 0")
    _bounds(args.goodput)
    for name in args.percentile_metrics.split(","):
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics has {name!r}: it must be of {', '.join(METRICS)}")
    for percent in args.metric_percentiles.split(","):
        if not re.fullmatch(r"\d+(\.\d+)?", percent) or float(percent) > 100:
            raise ConfigError(f"--metric-percentiles has {percent!r}: it must be a number in [0, 100]")
