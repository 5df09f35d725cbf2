"""Logits of whole prompts through the paged cache: what the engine's step does, without the engine."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage.kv_cache.block_pool import NULL_BLOCK_ID
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.models import run_layers
from jaxpage.models.checkpoints.open import open_checkpoint
from jaxpage.models.families import gemma, layers, llama
from jaxpage.models.registry import serve_checkpoint
from jaxpage.ops.attention import paged as attention
from jaxpage.ops.attention.paged import StepContext
from jaxpage.ops.state_spec import KVLayout
from jaxpage.runner.state import empty_kv_cache

BLOCK_SIZE = 16
NUM_BLOCKS = 57  # for five sequences of MAX_LEN in one KV group, or one in seven
MAX_LEN = 128
"""Longest prompt; every prompt has a block table of this width, so that all share their compiled shapes."""


class LoadedModel:
    """A checkpoint in float32, loaded as the engine does."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(str(path))
        mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
        self.model = serve_checkpoint(checkpoint, mesh, np.dtype(np.float32))
        self.params = self.model.load_params()

    def logits(self, tokens: Sequence[int], chunk: int = MAX_LEN, prompt_len: int | None = None) -> np.ndarray:
        """Logits at every position of `tokens`, `chunk` of them to a step, as [tokens, vocab] float32.

        The first `prompt_len` tokens are the prompt and the rest its output; by default all are the prompt.
        """
        return self.batch_logits([tokens], chunk, prompt_len)[0]

    def batch_logits(
        self, sequences: Sequence[Sequence[int]], chunk: int = MAX_LEN, prompt_len: int | None = None
    ) -> list[np.ndarray]:
        """The same for several sequences that share each step, every one with `chunk` tokens in it."""
        layout = plan_layout(self.model.states, BLOCK_SIZE)
        cache = empty_kv_cache(layout, NUM_BLOCKS, np.dtype(np.float32))
        # A slot that was never written holds NaN, those of the null block included: reading one shows.
        cache = dataclasses.replace(cache, buffers=[jnp.full_like(buffer, jnp.nan) for buffer in cache.buffers])
        tables = _scattered_block_tables(len(layout.groups), len(sequences))
        prompt_lens = [prompt_len or len(sequence) for sequence in sequences]
        logits: list[list[np.ndarray]] = [[] for _ in sequences]
        for start in range(0, max(map(len, sequences)), chunk):
            counts = np.array([min(max(len(tokens) - start, 0), chunk) for tokens in sequences])
            ends = np.cumsum(counts)
            tokens = np.zeros(len(sequences) * chunk, np.int32)
            tokens[: ends[-1]] = [token for sequence in sequences for token in sequence[start : start + chunk]]
            step = _step(layout, tables, start, counts, chunk, prompt_lens)
            x = self.model.embed(self.params, jnp.asarray(tokens))
            hidden, cache = self.model.forward(self.params, x, cache, step)
            step_logits = np.asarray(self.model.logits(self.params, hidden.last))
            for row, end in enumerate(ends):
                logits[row].append(step_logits[end - counts[row] : end])
        return [np.concatenate(parts) for parts in logits]


def _scattered_block_tables(num_groups: int, num_rows: int) -> np.ndarray:
    """Blocks in no order, as a pool that has been in use hands them out; block 0 is the null block."""
    width = MAX_LEN // BLOCK_SIZE
    ids = np.random.RandomState(3).permutation(np.arange(1, NUM_BLOCKS))[: num_groups * num_rows * width]
    return ids.reshape(num_groups, num_rows, width).astype(np.int32)


def _step(
    layout: KVLayout, tables: np.ndarray, start: int, counts: np.ndarray, chunk: int, prompt_lens: Sequence[int]
) -> StepContext:
    """A step in which row r computes `counts[r]` tokens from position `start` on.

    Blocks that no query from `start` on sees are given up, as the engine does.
    """
    num_tokens = len(counts) * chunk
    row = np.minimum(np.searchsorted(np.cumsum(counts), np.arange(num_tokens), side="right"), len(counts) - 1)
    query_start = np.concatenate([[0], np.cumsum(counts)])
    live = np.arange(num_tokens) < query_start[-1]
    positions = np.where(live, start + np.arange(num_tokens) - query_start[row], 0)
    kept, slots = tables.copy(), []
    for index, group in enumerate(layout.groups):
        assert group.block_size == BLOCK_SIZE
        kept[index, :, : group.spec.first_visible(start) // BLOCK_SIZE] = NULL_BLOCK_ID
        slot = tables[index][row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        slots.append(np.where(live, slot, NUM_BLOCKS * BLOCK_SIZE))

    def ints(values: object) -> jax.Array:
        return jnp.asarray(values, jnp.int32)

    return StepContext(
        positions=ints(positions),
        slots=[ints(slot) for slot in slots],
        block_tables=ints(kept),
        query_start=ints(query_start),
        query_lens=ints(counts),
        kv_lens=ints(np.where(counts > 0, start + counts, 0)),
        # The rule of `ops.rope`: the same length however a prompt is chunked.
        rope_lengths=ints(np.maximum(np.asarray(prompt_lens)[row], positions + 1)),
        max_query_len=chunk,
    )


@contextmanager
def compiled_ops() -> Iterator[None]:
    """Compile each op once for all configs of a shape.

    Run eagerly, attention's loop would compile at every call; and a program for each config would take minutes.
    """
    ops: list[tuple[str, tuple[ModuleType, ...], tuple[str, ...]]] = [
        # name, the modules that call it, its static arguments (numbers such as window or eps need not be)
        ("paged_attention_xla", (attention,), ("max_query_len",)),
        ("rotate_and_write_kv", (attention,), ()),
        ("linear", (layers,), ("out_dtype",)),
        ("gated_mlp", (llama, gemma), ("activation",)),
        ("rms_norm", (llama,), ()),
        ("zero_centered_rms_norm", (gemma,), ()),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, modules, static in ops:
            compiled: Callable[..., object] = jax.jit(getattr(modules[0], name), static_argnames=static)
            for module in modules:
                patch.setattr(module, name, compiled)
        patch.setattr(run_layers, "traced_once", lambda layer: layer)
        yield
