"""Sliding windows through the engine: the prefix cache changes no answer, and the first token is transformers'."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny
from tiny_engine import MAX_STEP_TOKENS, open_engine

from jaxpage.engine.core import EngineCore
from jaxpage.engine.loops import ResidentLoop
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.wire import AddRequest, TokenOutput, sequence_id

GOLDEN = np.load(Path(__file__).with_name("tiny_logits.npz"))
MAX_NUM_SEQS = 4
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["mistral_sliding", "gemma3"])
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def core(name: str, quick_compiles: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCore]:
    folder = tmp_path_factory.mktemp(name)
    core = open_engine(folder, name, max_model_len=144, num_blocks=100, max_num_seqs=MAX_NUM_SEQS)
    yield core
    core.close()


@contextmanager
def host(core: EngineCore, *, caching: bool) -> Iterator[KVCacheManager]:
    """Serve from a pool that holds little more than one long prompt."""
    layout = core.runner.plan.layout
    num_blocks = 1 + 12 * len(layout.groups)
    kv_cache = KVCacheManager(num_blocks, layout, max_step_tokens=MAX_STEP_TOKENS, enable_prefix_caching=caching)
    scheduler = Scheduler(kv_cache, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS)
    core.loop = ResidentLoop(scheduler, core.runner)
    yield kv_cache
    kv_cache.check_integrity()
    assert kv_cache.pool.usage == 0


def generate(
    core: EngineCore, prompt: list[int], params: SamplingParams = PARAMS, *, seed: int = 0
) -> list[TokenOutput]:
    core.add(AddRequest("a", prompt, params, seed=seed, max_tokens=8))
    outputs = []
    while core.has_requests:
        outputs += [output for output in core.step() if isinstance(output, TokenOutput)]
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


@pytest.mark.parametrize("length", [31, 32, 33, 128])
def test_b08_a_windowed_prompt_gives_the_same_whatever_the_cache_has_kept(
    core: EngineCore, name: str, length: int
) -> None:
    prompt = tiny.prompt(length)
    with host(core, caching=False):
        expected = generate(core, prompt)
    logits = GOLDEN[f"{name}/{length}/logits"][-1].astype(np.float64)
    assert tiny.positions(length)[-1] == length - 1
    first = expected[0]
    assert first.token_ids == [int(np.argmax(logits))]
    assert first.logprobs is not None
    assert first.logprobs[0].logprob == pytest.approx(logits.max() - np.logaddexp.reduce(logits), abs=TOLERANCE)

    with host(core, caching=True):
        num_cached = []
        for turn in range(4):
            outputs = generate(core, prompt)
            assert tokens(outputs) == tokens(expected)
            num_cached.append(outputs[0].num_cached_tokens)
            # Others push out some of what was kept, a little more each time.
            generate(core, [1 + turn, *tiny.prompt(40 * turn + 8)])
    assert num_cached[0] == 0
    assert num_cached[1] == (length - 1) // 16 * 16


@pytest.mark.parametrize("length", [15, 33, 90])
@pytest.mark.parametrize("caching", [False, True])
def test_sequences_that_fork_equal_those_of_the_next_seeds(core: EngineCore, length: int, caching: bool) -> None:
    one = msgspec.structs.replace(PARAMS, temperature=2.0)
    prompt = tiny.prompt(length)
    with host(core, caching=False):
        expected = [tokens(generate(core, prompt, one, seed=3 + index)) for index in range(3)]
    with host(core, caching=caching):
        outputs = generate(core, prompt, msgspec.structs.replace(one, n=3), seed=3)
    names = [sequence_id("a", index) for index in range(3)]
    assert [tokens([it for it in outputs if it.sequence_id == name]) for name in names] == expected
    assert len(set(map(tuple, expected))) == 3


@pytest.mark.parametrize("length", [31, 33, 100])
def test_b03_a_longer_prompt_goes_on_from_what_is_cached(core: EngineCore, length: int) -> None:
    """The next turn of a conversation: the prompt, its answer, and something new."""
    with host(core, caching=False):
        answer = tokens(generate(core, tiny.prompt(length)))
        turn = [*tiny.prompt(length), *answer, 9, 8, 7]
        expected = tokens(generate(core, turn))
    with host(core, caching=True):
        assert tokens(generate(core, tiny.prompt(length))) == answer
        outputs = generate(core, turn)
    assert tokens(outputs) == expected
    assert outputs[0].num_cached_tokens == (length + len(answer) - 1) // 16 * 16
