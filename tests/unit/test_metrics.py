"""Metrics: what dashboards read is what happened."""

from prometheus_client.parser import text_string_to_metric_families

from jaxpage.metrics import Metrics
from jaxpage.outputs import RequestMetrics
from jaxpage.speculative.acceptance import Acceptance

DASHBOARD = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    *(f"{name}_total" for name in ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens")),
    "generation_tokens_total",
    "request_success_total",
    *(
        f"{name}_bucket"
        for name in (
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "iteration_tokens_total",
        )
    ),
    "cache_config_info",
    *(f"spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")),
}


def samples(metrics: Metrics, **options: bool) -> dict[str, float]:
    """Values by name, those of different labels added up, but for the buckets."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render(**options).decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def filled() -> Metrics:
    metrics = Metrics("m")
    metrics.set_config({"block_size": 16})
    moments = RequestMetrics(100.0, 101.0, 103.0, 107.0)
    metrics.take_first_token(moments, 9)
    metrics.take_tokens(1, None)
    metrics.take_tokens(4, 0.5)
    metrics.take_end(moments, "stop", 9, 5)
    return metrics


def test_every_series_that_dashboards_read_is_there_from_the_start_or_the_first_request() -> None:
    assert {name for name in DASHBOARD if f"jaxpage:{name}" not in samples(filled())} == set()


def test_vllms_names_are_given_besides_when_asked_for() -> None:
    plain, both = samples(filled()), samples(filled(), vllm_names=True)
    assert not any(name.startswith("vllm:") for name in plain)
    assert {name for name in DASHBOARD if f"vllm:{name}" not in both} == set()
    assert both["vllm:e2e_request_latency_seconds_sum"] == both["jaxpage:e2e_request_latency_seconds_sum"] == 7


def test_a_requests_time_is_split_at_its_first_step_and_its_first_token() -> None:
    found = samples(filled())
    for name, seconds in (
        ("time_to_first_token_seconds", 3),
        ("request_queue_time_seconds", 1),
        ("request_prefill_time_seconds", 2),
        ("request_decode_time_seconds", 4),
        ("request_inference_time_seconds", 6),
        ("request_time_per_output_token_seconds", 1),
        ("inter_token_latency_seconds", 0.5),
    ):
        assert found[f"jaxpage:{name}_sum"] == seconds, name
    assert found["jaxpage:prompt_tokens_total"] == 9
    assert found["jaxpage:generation_tokens_total"] == 5
    assert found["jaxpage:request_success_total"] == 1


def test_the_engines_totals_become_counters_and_its_states_gauges() -> None:
    metrics = Metrics("m")
    metrics.take_stats({"num_preemptions": 3, "num_requests_running": 5, "schedule_seconds": 0.25}, [512, 7])
    metrics.take_stats({"num_preemptions": 4, "num_requests_running": 2, "schedule_seconds": 0.5}, [])
    found = samples(metrics)
    assert found["jaxpage:num_preemptions_total"] == 4
    assert found["jaxpage:num_requests_running"] == 2
    assert found["jaxpage:schedule_seconds_total"] == 0.5
    assert found["jaxpage:iteration_tokens_total_sum"] == 519
    assert found["jaxpage:iteration_tokens_total_count"] == 2


def test_drafts_are_counted_and_those_kept_by_their_position_too() -> None:
    metrics, acceptance = Metrics("m"), Acceptance()
    for num_accepted in (3, 1, 0):
        acceptance.count(3, num_accepted)
        metrics.take_stats(acceptance.stats(), [])
    found = samples(metrics)
    prefix = "jaxpage:spec_decode_num_"
    assert [found[f"{prefix}{name}_total"] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [3, 9, 4]
    text = metrics.render().decode()
    for position, count in enumerate((2.0, 1.0, 1.0)):
        assert f'{prefix}accepted_tokens_per_pos_total{{model_name="m",position="{position}"}} {count}\n' in text


def test_a_request_that_never_ran_counts_only_as_ended() -> None:
    metrics = Metrics("m")
    metrics.take_end(RequestMetrics(100.0, None, None, 101.0), "abort", 9, 0)
    found = samples(metrics)
    assert found["jaxpage:request_success_total"] == 1
    assert found["jaxpage:e2e_request_latency_seconds_count"] == 1
    assert found["jaxpage:request_queue_time_seconds_count"] == 0


def test_the_processes_own_series_are_given_once_whatever_the_names() -> None:
    for vllm_names in (False, True):
        text = filled().render(vllm_names=vllm_names).decode()
        assert text.count("\nprocess_cpu_seconds_total ") == 1
