"""What stays on the device from one step to the next: the KV cache, and a row for every request that runs."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.attention.paged import KVCache
from jaxpage.ops.running_sum import running_sum
from jaxpage.ops.sampling.token_rules import RulesLayout
from jaxpage.ops.state_spec import KVLayout
from jaxpage.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from jaxpage.speculative.drafts import DraftState, empty_drafts


@dataclass(frozen=True)
class StepRows:
    """What the rows of a step compute and draw, by step row, as it stands until the step has drawn."""

    rows: jax.Array  # [step rows] int32
    query_start: jax.Array  # [step rows + 1] int32, where the host has made room for each row's tokens
    query_lens: jax.Array  # [step rows] int32, the tokens that there are
    num_tokens: jax.Array  # [step rows] int32, known
    num_computed: jax.Array  # [step rows] int32, before the step

    @property
    def kv_lens(self) -> jax.Array:
        """Tokens computed after the step, 0 in padding. [step rows] int32."""
        return jnp.where(self.query_lens > 0, self.num_computed + self.query_lens, 0)

    @property
    def draws(self) -> jax.Array:
        """Whether its last known token is computed: prompts that go on later do not draw. [step rows] bool."""
        return (self.query_lens > 0) & (self.kv_lens >= self.num_tokens)

    @property
    def num_checked(self) -> jax.Array:
        """Drafts behind the last known token, behind each of which a row draws as well. [step rows] int32."""
        return jnp.where(self.draws, self.kv_lens - self.num_tokens, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchState:
    """The device-resident batch: a row for every request, and what the last step leaves.

    Rows without a request hold left-overs that no plan names.
    """

    token_ids: jax.Array  # [rows, max_model_len] int32, prompt and output
    num_tokens: jax.Array  # [rows] int32, known tokens
    num_prompt_tokens: jax.Array  # [rows] int32
    num_computed_tokens: jax.Array  # [rows] int32, tokens whose KV is written: the truth
    block_tables: jax.Array  # [groups, rows, max_blocks] int32, one table per KV cache group
    scheduled: jax.Array  # [2, rows] int32, the step: row and query length by step row; a query length of 0 is padding
    temperature: jax.Array  # [rows] float32
    top_k: jax.Array  # [rows] int32
    top_p: jax.Array  # [rows] float32
    min_p: jax.Array  # [rows] float32
    seed: jax.Array  # [rows, 2] uint32
    min_tokens: jax.Array  # [rows] int32, output tokens before a stop token may come
    num_logprobs: jax.Array  # [rows] int32, alternatives to report, -1 without log-probabilities
    stop_token_ids: jax.Array  # [rows, MAX_STOP_TOKEN_IDS] int32, maximal where unused
    repetition_penalty: jax.Array  # [rows] float32
    presence_penalty: jax.Array  # [rows] float32
    frequency_penalty: jax.Array  # [rows] float32
    has_rules: jax.Array  # [rows] bool, whether `rules` holds what its request says
    own_processors: jax.Array  # [rows] int32, bit i is set where the request asks for the engine's i-th processor
    rules: jax.Array  # [rows, size of `RulesLayout`] int32
    drafts: DraftState | None  # None in an engine that does not speculate

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    def step_rows(self, num_step_rows: int) -> StepRows:
        """The step that `scheduled` names, which has room for so many rows."""
        rows, query_lens = self.scheduled[:, :num_step_rows]
        query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), running_sum(query_lens)])
        num_tokens, num_computed = self.num_tokens[rows], self.num_computed_tokens[rows]
        if self.drafts is not None:
            query_lens = self.drafts.live_query_lens(rows, query_lens, num_tokens, num_computed)
        return StepRows(rows, query_start, query_lens, num_tokens, num_computed)


def empty_state(
    num_rows: int,
    max_model_len: int,
    num_groups: int,
    block_size: int,
    max_stop_token_ids: int,
    *,
    rules_size: int,
    drafts: bool = False,
) -> BatchState:
    """A batch without requests."""

    def ints() -> jax.Array:  # every field has an array of its own: all are donated
        return jnp.zeros(num_rows, jnp.int32)

    def floats() -> jax.Array:
        return jnp.zeros(num_rows, jnp.float32)

    return BatchState(
        token_ids=jnp.zeros((num_rows, max_model_len), jnp.int32),
        num_tokens=ints(),
        num_prompt_tokens=ints(),
        num_computed_tokens=ints(),
        block_tables=jnp.zeros((num_groups, num_rows, -(-max_model_len // block_size)), jnp.int32),
        scheduled=jnp.zeros((2, num_rows), jnp.int32),
        temperature=floats(),
        top_k=ints(),
        top_p=floats(),
        min_p=floats(),
        seed=jnp.zeros((num_rows, 2), jnp.uint32),
        min_tokens=ints(),
        num_logprobs=ints(),
        stop_token_ids=jnp.full((num_rows, max_stop_token_ids), jnp.iinfo(jnp.int32).max, jnp.int32),
        repetition_penalty=floats(),
        presence_penalty=floats(),
        frequency_penalty=floats(),
        has_rules=jnp.zeros(num_rows, bool),
        own_processors=ints(),
        rules=jnp.zeros((num_rows, rules_size), jnp.int32),
        drafts=empty_drafts(num_rows) if drafts else None,
    )


def empty_kv_cache(
    layout: KVLayout, num_blocks: int, dtype: np.dtype[Any], *, num_rows: int = 0, ring: int = 0, num_devices: int = 1
) -> KVCache:
    """A cache that holds nothing: `num_blocks` pages in each array of paged KV, `ring` recurrent states of each row.

    Without paged KV, checkpoints have an array of their own, in which each device has its part.
    """
    owner = {buffer: layout.groups[group] for group, buffer in reversed(layout.paged_places)}
    shapes = [
        (num_blocks, 2, owner[i].block_size, owner[i].spec.num_kv_heads, owner[i].spec.head_dim)
        for i in range(layout.num_buffers)
    ]
    buffers = [jnp.zeros(shape, dtype) for shape in shapes]
    if not buffers and layout.checkpoint is not None:
        buffers = [jnp.zeros((num_blocks, num_devices, layout.checkpoint.block_bytes), jnp.uint8)]
    recurrent = [jnp.zeros((num_rows, ring, *spec.shape), spec.dtype) for spec in layout.recurrent]
    return KVCache(buffers, layout, recurrent)


def rules_layout(vocab_size: int) -> RulesLayout:
    """How the rules of a request about single tokens are packed: with room for all that it may have."""
    return RulesLayout(vocab_size, MAX_LOGIT_BIAS, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
