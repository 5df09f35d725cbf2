"""Sliding windows through the engine: the prefix cache changes no answer, and the first token is transformers'."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny
from tiny_engine import MAX_STEP_TOKENS, open_engine

from jaxpage.engine_core import EngineCore
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.loops import ResidentLoop
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler import Scheduler
from jaxpage.wire import AddRequest, TokenOutput

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
    layout = core.runner.layout
    num_blocks = 1 + 12 * len(layout.groups)
    kv_cache = KVCacheManager(num_blocks, layout, max_step_tokens=MAX_STEP_TOKENS, enable_prefix_caching=caching)
    scheduler = Scheduler(kv_cache, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_STEP_TOKENS)
    core.loop = ResidentLoop(scheduler, core.runner)
    yield kv_cache
    kv_cache.check_integrity()
    assert kv_cache.pool.usage == 0


def generate(core: EngineCore, prompt: list[int]) -> list[TokenOutput]:
    core.add(AddRequest("a", prompt, PARAMS, seed=0, max_tokens=8))
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
