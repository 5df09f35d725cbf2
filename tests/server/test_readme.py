"""The README's examples, run as they stand there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import server_process

README = (Path(__file__).parents[2] / "README.md").read_text()
GUARD_SECONDS = 400.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server_process("-m", "jaxpage", "serve", "smollm2-135m", "--port=0", "--max-model-len=1024") as server:
        url = server.wait_for_url(GUARD_SECONDS)
        server.wait_until_healthy(GUARD_SECONDS)
        yield url


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments, code], capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_offline_examples_complete_chat_and_search() -> None:
    examples = [block for block in blocks("python") if "llm." in block]
    printed = run_python("\n".join(examples), "-c")
    assert "Paris" in printed


def test_the_openai_client_example_streams_an_answer(url: str) -> None:
    (example,) = [block for block in blocks("python") if "OpenAI(" in block]
    assert len(run_python(example.replace("http://127.0.0.1:8000", url), "-c").split()) > 5


def test_the_tools_example_calls_the_function(url: str) -> None:
    (example,) = [block for block in blocks("python") if "tool_calls" in block]
    client = f'from openai import OpenAI\nclient = OpenAI(base_url="{url}/v1", api_key="none")\n'
    assert run_python(client + example, "-c").startswith('get_weather {"city": "')


def test_the_curl_example_answers(url: str) -> None:
    (example,) = [block for block in blocks("bash") if "curl" in block]
    done = subprocess.run(
        ["bash", "-c", example.replace("http://127.0.0.1:8000", url)],
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert '"finish_reason"' in done.stdout


def test_the_shell_example_generates() -> None:
    (example,) = [block for block in blocks("bash") if "jaxpage generate" in block]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", example], capture_output=True, text=True, timeout=GUARD_SECONDS, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
