"""What dashboards read: the engine's counters and the requests' timings, as Prometheus series.

In: the engine's statistics after each step, and every request as it goes on. Out: text in Prometheus' format.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from jaxpage.outputs import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX, VLLM_PREFIX = "jaxpage:", "vllm:"

_GAUGES = {
    "num_requests_running": "requests that have a row in the batch",
    "num_requests_waiting": "requests that wait for one",
    "kv_cache_usage_perc": "share of KV blocks in use, 0 to 1",
    "num_programs": "compiled programs that are ready",
    "num_programs_wanted": "compiled programs that there will be",
    "num_programs_loaded": "of the ready programs, those that came from disk",
    "compile_seconds": "seconds that making programs ready has taken, added up over threads",
}
_COUNTERS = {
    "num_preemptions": "requests that had to give up their KV blocks for a while",
    "prefix_cache_queries": "tokens looked up in the prefix cache",
    "prefix_cache_hits": "tokens found there",
    "num_recompiles": "programs compiled while serving",
    "num_steps": "steps of the model",
    "schedule_seconds": "host time: choosing who computes what",
    "dispatch_seconds": "host time: packing a step and sending it off",
    "fetch_seconds": "host time: waiting for a step's results",
    "update_seconds": "host time: taking in a step's results",
    "mask_seconds": "host time: waiting for the masks of grammars",
    "spec_decode_num_drafts": "times that drafts of a request were checked",
    "spec_decode_num_draft_tokens": "drafts checked",
    "spec_decode_num_accepted_tokens": "drafts checked and kept",
}
"""Names as in `EngineCore.stats`."""
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
"""The same for one that has a count for each position, which follows its name behind a colon."""

_LATENCIES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKEN_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_DURATIONS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(slots=True)
class Totals:
    """What has been counted so far, for a reader who wants a few numbers and no text to parse."""

    prompt_tokens: int = 0
    """Of requests that got their first token."""
    generation_tokens: int = 0
    first_tokens: int = 0
    """Requests that got one, and whose time to it is known."""
    first_token_seconds: float = 0.0
    """Their times from arrival to first token, added up."""


class Metrics:
    """The series of one served model."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._process = CollectorRegistry()
        """CPU time, memory and files of the process that serves HTTP, under Prometheus' own names."""
        ProcessCollector(registry=self._process)
        self._model_name = model_name
        self.totals = Totals()
        self._gauges = {name: self._gauge(name, text) for name, text in _GAUGES.items()}
        self._counters = {name: self._counter(name, text) for name, text in _COUNTERS.items()}
        self._by_position = Counter(
            PREFIX + _PER_POSITION,
            "drafts kept, by their place behind the last known token",
            ("model_name", "position"),
            registry=self._registry,
        )
        self._seen = dict.fromkeys(_COUNTERS, 0.0)
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests that got their first token")
        self._generation_tokens = self._counter("generation_tokens", "generated tokens")
        self._success = Counter(
            PREFIX + "request_success",
            "requests that have ended, by reason",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._responses = Counter(
            PREFIX + "http_responses",
            "responses of the server, by status; 499: the client had left",
            ("model_name", "status"),
            registry=self._registry,
        )
        self._step_tokens = self._histogram("iteration_tokens_total", "tokens of a step", _STEP_TOKENS)
        self._first_token = self._histogram("time_to_first_token_seconds", "arrival to first token", _LATENCIES)
        self._token_gap = self._histogram("inter_token_latency_seconds", "gap between two tokens", _TOKEN_GAPS)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "a request's time per token after the first", _TOKEN_GAPS
        )
        self._latency = self._histogram("e2e_request_latency_seconds", "arrival to end", _DURATIONS)
        self._queue = self._histogram("request_queue_time_seconds", "arrival to first step", _DURATIONS)
        self._prefill = self._histogram("request_prefill_time_seconds", "first step to first token", _DURATIONS)
        self._decode = self._histogram("request_decode_time_seconds", "first token to end", _DURATIONS)
        self._inference = self._histogram("request_inference_time_seconds", "first step to end", _DURATIONS)
        self._request_prompt = self._histogram("request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._request_generation = self._histogram("request_generation_tokens", "generated tokens of one", _TOKENS)

    def render(self, *, vllm_names: bool = False) -> bytes:
        """All series as text; with `vllm_names`, once more under vLLM's prefix."""
        text = generate_latest(self._registry)
        if vllm_names:
            text += text.replace(PREFIX.encode(), VLLM_PREFIX.encode())
        return text + generate_latest(self._process)

    def set_config(self, config: Mapping[str, object]) -> None:
        """What the cache is like, as labels of a series that is always 1."""
        labels = {name: str(value) for name, value in config.items()}
        info = Gauge(PREFIX + "cache_config_info", "the KV cache", tuple(labels), registry=self._registry)
        info.labels(**labels).set(1)

    def take_stats(self, stats: Mapping[str, float], step_tokens: Sequence[int]) -> None:
        """The engine's newest word on how it stands, and the tokens of each step since the last one."""
        for name, gauge in self._gauges.items():
            gauge.set(stats.get(name, 0))
        for name, counter in self._counters.items():
            total = stats.get(name, 0)
            counter.inc(max(total - self._seen[name], 0))
            self._seen[name] = total
        for name in stats.keys() - self._counters.keys():
            series, _, position = name.partition(":")
            if series == _PER_POSITION:
                labelled = self._by_position.labels(model_name=self._model_name, position=position)
                labelled.inc(max(stats[name] - self._seen.get(name, 0), 0))
                self._seen[name] = stats[name]
        for num_tokens in step_tokens:
            self._step_tokens.observe(num_tokens)

    def take_first_token(self, metrics: RequestMetrics, num_prompt_tokens: int) -> None:
        """A request has its first token."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self.totals.prompt_tokens += num_prompt_tokens
        if (seconds := metrics.time_to_first_token) is not None:
            self._first_token.observe(seconds)
            self.totals.first_tokens += 1
            self.totals.first_token_seconds += seconds

    def take_tokens(self, num_tokens: int, gap: float | None) -> None:
        """A sequence has new tokens; `gap` is the time since its last ones, in seconds."""
        self._generation_tokens.inc(num_tokens)
        self.totals.generation_tokens += num_tokens
        if gap is not None:
            self._token_gap.observe(gap)

    def take_end(self, metrics: RequestMetrics, reason: str, num_prompt_tokens: int, num_generated: int) -> None:
        """A request has ended, with `num_generated` tokens over all its sequences."""
        self._success.labels(model_name=self._model_name, finished_reason=reason).inc()
        self._request_prompt.observe(num_prompt_tokens)
        self._request_generation.observe(num_generated)
        for histogram, seconds in (
            (self._latency, metrics.latency),
            (self._queue, metrics.queue_time),
            (self._prefill, metrics.prefill_time),
            (self._decode, metrics.decode_time),
            (self._inference, metrics.inference_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if metrics.decode_time is not None and num_generated > 1:
            self._per_token.observe(metrics.decode_time / (num_generated - 1))

    def take_response(self, status: int) -> None:
        """The server has answered a request."""
        self._responses.labels(model_name=self._model_name, status=str(status)).inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(PREFIX + name, text, ("model_name",), registry=self._registry)
        return gauge.labels(model_name=self._model_name)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(PREFIX + name, text, ("model_name",), registry=self._registry)
        return counter.labels(model_name=self._model_name)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(PREFIX + name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return histogram.labels(model_name=self._model_name)
