"""`jaxpage bench serve` against a server on the fake engine."""

import argparse
import asyncio
import itertools
import json
import socket
import statistics
import threading
from typing import Any, cast

import pytest
from conftest import ready_engine
from fake_engine import FakeEngine, Script
from served import served
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from jaxpage import cli
from jaxpage.bench.client import Answer, Exchange, ask, read
from jaxpage.bench.health import watched
from jaxpage.bench.serve import arrival_times, ask_all, compare_offline, percentile
from jaxpage.errors import ConfigError
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.app import build_app
from jaxpage.server_config import ServerConfig

WORK = ["--num-prompts=6", "--input-len=3", "--output-len=4", "--vocab-size=200"]


def bench(url: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert cli.main(["bench", "serve", "--base-url", url, "--json", *WORK, *options]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_result_has_vllms_names_and_adds_up(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--percentile-metrics=ttft,tpot,itl,e2el", "--metric-percentiles=50,99.9", "--goodput", "ttft:60000"]
    result = bench(url, capsys, *options)
    assert (result["completed"], result["failed"], result["request_rate"]) == (6, 0, "inf")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 3, 6 * 4)
    assert result["output_throughput"] == pytest.approx(24 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(6 / result["duration"])
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p50", "p99.9")} <= result.keys()
        assert result[f"p50_{metric}_ms"] == pytest.approx(result[f"median_{metric}_ms"])
    assert 0 < result["mean_ttft_ms"] <= result["mean_e2el_ms"] <= 1e3 * result["duration"]
    assert result["api_cpu_us_per_token"] == pytest.approx(1e6 * result["api_cpu_s"] / 24)
    assert bench(url, capsys, "--goodput", "ttft:0", "tpot:60000")["request_goodput"] == 0


def test_the_same_work_is_asked_for_each_time_after_one_that_does_not_count(
    url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    bench(url, capsys)
    params = engine.seen_params
    assert len(params) == 1 + 6
    assert {(one.max_tokens, one.ignore_eos) for one in params} == {(4, True)}


def test_no_more_are_open_at_once_than_may_be() -> None:
    engine = ready_engine()
    engine.scripts = {"": Script(delay=0.005)}
    open_at_once = []
    add_request = engine.add_request

    def count(*args: Any, **options: Any) -> Any:
        stream = add_request(*args, **options)
        open_at_once.append(engine.num_open)
        return stream

    engine.add_request = count
    with served(build_app(engine, ServerConfig(log_requests=False))) as url:
        bodies = [{"prompt": [97], "max_tokens": 3}] * 8
        answers = asyncio.run(ask_all(f"{url}/v1/completions", bodies, [0.0] * 8, 3))
    assert [answer.error for answer in answers] == [None] * 8
    assert max(open_at_once) == 3


def test_failures_are_counted_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ready_engine(max_num_seqs=1)
    engine.scripts = {"": Script(delay=0.05)}
    with served(build_app(engine, ServerConfig(max_num_waiting=0, log_requests=False))) as url:
        result = bench(url, capsys)
        assert result["failed"] > 0
        assert result["completed"] + result["failed"] == 6
        assert result["refused"] == result["failed"]
        engine.is_dead = True
        assert cli.main(["bench", "serve", "--base-url", url, *WORK]) == 1
        complaint = capsys.readouterr().err
        assert f"{url}/v1/completions does not answer" in complaint
        assert "503" in complaint


def test_health_is_watched_meanwhile(url: str, engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(url, capsys, "--watch-health")
    assert result["completed"] == 6
    assert result["health_answers"] >= 1
    assert 0 < result["median_health_ms"] <= result["p99_health_ms"] <= result["max_health_ms"]
    with pytest.raises(ConfigError, match="/health does not answer as it should: 404"), watched(f"{url}/nowhere"):
        pass


def test_the_watch_goes_on_over_a_new_connection_where_the_server_closes_idle_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        num_answered = 0

        def answer_once_per_connection() -> None:
            nonlocal num_answered
            while True:
                connection, _ = server.accept()
                with connection:
                    if not connection.recv(2**16):  # the one that ends this thread
                        return
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")  # and keep-alive is promised
                    num_answered += 1
                    if num_answered >= 3:
                        enough.set()

        enough = threading.Event()
        thread = threading.Thread(target=answer_once_per_connection)
        thread.start()
        host, port = server.getsockname()
        try:
            with watched(f"http://{host}:{port}") as times:
                assert enough.wait(60)
        finally:
            socket.create_connection((host, port)).close()
            thread.join()
    assert len(times) >= 3


def test_the_watch_says_what_went_wrong() -> None:
    with socket.socket() as nobody_listens:
        nobody_listens.bind(("127.0.0.1", 0))
        host, port = nobody_listens.getsockname()
        with pytest.raises(ConfigError, match="ConnectionRefusedError"), watched(f"http://{host}:{port}"):
            pass


class Offline:
    """Answers as the fake engine does, or `text`."""

    def __init__(self, text: str | None = None) -> None:
        self.text, self.seen = text, list[list[int]]()

    def generate(self, prompts: list[list[int]], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        self.seen += prompts
        text = self.text or Script().text[: params.max_tokens]
        return [RequestOutput("", None, prompt, [CompletionOutput(0, text, [])], True) for prompt in prompts]


def test_offline_and_http_do_the_same_new_work_in_each_turn(url: str, engine: FakeEngine) -> None:
    args = argparse.Namespace(
        num_prompts=6,
        random_input_len=3,
        random_output_len=4,
        vocab_size=200,
        max_concurrency=None,
        served_model_name=None,
        seed=0,
        compare_offline=2,
    )
    llm: Any = Offline()
    result = compare_offline(f"{url}/v1/completions", llm, args)
    assert sorted(llm.seen) == sorted(engine.seen_prompts)
    assert len({tuple(prompt) for prompt in llm.seen}) == 3 * 6, "the first turn warms up"
    assert result["http_output_throughput"] > 0
    first, second = map(float, str(result["http_of_offline_each"]).split())
    assert result["http_of_offline"] == pytest.approx((first + second) / 2, abs=0.001)
    with pytest.raises(ConfigError, match="gives other texts than LLM"):
        compare_offline(f"{url}/v1/completions", cast("Any", Offline("Hell.")), args)
    engine.scripts[""] = Script(fail_after=2)
    with pytest.raises(ConfigError, match="6 of 6 requests were not answered"):
        compare_offline(f"{url}/v1/completions", llm, args)


def test_a_stream_that_ends_with_an_error_or_is_none_is_a_failure() -> None:
    async def nothing(request: object) -> PlainTextResponse:
        return PlainTextResponse("no events here")

    engine = ready_engine()
    engine.scripts["f"] = Script(fail_after=2, delay=0.01)
    app = build_app(engine, ServerConfig(log_requests=False))
    with served(app) as url, served(Starlette(routes=[Route("/", nothing, methods=["POST"])])) as other:
        fault = read(asyncio.run(ask(f"{url}/v1/completions", {"prompt": "f"})))
        plain = read(asyncio.run(ask(f"{other}/", {})))
    gone = read(asyncio.run(ask(f"{url}/v1/completions", {"prompt": "x"})))
    assert "internal server error" in (fault.error or "")
    assert plain.error == "no text came"
    assert "ConnectionRefused" in (gone.error or "")


CHUNK = b'data: {"choices": [{"text": "ab"}], "usage": {"completion_tokens": 3, "prompt_tokens": 2}}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(CHUNK), CHUNK)


@pytest.mark.parametrize(
    ("sent", "text", "error"),
    [
        (CHUNKED + b"0\r\n\r\n", "ab", None),
        (CHUNKED, "ab", "EOFError: the answer broke off"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + CHUNK * 2 + b"data: [DONE]\n\n", "abab", None),
        (b"HTTP/1.1 429 Busy\r\nContent-Length: 5\r\n\r\nlater", "", "ValueError: 429 later"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\ndata: [\n", "", "JSONDecodeError"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata: {}\n", "", "KeyError"),
        (b"what?", "", "HttpParserError"),
        (b"", "", "EOFError: the connection was closed without an answer"),
    ],
)
def test_bytes_are_read_as_they_are_meant_wherever_they_were_cut(sent: bytes, text: str, error: str | None) -> None:
    async def arrived(size: int) -> Exchange:
        exchange = Exchange()
        exchange.pieces = [(float(place), sent[place : place + size]) for place in range(0, len(sent), size)]
        return exchange

    for size in (1, 7, 10_000):
        answer = read(asyncio.run(arrived(size)))
        assert answer.text == text
        assert (answer.error is None) if error is None else (error in (answer.error or "")), answer.error
        assert answer.error is not None or (answer.num_output_tokens, answer.num_input_tokens) == (3, 2)


def test_moments_become_latencies() -> None:
    answer = Answer(10.0, ended=13.0, token_times=[11.0, 11.5, 13.0], num_output_tokens=5)
    assert (answer.ttft, answer.tpot, answer.latency, answer.gaps) == (1.0, 0.5, 3.0, [0.5, 1.5])


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_requests_arrive_at_the_rate_asked_for_and_the_same_each_time(burstiness: float) -> None:
    times = arrival_times(4000, 10.0, burstiness, seed=1)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.1)
    assert statistics.pvariance(gaps) == pytest.approx(0.01 / burstiness, rel=0.3)
    assert times == arrival_times(4000, 10.0, burstiness, seed=1)
    assert arrival_times(3, float("inf"), burstiness, seed=1) == [0.0] * 3


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert [percentile([1.0, 2.0, 4.0], percent) for percent in (0, 25, 50, 75, 100)] == [1.0, 1.5, 2.0, 3.0, 4.0]
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--request-rate", "0"], "--request-rate is 0.0"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--goodput", "ttft"], "--goodput 'ttft'"),
        (["--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics has 'speed'"),
        (["--compare-offline", "0"], "--compare-offline is 0"),
        (["--compare-offline", "1"], "drop --base-url"),
        (["--metric-percentiles", "101"], "--metric-percentiles has '101'"),
    ],
)
def test_an_option_that_cannot_be_is_told(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *options]) == 1
    assert says in capsys.readouterr().err
