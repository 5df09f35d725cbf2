"""Gemma 3 against transformers in float32, token for token, and the KV memory that its windows promise.

Most prompts are longer than a step may be, and come in chunks.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import BLOCK_SIZE, MAX_STEP_TOKENS, open_model

from jaxpage import LLM, SamplingParams

PROMPTS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "gemma3_greedy.json").read_text("utf-8"))["prompts"]
SHORTEST, ACROSS_THE_WINDOW, LONGEST = PROMPTS[0], PROMPTS[4], PROMPTS[-1]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
WINDOW, BOS = 512, 2


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_model("gemma3-270m") as model:
        yield model.llm


def prompt_ids(prompt: dict[str, Any]) -> list[int]:
    token_ids: list[int] = prompt["prompt_token_ids"]
    return token_ids


def expected(prompts: list[dict[str, Any]]) -> list[list[int]]:
    return [prompt["token_ids"] for prompt in prompts]


def test_the_goldens_begin_with_bos_and_lie_on_every_side_of_the_windows() -> None:
    assert all(prompt_ids(prompt)[0] == BOS for prompt in PROMPTS)
    assert len(prompt_ids(ACROSS_THE_WINDOW)) < WINDOW < len(prompt_ids(ACROSS_THE_WINDOW)) + GREEDY.max_tokens
    assert len(prompt_ids(SHORTEST)) == 5
    assert len(prompt_ids(LONGEST)) > 3 * WINDOW


def test_text_prompts_give_the_golden_token_ids_with_one_bos(llm: LLM) -> None:
    for prompt in PROMPTS:
        assert llm.tokenizer.encode(prompt["text"]) == prompt_ids(prompt)


TOKENIZED = {
    " Hello  world\n\n  x": [26352, 138, 12392, 108, 138, 236781],
    "def f(x):\n    return x\n\n\n\tfoo": [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 109, 255968, 26537],
    "<start_of_turn>user\nHi<end_of_turn>\n": [105, 2364, 107, 10979, 106, 107],
    "<bos>text": [2, 1005],
    "日本語 ünï 🤖": [94951, 174898, 238527, 236743, 246143],
}
"""Text -> ids of transformers' tokenizer from the same file."""


@pytest.mark.parametrize("text", TOKENIZED)
def test_c13_token_ids_equal_transformers_and_no_space_is_added_or_lost(llm: LLM, text: str) -> None:
    assert llm.tokenizer.encode(text, add_special_tokens=False) == TOKENIZED[text]
    assert llm.tokenizer.encode(text) == [BOS, *TOKENIZED[text]]
    assert llm.tokenizer.decode(TOKENIZED[text], skip_special_tokens=False) == text


def test_a_context_beyond_three_windows_keeps_the_blocks_of_one(llm: LLM) -> None:
    most = -(-(WINDOW - 1 + MAX_STEP_TOKENS) // BLOCK_SIZE) + 1
    num_kept, tokens = [], []
    for output in llm.stream(prompt_ids(LONGEST), GREEDY):
        tokens = output.outputs[0].token_ids
        snapshot = llm.kv_cache_snapshot()
        if not snapshot["requests"]:  # it has just finished
            continue
        [request] = snapshot["requests"]
        for group, table in zip(snapshot["groups"], request["block_tables"], strict=True):
            held = [block_id != snapshot["null_block_id"] for block_id in table]
            if group["kind"] == "full":
                assert all(held)
            else:
                assert group["span"] == WINDOW
                assert held == sorted(held)  # what is given up lies behind
                assert sum(held) <= most
                num_kept.append(sum(held))
    assert [tokens] == expected([LONGEST])
    assert len(num_kept) >= 5 * (GREEDY.max_tokens - 1)  # five groups of sliding layers, at every step
    assert min(num_kept) >= WINDOW // BLOCK_SIZE
    assert llm.stats["kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("prompt", [SHORTEST, ACROSS_THE_WINDOW], ids=["shortest", "across_the_window"])
def test_a_prompt_alone_equals_transformers(llm: LLM, prompt: dict[str, Any]) -> None:
    [output] = llm.generate(prompt_ids(prompt), GREEDY)
    assert [output.outputs[0].token_ids] == expected([prompt])


def test_all_prompts_at_once_equal_transformers(llm: LLM) -> None:
    outputs = llm.generate([prompt_ids(prompt) for prompt in PROMPTS], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected(PROMPTS)


def test_prompts_sent_twice_are_found_in_the_prefix_cache_and_answered_alike(llm: LLM) -> None:
    prompts = PROMPTS[-4:]
    llm.generate([prompt_ids(prompt) for prompt in prompts], SamplingParams(max_tokens=1), use_tqdm=False)
    outputs = llm.generate([prompt_ids(prompt) for prompt in prompts], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected(prompts)
    whole_blocks = [(len(prompt_ids(prompt)) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == whole_blocks
