"""What the KV cache does never changes an answer: real models, at lengths around every block and window boundary."""

from collections.abc import Iterator, Sequence

import pytest
from real_models import BLOCK_SIZE, CASES, Model, open_model

from jaxpage import SamplingParams
from jaxpage.engine.loops import LOOPS
from jaxpage.outputs import RequestOutput

NUM_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
SUFFIX = [260, 282, 253]
"""Three tokens of text in either vocabulary."""


PARAMS = {"greedy": GREEDY, "seeded": SEEDED}
SAMPLE = "smollm2-135m"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model with all of `PARAMS` or, unless a test run is a full one, one of them with the first.

    `test_gemma3_greedy` has some of it for the other one, and the tests of tiny models have all of it.
    """
    full = metafunc.config.getoption("--full")
    models = list(CASES) if full else [SAMPLE]
    if "params" in metafunc.fixturenames:
        pairs = [(model, params) for model in models for params in (PARAMS if full else list(PARAMS)[:1])]
        metafunc.parametrize(("model", "params"), pairs, indirect=True, scope="module")
    else:
        metafunc.parametrize("model", models, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with open_model(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return PARAMS[request.param]


@pytest.fixture(scope="module")
def expected(model: Model, params: SamplingParams) -> list[RequestOutput]:
    """What each prompt gives by itself, with no cache to find anything in."""
    with model.host(caching=False, mode="sync"):
        return model.alone(model.prompts, params)


def check_equal(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """The same tokens, and the same log-probability of the first one (to 1e-3)."""
    for output, reference in zip(outputs, expected, strict=True):
        got, wanted = output.outputs[0], reference.outputs[0]
        assert got.token_ids == wanted.token_ids, f"prompt of {len(output.prompt_token_ids)}"
        assert got.logprobs is not None
        assert wanted.logprobs is not None
        first = wanted.token_ids[0]
        assert got.logprobs[0][first].logprob == pytest.approx(wanted.logprobs[0][first].logprob, abs=1e-3)


def test_b03_a_prompt_that_is_found_in_the_cache_gives_the_same(
    model: Model, params: SamplingParams, expected: list[RequestOutput]
) -> None:
    with model.host(caching=True):
        check_equal(model.alone(model.prompts, params), expected)
        warm = model.alone(model.prompts, params)
        check_equal(warm, expected)
    for output in warm:
        num_tokens = len(output.prompt_token_ids)
        assert output.num_cached_tokens == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_a_batch_gives_the_same_as_its_requests_alone_in_every_loop(
    model: Model, params: SamplingParams, expected: list[RequestOutput]
) -> None:
    for mode in LOOPS:
        with model.host(caching=True, mode=mode):
            check_equal(model.together(model.prompts, params), expected)


def test_b06_a_batch_that_is_preempted_gives_the_same(
    model: Model, params: SamplingParams, expected: list[RequestOutput]
) -> None:
    for caching in (False, True):
        with model.host(caching=caching, num_blocks=model.case.tiny_pool) as scheduler:
            check_equal(model.together(model.prompts, params), expected)
            # The prompts begin alike: with what they share, they may all fit.
            assert scheduler.num_preemptions > 0 or caching


@pytest.mark.full
def test_sequences_that_are_forked_equal_those_submitted_separately(model: Model) -> None:
    three = SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    separate = [SamplingParams(temperature=0.8, seed=3 + i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(3)]
    with model.host(caching=False):
        outputs = model.llm.generate(
            [prompt for prompt in model.prompts for _ in separate], separate * len(model.prompts), use_tqdm=False
        )
    tokens = [output.outputs[0].token_ids for output in outputs]
    expected = [tokens[i : i + 3] for i in range(0, len(tokens), 3)]
    for caching in (False, True):
        with model.host(caching=caching):
            outputs = model.together(model.prompts, three)
            assert [[sequence.token_ids for sequence in output.outputs] for output in outputs] == expected


@pytest.mark.full
def test_b03_a_longer_prompt_goes_on_from_what_is_cached(model: Model) -> None:
    """A suffix, and the next turn of a conversation: the prompt, its answer, and something new."""
    with model.host(caching=False):
        answers = [output.outputs[0].token_ids for output in model.alone(model.prompts, GREEDY)]
        turns = [[*prompt, *answer, *SUFFIX] for prompt, answer in zip(model.prompts, answers, strict=True)]
        suffixed = [[*prompt, *SUFFIX] for prompt in model.prompts]
        expected = model.alone([*suffixed, *turns], GREEDY)
    with model.host(caching=True):
        model.alone(model.prompts, GREEDY)
        outputs = model.alone([*suffixed, *turns], GREEDY)
    check_equal(outputs, expected)
    for prompt, output in zip([*model.prompts, *model.prompts], outputs, strict=True):
        # All full blocks of the earlier prompt, at least.
        assert output.num_cached_tokens >= len(prompt) // BLOCK_SIZE * BLOCK_SIZE
        assert output.num_cached_tokens < len(output.prompt_token_ids)


def test_b01_prompts_whose_ids_agree_in_their_low_bits_share_nothing(model: Model) -> None:
    vocab_size = model.core.ready.vocab_size
    first = [100 + 7 * i for i in range(2 * BLOCK_SIZE + 1)]
    swapped = [*first[:20], first[21], first[20], *first[22:]]
    prompts = [first, [i + 256 for i in first], swapped]
    if vocab_size > 2**16 + max(first):
        prompts.append([i + 2**16 for i in first])
    with model.host(caching=False):
        expected = model.alone(prompts, GREEDY)
    with model.host(caching=True):
        outputs = model.alone(prompts, GREEDY)
    check_equal(outputs, expected)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, BLOCK_SIZE, 0][: len(prompts)]
