"""One `LLM` under rough hands: several threads, Ctrl-C at the worst moment, a fork, prompts of every form."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tiny

from jaxpage import LLM, RequestOutput, SamplingParams
from jaxpage.client import Client
from jaxpage.engine.core import EngineCore
from jaxpage.llm import FairLock
from jaxpage.scheduler.scheduler import Scheduler

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [tiny.prompt(18)[:length] for length in range(3, 11)]


@pytest.fixture(scope="module", params=[False, True], ids=["in this process", "in its own"])
def llm(request: pytest.FixtureRequest, tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=request.param) as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_each_thread_gets_its_own_answers_and_threads_share_steps(llm: LLM) -> None:
    expected = tokens([llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in PROMPTS])
    llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    alone = llm.stats["num_steps"]
    for prompt in PROMPTS:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    alone = llm.stats["num_steps"] - alone
    before = llm.stats["num_steps"]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY, use_tqdm=False)[0], PROMPTS))
    assert tokens(found) == expected
    assert llm.stats["num_steps"] - before < alone
    assert llm.kv_cache_snapshot()["num_used"] == 0


def test_calls_and_streams_of_other_threads_go_on_meanwhile(llm: LLM) -> None:
    def work(number: int) -> Any:
        match number % 3:
            case 0:
                return tokens(llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False))
            case 1:
                return [output.outputs[0].token_ids for output in llm.stream(PROMPTS[1], GREEDY)][-1:]
        return llm.kv_cache_snapshot()["num_blocks"] and None

    expected = tokens(llm.generate([PROMPTS[1]], GREEDY, use_tqdm=False))
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(18))) == [expected, expected, None] * 6


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(("owner", "method"), [(EngineCore, "step"), (Scheduler, "update"), (Client, "take")])
def test_ctrl_c_within_a_step_ends_the_call_and_the_next_works(
    tiny_options: dict[str, Any], quick_compiles: None, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    """Also a second and a third time."""
    work, presses_at = getattr(owner, method), iter(())

    def press(*args: Any, **options: Any) -> Any:
        if next(presses_at, False):
            signal.raise_signal(signal.SIGINT)
        return work(*args, **options)

    with LLM(**tiny_options, multiprocess=False) as llm:
        expected = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        monkeypatch.setattr(owner, method, press)
        for num_before in range(2, 5):
            presses_at = iter([*[False] * num_before, True])
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
            assert llm.kv_cache_snapshot()["num_used"] == 0


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: {"prompt_token_ids": ids},
        lambda ids: [{"prompt_token_ids": ids}],
        lambda ids: np.array(ids),
        lambda ids: [np.array(ids, np.int64)],
        lambda ids: np.array([ids]),
        lambda ids: {"prompt": "".join(map(chr, ids))},
        lambda ids: {"prompt": "".join(map(chr, ids)), "prompt_token_ids": ids},
        lambda ids: np.array(["".join(map(chr, ids))]),
        lambda ids: list(np.array(ids)),
    ],
)
def test_a_prompt_has_many_forms(llm: LLM, form: Any) -> None:
    ids = [104, 101, 108, 108, 111]
    assert tokens(llm.generate(form(ids), GREEDY, use_tqdm=False)) == tokens(llm.generate(ids, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("prompt", [{"text": "a"}, {"prompt": 3}, 7, [b"bytes"], [None], np.zeros(3), [{1, 2}], {}])
def test_other_forms_are_a_type_error_that_names_these(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match=r'a prompt is a text, a list or NumPy array of token ids, \{"prompt"'):
        llm.generate(prompt, GREEDY)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 3])
def test_parameters_of_another_form_are_a_type_error(llm: LLM, params: Any) -> None:
    with pytest.raises(TypeError, match="SamplingParams"):
        llm.generate([PROMPTS[0]], params)
    assert llm.kv_cache_snapshot()["num_used"] == 0


FORKED = """
import json, os, sys
from jaxpage import LLM, SamplingParams

options = json.loads(sys.argv[1])
with LLM(**options) as llm:
    if (child := os.fork()) == 0:
        try:
            llm.generate([[5]])
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        sys.exit(0)  # with all that is done at an orderly end
    os.waitpid(child, 0)
    print(len(llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids))
"""


def test_a_fork_cannot_use_the_engine_and_does_not_end_it(tiny_options: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED, json.dumps(tiny_options)],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        timeout=300,
    )
    told, answered = done.stdout.splitlines()
    assert told.startswith("EngineDeadError this LLM belongs to process ")
    assert "spawn" in told
    assert answered == "3"


def test_a_lock_goes_to_whoever_waits_and_again_to_its_owner() -> None:
    lock, order = FairLock(), list[str]()
    is_waiting = threading.Event()

    def other() -> None:
        is_waiting.set()
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        is_waiting.wait(60)
        while not lock._next.locked():
            pass
    with lock:  # given up for a moment: the other one comes first
        order.append("owner")
    thread.join(60)
    assert order == ["other", "owner"]


def test_a_stream_that_is_dropped_while_another_runs_ends_its_request(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
    next(stream)
    for _ in llm.stream(PROMPTS[1], GREEDY):
        stream = iter(())  # type: ignore[assignment]
    assert llm.kv_cache_snapshot()["num_used"] == 0
