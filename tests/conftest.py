"""What several test files here share: quick compiles, and a tiny random Llama that reads and writes ASCII."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from xdist.scheduler import LoadFileScheduling

sys.path.insert(0, str(Path(__file__).parent / "golden"))
sys.path.insert(0, str(Path(__file__).parent / "unit"))

import tiny


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="real models at the full size of what is claimed, and not a sample of it"
    )


GROUPS = (
    ("test_transparency", "test_workload"),
    ("test_real_server", "test_real_options", "test_llm"),
    ("test_readme",),
    ("test_smollm2_greedy", "test_structured_output"),
    ("test_gpu_code",),
    ("test_gemma3_greedy",),
    ("test_many_requests",),
    (
        *("test_tiny_options", "test_tiny_logprobs", "test_own_processors", "test_embeddings", "test_async_engine"),
        *("test_llm_in_process", "test_tiny_speculation"),
    ),
    ("test_described_device",),
)
"""Files that run one after another in one process, so that the first compiles for the others. Those that take minutes
begin first, or one process would still be at one of them when the others are done."""
_PLACES = {name: (number, turn) for number, names in enumerate(GROUPS) for turn, name in enumerate(names)}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file stay together, in their order, as they share engines; some are for full runs."""
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=lambda item: _PLACES.get(item.path.stem, (len(GROUPS), 0)))


class ByGroup(LoadFileScheduling):
    """Gives a process whole groups of files, in the order that they are collected in."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(super()._split_scope(nodeid))
        return GROUPS[_PLACES[file.stem][0]][0] if file.stem in _PLACES else str(file)


@pytest.hookimpl(optionalhook=True)  # `-p no:xdist` knows neither
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, as some will be waiting for a server or a file."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByGroup:
    """Called where tests run in several processes."""
    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether tests of real models take all of their cases, which takes some ten minutes more."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="module")
def quick_compiles() -> Iterator[None]:
    """For tests that compile programs and run each a few times, here or in processes that they start."""
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT interrupts, as in a terminal: a run that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def tiny_options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options of an engine on the tiny Llama, with small blocks, three buckets and logits processors.

    A token of its tokenizer is an ASCII character, by its code; 2 is the end of a text. Programs are compiled by the
    first engine that needs them, in whichever process of a run.
    """
    folder = tmp_path_factory.mktemp("tiny")
    of_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_run = of_run.parent
    tiny.write_checkpoint(folder / "model", tiny.TINY["llama"], tiny.make_weights(tiny.TINY["llama"]))
    ascii_tokenizer().save(str(folder / "model" / "tokenizer.json"))
    options = {
        "model": str(folder / "model"),
        "compile_cache_dir": str(of_run / "programs"),
        "background_compile": False,
        "strict_shapes": True,
        "max_model_len": 128,
        "block_size": 4,
        "num_blocks": 81,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "logits_processors": ("own_processors:always", "own_processors:last_again", "own_processors:nowhere"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "unit"))  # engines of their own import those, too
        yield options


def ascii_tokenizer() -> tokenizers.Tokenizer:
    """A token for each ASCII character."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters = [pre_tokenizer.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    tokenizer = tokenizers.Tokenizer(models.BPE({character: byte for byte, character in enumerate(characters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    return tokenizer
