"""A real server and engine process on a tiny model under many requests: none is lost, nothing leaks or compiles."""

import asyncio
import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, server_process, wait_until_gone

GUARD_SECONDS = 300.0
NUM_UNIQUE = 2000
MAX_GROWTH = 20 * 1024
"""Bytes per request, of server and engine together."""


@pytest.fixture(scope="module")
def server(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[ServerProcess]:
    options = dict(tiny_options, max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64, num_blocks=200)
    model = options.pop("model")
    del options["logits_processors"]  # the server's process knows nothing of the tests' folders
    flags = [
        f"--{'no-' * (value is False)}{name.replace('_', '-')}" + ("" if isinstance(value, bool) else f"={value}")
        for name, value in options.items()
    ]
    with server_process("-m", "jaxpage", "serve", model, "--port=0", "--enable-debug-routes", *flags) as server:
        server.wait_until_healthy(GUARD_SECONDS)
        yield server


def ask(url: str, bodies: list[dict[str, Any]], branch_free: int) -> list[httpx.Response]:
    """The answers to completion requests, in order, so many of which are open at a time."""

    async def all_of_them() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=branch_free)
        async with httpx.AsyncClient(base_url=url, timeout=GUARD_SECONDS, limits=limits) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    return asyncio.run(all_of_them())


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=GUARD_SECONDS).text
    found = re.search(rf"^jaxpage:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def memory(server: ServerProcess) -> int:
    """Bytes of anonymous memory, swapped or not, that server and engine hold."""
    total = 0
    for pid in {server.process.pid, *server.descendants}:
        status = Path(f"/proc/{pid}/status").read_text()
        total += sum(int(kib) * 1024 for kib in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB$", status, re.MULTILINE))
    return total


def test_a26_five_hundred_at_once_are_answered_as_when_alone(server: ServerProcess) -> None:
    url = server.wait_for_url()
    bodies = [{"prompt": [3 + i, 5, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True} for i in range(5)]
    expected = [answer.json()["choices"][0]["text"] for answer in ask(url, bodies, 1)]
    answers = ask(url, bodies * 100, 500)
    assert {answer.status_code for answer in answers} == {200}
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected * 100
    assert metric(url, "num_requests_running") == metric(url, "num_requests_waiting") == 0


def test_d07_thousands_of_unique_prompts_compile_and_keep_nothing(server: ServerProcess) -> None:
    url = server.wait_for_url()
    rng = random.Random(0)
    held = []
    for batch in range(4):
        bodies = []
        for index in range(NUM_UNIQUE // 4):
            prompt = [rng.randrange(3, 120) for _ in range(rng.randint(20, 200))]
            body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "seed": batch, "n": 1 + index % 2}
            body |= ({}, {"logprobs": 0}, {"logprobs": 5}, {"logprobs": 1, "prompt_logprobs": 1})[index % 4]
            bodies.append(body)
        assert {answer.status_code for answer in ask(url, bodies, 16)} == {200}
        held.append(memory(server))
    assert held[-1] - held[0] < MAX_GROWTH * NUM_UNIQUE * 3 // 4, held
    assert metric(url, "num_recompiles_total") == 0
    assert httpx.post(f"{url}/reset_prefix_cache").status_code == 200, "no request holds a block"
    snapshot = httpx.get(f"{url}/debug/kv_cache").json()
    assert (snapshot["num_used"], snapshot["requests"]) == (0, [])


POLICY = """
class Raises:
    def key(self, request):
        return request.arrival

    def victim(self, running):
        raise ValueError("no victim today")
"""


def test_d02_an_exception_in_a_step_ends_everything_with_errors(
    tiny_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_policy.py").write_text(POLICY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    flags = ["--scheduling-policy=raising_policy:Raises", "--num-blocks=12", "--max-model-len=44", "--block-size=4"]
    flags += ["--max-num-seqs=2", "--max-num-batched-tokens=16"]
    flags += [f"--compile-cache-dir={tiny_options['compile_cache_dir']}"]
    with server_process("-m", "jaxpage", "serve", tiny_options["model"], "--port=0", *flags) as server:
        url = server.wait_until_healthy(GUARD_SECONDS)
        body = {"prompt": [5] * 4, "max_tokens": 40, "ignore_eos": True}
        whole, streamed = ask(url, [body, body | {"stream": True}], 2)
        assert whole.status_code == 503
        assert whole.json()["error"]["code"] == "engine_dead"
        if streamed.status_code == 200:  # its first token came before
            events = [line for line in streamed.text.split("\n\n") if line]
            assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert events[-1] == "data: [DONE]"
        else:
            assert streamed.status_code == 503
        assert server.wait(30) == 1
        assert "no victim today" in server.output


def test_d05_ctrl_c_while_generating_ends_everything_in_time(tiny_options: dict[str, Any]) -> None:
    flags = ["--shutdown-timeout=1", f"--compile-cache-dir={tiny_options['compile_cache_dir']}", "--max-num-seqs=2"]
    with server_process("-m", "jaxpage", "serve", tiny_options["model"], "--port=0", *flags) as server:
        url = server.wait_until_healthy(GUARD_SECONDS)
        children = server.descendants
        body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=GUARD_SECONDS) as stream:
            next(stream.iter_lines())
            server.signal(signal.SIGINT)
            assert server.wait(10) == 0
        wait_until_gone(children, 5)
        assert "Traceback" not in server.output
