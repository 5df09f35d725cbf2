"""The examples in the README and in docs/, run as they stand there; every link leads somewhere."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import server_process

from jaxpage import cli
from jaxpage.config import EngineConfig, flag
from jaxpage.options import read_config_file
from jaxpage.server_config import ServerConfig

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = "\n".join(page.read_text() for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))))
GUARD_SECONDS = 400.0


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # With no options but the port it has the programs of the offline examples.
    with server_process("-m", "jaxpage", "serve", "smollm2-135m", "--port=0") as server:
        url = server.wait_for_url(GUARD_SECONDS)
        server.wait_until_healthy(GUARD_SECONDS)
        yield url


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments, code], capture_output=True, text=True, timeout=GUARD_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_offline_examples_complete_chat_and_search() -> None:
    first, *others = [block for block in blocks("python") if "llm." in block or "AsyncEngine" in block]
    assert "llm = LLM(" in first
    printed = run_python("\n".join([first, *others]), "-c")
    assert printed.count("Paris") >= 3


def test_the_clients_examples_get_an_answer(url: str) -> None:
    calls = ["stream = client.chat", "responses.create", "messages.stream"]
    examples = [block for call in calls for block in blocks("python") if call in block]
    assert len(examples) == 3
    assert all("http://127.0.0.1:8000" in example for example in examples)
    code = "\nprint('===')\n".join(examples).replace("http://127.0.0.1:8000", url)
    answers = run_python(code, "-c").split("===")
    assert [len(answer.split()) > 2 for answer in answers] == [True] * 3


def test_the_config_files_example_holds_only_options(tmp_path: Path) -> None:
    (example,) = blocks("yaml")
    file = tmp_path / "server.yaml"
    file.write_text(example)
    options = read_config_file(str(file), (EngineConfig, ServerConfig))
    assert options["served_model_name"] == ("smollm2-135m", "gpt-3.5-turbo")


def test_every_option_of_the_server_that_is_told_exists() -> None:
    section = (ROOT / "docs" / "serving.md").read_text().split("## Running a server")[1]
    known = {flag(field.name) for config in (EngineConfig, ServerConfig) for field in dataclasses.fields(config)}
    told = {re.sub("^--no-", "--", name) for name in re.findall(r"`(--[a-z-]+)", section)}
    assert len(told) > 10
    assert told <= known


def test_the_tools_example_calls_the_function(url: str) -> None:
    (example,) = [block for block in blocks("python") if "tool_calls" in block]
    client = f'from openai import OpenAI\nclient = OpenAI(base_url="{url}/v1", api_key="none")\n'
    assert run_python(client + example, "-c").startswith('get_weather {"city": "')


def test_the_embeddings_example_tells_their_number_and_their_size(url: str) -> None:
    (example,) = [block for block in blocks("python") if "embeddings.create" in block]
    client = f'from openai import OpenAI\nclient = OpenAI(base_url="{url}/v1", api_key="none")\n'
    assert run_python(client + example, "-c").startswith("2 256 ")


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


def headings(page: Path) -> set[str]:
    """Anchors, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_or_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(file), f"{page.name} links to {target}"


def test_the_readme_is_short_enough_to_finish_and_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) < 250
    assert {page.name for page in ROOT.glob("docs/*.md")} <= {
        Path(link).name for link in re.findall(r"\]\(([^)\s]+)\)", text)
    }


def test_every_block_of_code_is_run_or_is_of_a_kind_that_is_not() -> None:
    kinds = re.findall(r"^```(\w*)$", README, flags=re.MULTILINE)
    assert {kind for kind in kinds if kind} <= {"python", "bash", "sh", "yaml", "text"}
    assert len(blocks("bash")) == 2
    assert len(blocks("yaml")) == 1
    run = [
        "llm.",
        "AsyncEngine",
        "stream = client.chat",
        "responses.create",
        "messages.stream",
        "tool_calls",
        "embeddings.create",
    ]
    assert [block for block in blocks("python") if not any(words in block for words in run)] == []


@pytest.mark.parametrize("command", blocks("sh"))
def test_a_command_that_serves_for_ever_has_options_that_exist(command: str) -> None:
    (line,) = [line for line in command.splitlines() if "jaxpage" in line]
    words = shlex.split(line[line.index("jaxpage ") :])
    assert cli._parser().parse_args(words[1:]).model_argument
