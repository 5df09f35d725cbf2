"""What an installed jaxpage does for its user, tried in an empty folder: python wheel_smoke.py FOLDER EXAMPLES.

It generates, chats, runs a batch, measures, compiles, and serves with what was compiled: health, a chat, the page with
all that it loads, the OpenAPI document. EXAMPLES is a folder with `own_hybrid.py`, a user's own model. Each step prints
a line.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GUARD_SECONDS = 600
JAXPAGE = str(Path(sys.executable).with_name("jaxpage"))
SMALL = [
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256", "--num-blocks", "128"),
    *("--compile-cache-dir", "cache"),
]
"""Options of a small engine, which all steps share, so that the first compiles for the others."""
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
OWN_MODEL = """
from jaxpage import LLM, SamplingParams
with LLM("own_hybrid:make", tokenizer="smollm2-135m", compile_cache_dir="cache", max_num_seqs=2) as llm:
    print(len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids))
"""


def main() -> None:
    """Run all steps; the first that fails ends it with what it printed."""
    folder = Path(sys.argv[1]).resolve()
    examples = Path(sys.argv[2]).resolve()
    os.chdir(folder)
    where = python("import jaxpage; print(jaxpage.__file__)").strip()
    assert Path(where).is_relative_to(sys.prefix), f"{where} is not the one that is installed in {sys.prefix}"
    assert (Path(where).parent / "py.typed").is_file(), "no type checker would read its types"

    prompt = "The capital of France is"
    generated = json.loads(run("generate", "--prompt", prompt, "--max-tokens", "8", "--json", *SMALL))
    assert "Paris" in generated["text"], generated
    print("generate:", generated["text"].strip())

    sampling = ("--temperature", "0", "--max-tokens", "16")
    answers = run("chat", *sampling, *SMALL, stdin="What is a cat?\nAnd a dog?\n").splitlines()
    assert len([answer for answer in answers if answer.strip()]) >= 2, answers
    print("chat:", answers[0])

    check_batch(folder)
    measured = json.loads(
        run("bench", "latency", "--input-len=8", "--output-len=8", "--num-prompts=1", "--json", *SMALL)
    )
    assert measured["output_len"] == 8, measured
    print("bench: latency", measured)
    run("compile", "--target", "cpu", "--out", "programs", *SMALL[:-2])
    with serving("--programs", "programs", *SMALL[:-2]) as url:
        check_server(url)
        answers = run("chat", *sampling, "--url", url, stdin="What is a cat?").splitlines()
        print("chat over HTTP:", answers[0])

    assert python(OWN_MODEL, PYTHONPATH=str(examples), JAX_NUM_CPU_DEVICES="2").split()[-1] == "4"
    print("a model of one's own: 4 tokens")


def check_batch(folder: Path) -> None:
    """Run a batch twice: nothing is left for the second time."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 8},
        "/v1/embeddings": {"input": "A cat sleeps."},
    }
    lines = [json.dumps({"custom_id": url, "method": "POST", "url": url, "body": body}) for url, body in bodies.items()]
    (folder / "in.jsonl").write_text("\n".join(lines), "utf-8")
    for _ in range(2):
        run("run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *SMALL)
        results = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
        assert {result["custom_id"]: result["response"]["status_code"] for result in results} == dict.fromkeys(
            bodies, 200
        )
        assert len(results) == len(bodies)
    print("run-batch:", len(results), "results")


def check_server(url: str) -> None:
    """Ask a server for everything that people and programs begin with."""
    assert get(f"{url}/health")[0].startswith("application/json")
    document = json.loads(get(f"{url}/openapi.json")[1])
    assert "/v1/chat/completions" in document["paths"]
    body = {"messages": [{"role": "user", "content": "What is a cat?"}], "max_tokens": 8}
    answer = json.loads(get(f"{url}/v1/chat/completions", json.dumps(body).encode())[1])
    assert answer["usage"]["completion_tokens"] > 0, answer
    left, seen = [""], set()
    while left:  # the page, and whatever it or one of its files loads
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        kind, text = get(f"{url}/{path}")
        assert kind.startswith(CONTENT_TYPES[Path(path).suffix or ".html"]), f"/{path} is {kind}"
        for found in re.findall(r'(?:src|href)="([^":#]+)"|(?:from|import) "(\./[^"]+)"', text):
            left.append(os.path.normpath(os.path.join(os.path.dirname(path), found[0] or found[1])))
    assert len([path for path in seen if path.endswith(".js")]) > 5, seen
    print(f"serve: health, a chat, {len(document['paths'])} routes, a page of {len(seen)} files")


def get(url: str, body: bytes | None = None) -> tuple[str, str]:
    """The content type and the text at an address. Raises unless it is a 200."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=GUARD_SECONDS) as response:
        return response.headers["Content-Type"], response.read().decode()


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of a server that is ready; it must end in good order."""
    command = [JAXPAGE, "serve", "--port", "0", *options]
    with (
        open("serve.txt", "w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("ready: ")), None)
            assert ready is not None, f"the server did not start:\n{Path('serve.txt').read_text('utf-8')}"
            yield re.findall(r"http://[^/ ]+", ready)[0]
        finally:
            server.terminate()
            server.stdout.read()
            code = server.wait(GUARD_SECONDS)
    assert code == 0, f"the server ended with {code}:\n{Path('serve.txt').read_text('utf-8')}"


def run(*arguments: str, stdin: str = "") -> str:
    """What a command prints. Ends it all if the command fails."""
    return finished([JAXPAGE, *arguments], stdin)


def python(code: str, **environment: str) -> str:
    """What a program prints. Ends it all if it fails."""
    return finished([sys.executable, "-c", code], "", **environment)


def finished(command: list[str], stdin: str, **environment: str) -> str:
    """What `command` prints. Ends it all if it fails."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=GUARD_SECONDS, env={**os.environ, **environment}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
