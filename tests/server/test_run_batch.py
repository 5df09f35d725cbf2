"""`jaxpage run-batch` on the fake engine: what lines become, what a next run does, and what ends a run."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ready_engine
from fake_engine import FakeEngine, Script

from jaxpage.cli import main
from jaxpage.errors import ConfigError, EngineDeadError
from jaxpage.server.batch.run import opened_files, run
from jaxpage.server_config import ServerConfig

CHAT = "/v1/chat/completions"


def line(custom_id: str, text: str = "hi", url: str = CHAT, **body: Any) -> str:
    """A line that asks for a chat, or for what `body` says."""
    body = body or {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


class Files:
    """The two files of a batch."""

    def __init__(self, folder: Path) -> None:
        self.input = folder / "in.jsonl"
        self.output = folder / "out.jsonl"

    def write(self, *lines: str) -> None:
        """Set the input."""
        self.input.write_text("".join(f"{line}\n" for line in lines), "utf-8")

    def run(self, engine: FakeEngine | None = None, **config: Any) -> int:
        """Run the batch; returns the exit code."""
        served: Any = engine or ready_engine()
        with opened_files(str(self.input), str(self.output)) as batch:
            return asyncio.run(run(batch, lambda: served, ServerConfig(**config)))

    def results(self) -> dict[str, Any]:
        """The results by their custom ids, each of which comes once."""
        lines = [json.loads(line) for line in self.output.read_text("utf-8").splitlines()]
        assert all(line.keys() == {"id", "custom_id", "response", "error"} for line in lines)
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_every_protocol_answers_as_the_server_does(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    files.write(
        line("chat"),
        line("completion", url="/v1/completions", prompt="hi", max_tokens=32),
        line("embedding", url="/v1/embeddings", input=["a", "b"]),
        line("response", url="/v1/responses", input="hi"),
    )
    assert files.run() == 0
    found = files.results()
    assert {result["response"]["status_code"] for result in found.values()} == {200}
    assert all(result["error"] is None and result["response"]["request_id"] for result in found.values())
    bodies = {custom_id: result["response"]["body"] for custom_id, result in found.items()}
    assert bodies["chat"]["choices"][0]["message"]["content"] == Script().text
    assert bodies["completion"]["choices"][0]["text"] == Script().text
    assert [len(one["embedding"]) > 0 for one in bodies["embedding"]["data"]] == [True, True]
    assert bodies["response"]["output"][0]["content"][0]["text"] == Script().text
    assert len({result["id"] for result in found.values()}) == 4
    assert "of 4 requests, 4 succeeded, 0 failed" in capfd.readouterr().err


def test_what_the_server_refuses_is_its_own_answer(files: Files) -> None:
    files.write(
        line("model", model="other", messages=[{"role": "user", "content": "x"}]),
        line("hot", messages=[{"role": "user", "content": "x"}], temperature=3),
        line("empty", messages=[]),
        '{"custom_id": "body", "method": "POST", "url": "/v1/completions", "body": 7}',
        line("good"),
    )
    assert files.run() == 1
    found = files.results()
    assert {custom_id: result["response"]["status_code"] for custom_id, result in found.items()} == {
        **dict.fromkeys(("hot", "empty", "body"), 400),
        "model": 404,
        "good": 200,
    }
    assert found["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert all(result["error"] is None for result in found.values())


@pytest.mark.parametrize(
    ("bad", "code", "says", "custom_id"),
    [
        ("{", "invalid_json_line", "line 2 is no JSON object", None),
        ("[1]", "invalid_json_line", "line 2 is no JSON object", None),
        ('{"method": "POST"}', "missing_required_parameter", "line 2 has no custom_id", None),
        ('{"custom_id": 7}', "invalid_type", "line 2 has a custom_id that is no text", None),
        ('{"custom_id": "x"}', "missing_required_parameter", "line 2 has no method", "x"),
        ('{"custom_id": "x", "method": "GET"}', "invalid_method", "method 'GET': it must be 'POST'", "x"),
        (line("x", url="/v1/nothing"), "invalid_url", "url '/v1/nothing': it must be one of /v1/chat", "x"),
        (f'{{"custom_id": "x", "method": "POST", "url": "{CHAT}"}}', "missing_required_parameter", "has no body", "x"),
        (line("x", messages=[], stream=True), "invalid_request", "line 2 asks for a stream", "x"),
        (line("a", "another"), "duplicate_custom_id", "custom_id 'a', which line 1 has", "a"),
    ],
)
def test_a_bad_line_gets_an_error_and_stops_no_other(
    files: Files, bad: str, code: str, says: str, custom_id: str
) -> None:
    files.write(line("a"), bad, "", line("b"))
    assert files.run() == 1
    results = [json.loads(line) for line in files.output.read_text().splitlines()]
    (refused,) = [result for result in results if result["error"] is not None]
    assert (refused["error"]["code"], refused["custom_id"], refused["response"]) == (code, custom_id, None)
    assert says in refused["error"]["message"]
    assert {result["custom_id"] for result in results if result["error"] is None} == {"a", "b"}


def test_bytes_that_are_no_utf_8_spoil_their_own_line_alone(files: Files) -> None:
    bad = line("x", "caf?").encode().replace(b"?", b"\xe9")
    files.input.write_bytes(b"\xef\xbb\xbf" + line("a").encode() + b"\r\n" + bad + b'\n"\xff\n')
    assert files.run() == 1
    found = files.results()
    assert found["a"]["response"]["status_code"] == 200
    assert found["x"]["response"]["status_code"] == 400
    assert found[None]["error"]["code"] == "invalid_json_line"  # type: ignore[index]


def test_a_next_run_keeps_successes_and_tries_the_rest_again(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    files.write(*(line(f"r{index}") for index in range(5)))
    assert files.run() == 0
    whole = files.output.read_bytes().splitlines(keepends=True)
    refused = json.loads(whole[1]) | {"response": {"status_code": 500, "request_id": "", "body": {}}}
    files.output.write_bytes(whole[0] + json.dumps(refused).encode() + b"\n" + whole[2] + whole[3][:-20])
    os.chmod(files.output, 0o640)
    engine = ready_engine()
    assert files.run(engine) == 0
    assert len(engine.seen_prompts) == 3
    assert files.results().keys() == {f"r{index}" for index in range(5)}
    assert files.output.read_bytes().startswith(whole[0] + whole[2])
    assert files.output.stat().st_mode & 0o777 == 0o640
    assert "5 requests, 3 succeeded, 0 failed, 2 had succeeded before" in capfd.readouterr().err
    assert [file.name for file in sorted(files.output.parent.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_a_last_line_without_its_end_is_kept_if_it_is_whole(files: Files) -> None:
    files.write(line("a"), line("b"))
    files.run()
    files.output.write_bytes(files.output.read_bytes().rstrip(b"\n"))
    assert files.run() == 0
    assert files.results().keys() == {"a", "b"}


@pytest.mark.parametrize("text", ["some notes", "some notes\n", line("a") + "\n", '{"id": 7}\n'])
def test_a_file_that_holds_something_else_is_left_alone(files: Files, text: str) -> None:
    files.write(line("a"))
    files.output.write_text(text)
    with pytest.raises(ConfigError, match="holds no batch result in line 1"):
        files.run()
    assert files.output.read_text() == text
    assert len(list(files.output.parent.iterdir())) == 2


def test_as_many_are_open_as_keep_the_engine_busy(files: Files) -> None:
    engine = ready_engine(max_num_seqs=3)
    most = 0

    class Counted(dict[str, Script]):
        def items(self) -> Any:
            nonlocal most
            most = max(most, engine.num_open + 1)
            return super().items()

    engine.scripts = Counted()
    files.write(*(line(f"r{index}") for index in range(20)))
    assert files.run(engine) == 0
    assert most == 6
    assert len(files.results()) == 20


def test_a_signal_ends_the_run_and_the_next_goes_on(files: Files, capfd: pytest.CaptureFixture[str]) -> None:
    engine = ready_engine()
    engine.scripts = {"stuck": Script(stall_after=2)}
    files.write(line("a"), line("b", "stuck"), line("c"))

    def interrupt_once(done: Callable[[], bool]) -> None:
        async def watch() -> None:
            while not done():
                await asyncio.sleep(0.005)
            os.kill(os.getpid(), signal.SIGINT)

        asyncio.get_running_loop().create_task(watch())

    started = engine.wait_ready

    async def wait_ready() -> None:
        interrupt_once(lambda: files.output.read_bytes().count(b"\n") == 2)
        await started()

    engine.wait_ready = wait_ready
    assert files.run(engine) == 130
    assert engine.is_shut_down
    assert engine.num_open == 0
    assert files.results().keys() == {"a", "c"}
    assert "the same command again goes on from here" in capfd.readouterr().err
    again = ready_engine()
    assert files.run(again) == 0
    assert len(again.seen_prompts) == 1
    assert files.results().keys() == {"a", "b", "c"}


def test_an_engine_that_dies_ends_the_run_and_what_it_took_along_is_not_a_result(files: Files) -> None:
    engine = ready_engine()
    engine.scripts = {"stuck": Script(stall_after=2)}
    files.write(line("a"), line("b", "stuck"), line("c", "stuck"))
    started = engine.wait_ready

    async def wait_ready() -> None:
        async def die() -> None:
            while files.output.read_bytes().count(b"\n") < 1:
                await asyncio.sleep(0.005)
            engine.is_dead = True

        asyncio.get_running_loop().create_task(die())
        await started()

    engine.wait_ready = wait_ready
    with pytest.raises(EngineDeadError, match="the same command again"):
        files.run(engine)
    assert files.results().keys() == {"a"}
    assert engine.is_shut_down


def test_standard_input_and_output_are_taken_too(
    files: Files, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(line("a"))
    served = ready_engine()
    with files.input.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with opened_files("-", "-") as batch:
            assert asyncio.run(run(batch, lambda: served, ServerConfig())) == 0
    assert json.loads(capfd.readouterr().out)["custom_id"] == "a"


def test_aliases_are_models_and_keys_for_clients_do_not_matter(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXPAGE_API_KEY", "for-clients-of-the-server")
    files.write(line("a", model="gpt-x", messages=[{"role": "user", "content": "x"}]))
    assert files.run(served_model_name=("gpt-x",)) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-i", "{folder}/none", "-o", "{folder}/out"), "none cannot be read: No such file or directory"),
        (("-i", "{folder}", "-o", "{folder}/out"), "cannot be read: Is a directory"),
        (("-i", "{folder}/in.jsonl", "-o", "{folder}/no/out"), "cannot be written: No such file or directory"),
        (("-i", "{folder}/in.jsonl", "-o", "{folder}/in.jsonl"), "is the input file: choose another"),
    ],
)
def test_files_that_cannot_be_used_are_one_line_before_anything_loads(
    files: Files, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    files.write(line("a"))
    folder = str(files.input.parent)
    assert main(["run-batch", *(argument.replace("{folder}", folder) for argument in arguments)]) == 1
    error = capfd.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert files.input.read_text() == line("a") + "\n"
