"""A user's own model behind `jaxpage serve`, by its import path."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from server_process import server_process

GUARD_SECONDS = 300.0
OWN = Path(__file__).parents[2] / "examples"
OPTIONS = ["--tokenizer=smollm2-135m", "--max-model-len=128", "--max-num-seqs=8", "--max-num-batched-tokens=64"]
PROMPT = [5, 9, 2, 41, 7]


OFFLINE = """
import sys
from jaxpage import LLM, SamplingParams

options = {"tokenizer": "smollm2-135m", "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}
with LLM("own_model:make", multiprocess=False, compile_cache_dir=sys.argv[1], **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    print(repr(llm.generate([[5, 9, 2, 41, 7]], params)[0].outputs[0].text))
"""


def test_a_users_own_model_gives_over_http_what_it_gives_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has a mesh of two devices."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("PYTHONPATH", str(OWN))
    done = subprocess.run([sys.executable, "-c", OFFLINE, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = ("-m", "jaxpage", "serve", "own_model:make", "--port=0", *OPTIONS, f"--compile-cache-dir={tmp_path}")
    with server_process(*command) as server, httpx.Client(timeout=GUARD_SECONDS) as client:
        url = server.wait_for_url(GUARD_SECONDS)
        server.wait_until_healthy(GUARD_SECONDS)
        assert [model["id"] for model in client.get(f"{url}/v1/models").json()["data"]] == ["own_model:make"]
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        answer = client.post(f"{url}/v1/completions", json=body).json()
        assert repr(answer["choices"][0]["text"]) == done.stdout.splitlines()[-1]
        refused = client.post(f"{url}/v1/completions", json=body | {"prompt": [64]})
        assert refused.status_code == 400
        assert "64" in refused.json()["error"]["message"]


def test_a_model_without_a_tokenizer_is_refused_with_the_option_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(OWN))
    with server_process("-m", "jaxpage", "serve", "own_model:make", "--port=0") as server:
        assert server.wait(GUARD_SECONDS) == 1
    assert "own_model:make" in server.output
    assert "give --tokenizer" in server.output
