"""The user's own functions of the logits: loading them, and what they do to rows that name them and to no others."""

from collections.abc import Iterator
from typing import Any

import own_processors
import pytest

from jaxpage import LLM, ConfigError, RequestError, SamplingParams
from jaxpage.engine.loops import LOOPS
from jaxpage.runner.programs.logits_processors import load_processors
from jaxpage.scheduler.scheduler import Scheduler


@pytest.fixture(scope="module")
def llm(tiny_options: dict[str, Any], quick_compiles: None) -> Iterator[LLM]:
    with LLM(**tiny_options, multiprocess=False) as llm:
        yield llm


def tokens(llm: LLM, *params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([[5, 6, 7]] * len(params), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def asking(*names: str, temperature: float = 0, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, max_tokens=6, ignore_eos=True, seed=3, logits_processors=names, **options
    )


def test_a_processor_changes_the_rows_that_name_it_and_no_others(llm: LLM) -> None:
    (plain,) = tokens(llm, asking())
    always, beside, again, even = tokens(llm, asking("always"), asking(), asking("last_again"), asking("nowhere"))
    assert always == [own_processors.ALWAYS] * 6
    assert beside == plain
    assert again == [7] * 6, "it sees the prompt, and then what was drawn"
    assert all(token_id % 2 == 0 for token_id in even)
    assert even != plain, "so that the rest of this test says something"


def test_it_comes_after_the_other_options_and_several_hold_together(llm: LLM) -> None:
    banned = asking("always", logit_bias={own_processors.ALWAYS: -100.0})
    both = asking("last_again", "nowhere")
    always, even = tokens(llm, banned, both)
    assert always == [own_processors.ALWAYS] * 6
    assert 7 not in even
    assert set(even) == {even[0]}, "the first even token, and then that one again"


def test_random_draws_within_it_are_the_same_in_every_mode(llm: LLM) -> None:
    core = llm._engine._core  # type: ignore[union-attr]
    loop = core.loop
    drawn = []
    for mode in LOOPS.values():
        scheduler = Scheduler(loop.scheduler.kv_cache, max_num_seqs=8, max_num_batched_tokens=16)
        core.loop = mode(scheduler, core.runner)
        drawn.append(tokens(llm, asking("nowhere", temperature=1), asking(temperature=1)))
    core.loop = loop
    assert drawn[0] == drawn[1] == drawn[2]
    assert all(token_id % 2 == 0 for token_id in drawn[0][0])


def test_an_unknown_name_is_refused_with_those_that_there_are(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"'other'.*always, last_again, nowhere"):
        tokens(llm, asking("other"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:f", "package.module:function"),
        ("own_processors", "package.module:function"),
        ("own_processors:no_such", "no_such"),
        ("own_processors:NUMBER", "no function"),
        ("own_processors:misshapen", "shape"),
        ("own_processors:untraceable", "cannot trace"),
    ],
)
def test_what_cannot_be_a_processor_is_refused_at_the_start(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_processors([path], 10)


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        load_processors(["own_processors:always"] * 2, 10)
