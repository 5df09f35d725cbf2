"""Ragged batches for attention kernels, and attention over them in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Row = tuple[int, int]
"""(kv_len, query_len) of a row, this step's tokens counted in kv_len."""


@dataclass(frozen=True)
class Attention:
    """What a layer's attention is."""

    num_kv_heads: int = 1
    group: int = 2
    """Query heads per KV head."""
    head_dim: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scale: float = 0.3

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def first_visible(self, position: int) -> int:
        """The first KV position that a query sees."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        return first if self.chunk is None else max(first, position - position % self.chunk)


@dataclass(frozen=True)
class Batch:
    """Arguments of one call, and what it returns: 0 for padding tokens."""

    args: tuple[np.ndarray, np.ndarray]
    """q: [tokens, heads, head_dim]; kv_layer: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""
    options: dict[str, Any]
    expected: np.ndarray  # [tokens, heads, head_dim] float64


def make_batch(
    attention: Attention,
    rows: Sequence[Row],
    *,
    block_size: int = 16,
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    kv_scales: np.ndarray | None = None,
    padding: int = 3,
    decode: bool = False,
    seed: int = 0,
) -> Batch:
    """Random queries, keys and values in scattered blocks; slots that no query sees are NaN, padding tokens large.

    In a `decode` batch token r belongs to row r; otherwise `padding` tokens stand behind the last row's.
    """
    rng = np.random.default_rng(seed)
    kv_lens, query_lens = np.array(rows, np.int32).T
    num_rows = len(rows)
    starts = np.arange(num_rows + 1) if decode else np.concatenate([[0], np.cumsum(query_lens)])
    width = -(-max(1, *kv_lens.tolist()) // block_size)
    num_blocks = num_rows * width + 1
    ids = rng.permutation(np.arange(1, num_blocks)).reshape(num_rows, width)
    # Entries past a row's KV, or behind what its queries see, are left-overs: the null block, or blocks of others.
    first_seen = np.array([attention.first_visible(max(0, kv_len - max(n, 1))) for kv_len, n in rows])
    block_start = np.arange(width) * block_size
    unused = (block_start >= kv_lens[:, None]) | (block_start + block_size <= first_seen[:, None])
    tables = np.where(unused, np.where(rng.random(ids.shape) < 0.5, 0, ids[::-1]), ids)

    num_tokens = num_rows if decode else int(starts[-1]) + padding
    q = rng.normal(size=(num_tokens, attention.num_heads, attention.head_dim)).astype(dtype)
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    kv = np.full((num_blocks, 2, block_size, attention.num_kv_heads, attention.head_dim), np.nan, kv_dtype)
    sinks = rng.normal(size=attention.num_heads).astype(np.float32) if attention.has_sinks else None
    expected = np.zeros(q.shape)
    is_padding = np.ones(num_tokens, bool)
    for row, (kv_len, query_len) in enumerate(rows):
        new = rng.normal(size=(2, kv_len, attention.num_kv_heads, attention.head_dim)).astype(kv_dtype)
        stored = np.arange(first_seen[row], kv_len)
        kv[tables[row, stored // block_size], :, stored % block_size] = new[:, stored].swapaxes(0, 1)
        tokens = slice(starts[row], starts[row] + query_len)
        k, v = new.astype(np.float64) * (1 if kv_scales is None else kv_scales[:, None, :, None])
        expected[tokens] = dense(attention, q[tokens].astype(np.float64), k, v, sinks)
        is_padding[tokens] = False
    q[is_padding] = 1000
    options = {
        "block_tables": tables.astype(np.int32),
        "query_start": starts.astype(np.int32),
        "query_lens": query_lens,
        "kv_lens": kv_lens,
        "max_query_len": 1 if decode else max(2, num_tokens),
        "scale": attention.scale,
        "window": attention.window,
        "chunk": attention.chunk,
        "softcap": attention.softcap,
        "sinks": sinks,
    }
    return Batch((q, kv), options, expected)


def dense(attention: Attention, q: np.ndarray, k: np.ndarray, v: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Causal attention of one row, whose queries are its last positions.

    q: [queries, heads, head_dim]; k, v: [kv_len, kv_heads, head_dim]; all float64. sinks: [heads].
    """
    k, v = (np.repeat(of, attention.group, axis=1) for of in (k, v))
    positions = np.arange(len(k) - len(q), len(k))[:, None]
    first = np.array([attention.first_visible(position) for position in positions[:, 0]], int).reshape(-1, 1)
    s = np.arange(len(k))
    scores = np.einsum("qhd,shd->hqs", q, k) * attention.scale
    if attention.softcap is not None:
        scores = attention.softcap * np.tanh(scores / attention.softcap)
    scores = np.where((s <= positions) & (s >= first), scores, -np.inf)
    if sinks is not None:  # one more position, without a value
        sink_scores = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, sink_scores], axis=-1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    if not scores.size:
        return np.zeros_like(q)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqs,shd->qhd", weights / weights.sum(-1, keepdims=True), v)
