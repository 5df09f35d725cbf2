"""Logits of a whole prompt through the paged cache: what the engine's step does for one request, without the engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxpage.models import llama
from jaxpage.models.checkpoint import Checkpoint
from jaxpage.models.config import ModelConfig
from jaxpage.models.loading import open_checkpoint
from jaxpage.models.params import Params, load_params
from jaxpage.models.registry import Model, resolve_model
from jaxpage.ops.attention import AttentionMetadata, paged_attention

BLOCK_SIZE = 16
NUM_BLOCKS = 23
MAX_LEN = 128
"""Longest prompt; every prompt has a block table of this width, so that all share their compiled shapes."""


class LoadedModel:
    """A checkpoint in float32, as the engine loads it."""

    def __init__(self, path: object) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(str(path))
        self.module: Model
        self.config: ModelConfig
        self.module, self.config = resolve_model(self.checkpoint)
        mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
        specs = self.module.param_specs(self.config)
        self.params: Params = load_params(specs, self.checkpoint, np.dtype(np.float32), mesh)

    def logits(self, prompt: Sequence[int], chunk: int) -> np.ndarray:
        """Logits at every position of `prompt`, `chunk` tokens to a step, as [tokens, vocab] float32."""
        table = scattered_block_table()
        shape = (NUM_BLOCKS, 2, BLOCK_SIZE)
        # A slot that was never written holds NaN: reading one shows.
        cache = [
            jnp.full((*shape, spec.num_kv_heads, spec.head_dim), jnp.nan) for spec in self.module.kv_specs(self.config)
        ]
        chunks = []
        for start in range(0, len(prompt), chunk):
            tokens = np.zeros(chunk, np.int32)
            count = min(chunk, len(prompt) - start)
            tokens[:count] = prompt[start : start + count]
            positions, metadata = one_row(table, start, count, chunk, len(prompt))
            hidden, cache = self.module.forward(
                self.params, jnp.asarray(tokens), positions, cache, metadata, self.config
            )
            chunks.append(np.asarray(self.module.logits(self.params, hidden, self.config))[:count])
        return np.concatenate(chunks)


def scattered_block_table() -> np.ndarray:
    """Blocks in no order, as a cache that has been in use hands them out; block 0 is the null block."""
    return np.random.RandomState(3).permutation(np.arange(1, NUM_BLOCKS))[: MAX_LEN // BLOCK_SIZE].astype(np.int32)


def one_row(
    table: np.ndarray, start: int, count: int, padded: int, prompt_len: int
) -> tuple[jax.Array, AttentionMetadata]:
    """Positions and metadata of a step that computes `count` tokens of one prompt, padded to `padded`.

    The lengths that RoPE sees are those of the whole prompt, however it is chunked.
    """
    positions = np.where(np.arange(padded) < count, start + np.arange(padded), 0)
    slots = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    arrays: dict[str, Any] = {
        "slots": np.where(np.arange(padded) < count, slots, NUM_BLOCKS * BLOCK_SIZE),
        "block_tables": table[None],
        "query_start": [0, count],
        "query_lens": [count],
        "kv_lens": [start + count],
        "rope_lengths": np.maximum(prompt_len, positions + 1),
    }
    metadata = AttentionMetadata(
        **{name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}, max_query_len=padded
    )
    return jnp.asarray(positions, jnp.int32), metadata


@contextmanager
def compiled_attention() -> Iterator[None]:
    """Compile attention once for all models of a shape; run op by op, its loop would compile at every call.

    The rest of the forward pass runs op by op: a program for each config would take minutes to compile.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "paged_attention", jax.jit(paged_attention, static_argnames=("scale", "window")))
        yield
