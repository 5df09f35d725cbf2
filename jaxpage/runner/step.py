"""The compiled programs, all of them: `jit` appears in this file only.

    fork     rows and KV blocks that go on as copies of others
    admit    one request in full -> its row of the batch
    rules    what an admitted request says of single tokens -> the same row
    edit     block tables and places of the next step, as far as they differ
    step     the last edits -> forward, sample, append, for every place
    redraw   masks of tokens -> other tokens in place of the last ones, for some places
    score    some tokens of the last step -> log-probabilities of what follows them; score_rows: of all the vocabulary
    pool     stretches of its tokens -> the sums of their hidden states

All take the device state donated and give it back updated; nothing else crosses between host and device but what they
are told (in) and the sampled tokens (out).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.models.config import ModelConfig
from jaxpage.models.params import Params
from jaxpage.models.registry import model_for
from jaxpage.ops.attention import AttentionMetadata, KVCache, Target, logits_sharding
from jaxpage.ops.launch import GPU
from jaxpage.ops.processing import ProcessingState
from jaxpage.ops.running_sum import running_sum
from jaxpage.ops.sampling import (
    SamplingState,
    TokenLogprobs,
    draw,
    logprobs_at,
    sample,
    sample_within,
    token_logprobs,
)
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.gpu_targets import compiler_options
from jaxpage.runner.own_processors import OwnProcessor
from jaxpage.runner.plan import (
    DRAW_AGAIN,
    KEEP_DRAW,
    UNDO_DRAW,
    rules_layout,
    unpack_admission,
    unpack_forks,
)
from jaxpage.runner.state import BatchState
from jaxpage.speculative.config import SpeculativeConfig
from jaxpage.speculative.drafts import count_accepted

trace_counts: Counter[str] = Counter()
"""How often each function was traced in this process; serving adds none after warm-up."""


@dataclass(frozen=True)
class ProgramConfig:
    """What a step program depends on besides its bucket."""

    model: ModelConfig
    num_logprobs: int
    """Most alternatives that a row may ask for."""
    processors: tuple[OwnProcessor, ...] = ()
    """The user's own logits processors, in the order of their bits in `BatchState.own_processors`."""
    speculative: SpeculativeConfig | None = None
    """How drafts are proposed; None in an engine that does not speculate."""

    def num_draws(self, bucket: Bucket) -> int:
        """Most tokens that a row draws in a step: one, and one behind each of its drafts."""
        if self.speculative is None or bucket.max_query_len == 1:
            return 1
        return min(1 + self.speculative.num_speculative_tokens, bucket.max_query_len)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepResult:
    """What a step gives the host, by place."""

    tokens: jax.Array  # [rows, draws] int32, -1 where there is none
    """Drafts kept and the token behind them; none where a prompt goes on."""
    logprobs: TokenLogprobs  # of rows * draws; zeros unless a row of the step asks for them
    num_drafts: jax.Array | None = None  # [rows] int32, proposed for the next step; None without speculation


def compile_step(
    config: ProgramConfig,
    bucket: Bucket,
    params: Params,
    kv_cache: Any,
    state: Any,
    edits: Any,
    when_traced: Callable[[], None] = lambda: None,
) -> jax.stages.Compiled:
    """Compile the step of one bucket for arguments of these shapes (arrays or `ShapeDtypeStruct`s).

    `when_traced` is called once no more Python runs for it, and XLA has it.

    It is made for the devices that their shardings name: GPUs among them need not be on this machine.
    The program is `(params, kv_cache, state, edits) -> (kv_cache, state, StepResult, logits [rows, vocab] float32)`,
    the logits of each row's first draw; kv_cache and state are donated.
    """

    mesh = kv_cache.buffers[0].sharding.mesh
    target = _target_of(mesh)

    def step(
        params: Params, kv_cache: KVCache, state: BatchState, edits: jax.Array
    ) -> tuple[KVCache, BatchState, StepResult, jax.Array]:
        trace_counts["step"] += 1
        return _step(params, kv_cache, _edit(state, edits), config, bucket, target)

    everywhere = NamedSharding(mesh, PartitionSpec())
    by_vocabulary = logits_sharding(mesh, config.model.vocab_size)
    out_shardings = (*_shardings((kv_cache, state)), everywhere, by_vocabulary)
    lowered = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings).lower(params, kv_cache, state, edits)
    when_traced()
    return lowered.compile(compiler_options(mesh.devices.flat[0]))


def _compiled(jitted: Any, *arguments: Any) -> jax.stages.Compiled:
    """Compiled for the devices that the arguments lie on: here, or described."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments))
    device = next(device for sharding in shardings if sharding is not None for device in sharding.device_set)
    program: jax.stages.Compiled = jitted.lower(*arguments).compile(compiler_options(device))
    return program


def _shardings(arguments: Any) -> Any:
    """Where donated arguments lie, and their updates as well: the next program takes those as they are."""
    return jax.tree.map(lambda array: array.sharding, arguments)


def _target_of(mesh: Mesh) -> Target:
    device = mesh.devices.flat[0]
    gpu = None
    if device.platform == "gpu":
        gpu = GPU(device.core_count, int(device.compute_capability.replace(".", "")))
    return Target(gpu, mesh if mesh.size > 1 else None)


def compile_edit(state: Any, edits: Any) -> jax.stages.Compiled:
    """Compile `(state, edits) -> state`; state is donated."""

    def edit(state: BatchState, edits: jax.Array) -> BatchState:
        trace_counts["edit"] += 1
        return _edit(state, edits)

    return _compiled(jax.jit(edit, donate_argnums=(0,), out_shardings=_shardings(state)), state, edits)


def compile_admit(capacity: int, state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(state, packed request) -> state` for a request of this many token ids; state is donated."""

    def admit(state: BatchState, packed: jax.Array) -> BatchState:
        trace_counts["admit"] += 1
        return _admit(state, packed, capacity)

    return _compiled(jax.jit(admit, donate_argnums=(0,), out_shardings=_shardings(state)), state, packed)


def compile_rules(state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(state, packed rules) -> state`; state is donated."""

    def set_rules(state: BatchState, packed: jax.Array) -> BatchState:
        trace_counts["rules"] += 1
        return dataclasses.replace(state, rules=state.rules.at[packed[0]].set(packed[1:]))

    return _compiled(jax.jit(set_rules, donate_argnums=(0,), out_shardings=_shardings(state)), state, packed)


def compile_redraw(config: ProgramConfig, logits: Any, state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(logits, state, packed redraws) -> (state, StepResult)` behind a step of as many places.

    logits: [rows, vocab] float32. state is donated.
    """

    mesh = logits.sharding.mesh
    target = _target_of(mesh)

    def redraw(logits: jax.Array, state: BatchState, packed: jax.Array) -> tuple[BatchState, StepResult]:
        trace_counts["redraw"] += 1
        return _redraw(logits, state, packed, config, target)

    out_shardings = (_shardings(state), NamedSharding(mesh, PartitionSpec()))
    return _compiled(jax.jit(redraw, donate_argnums=(1,), out_shardings=out_shardings), logits, state, packed)


def compile_fork(kv_cache: Any, state: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(kv_cache, state, packed forks) -> (kv_cache, state)`; kv_cache and state are donated."""

    def fork(kv_cache: KVCache, state: BatchState, packed: jax.Array) -> tuple[KVCache, BatchState]:
        trace_counts["fork"] += 1
        return _fork(kv_cache, state, packed)

    jitted = jax.jit(fork, donate_argnums=(0, 1), out_shardings=_shardings((kv_cache, state)))
    return _compiled(jitted, kv_cache, state, packed)


def compile_score(config: ProgramConfig, params: Params, hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(params, hidden, packed) -> TokenLogprobs`.

    hidden: [tokens, embed]. packed: [2, n] int32, whose hidden state is looked at and which token follows it.
    """

    def score(params: Params, hidden: jax.Array, packed: jax.Array) -> TokenLogprobs:
        trace_counts["score"] += 1
        index, following = packed
        logits = model_for(config.model.architecture).logits(params, hidden[index], config.model)
        return logprobs_at(logits, following, config.num_logprobs)

    return _compiled(jax.jit(score, out_shardings=hidden.sharding), params, hidden, packed)


def compile_score_rows(config: ProgramConfig, params: Params, hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(params, hidden, packed) -> log-probabilities of the whole vocabulary, [n, vocab] float32`.

    hidden: [tokens, embed]. packed: [n] int32, whose hidden state is looked at.
    """

    def score_rows(params: Params, hidden: jax.Array, packed: jax.Array) -> jax.Array:
        trace_counts["score_rows"] += 1
        logits = model_for(config.model.architecture).logits(params, hidden[packed], config.model)
        return jax.nn.log_softmax(logits, axis=-1)

    return _compiled(jax.jit(score_rows, out_shardings=hidden.sharding), params, hidden, packed)


def compile_pool(hidden: Any, packed: Any) -> jax.stages.Compiled:
    """Compile `(hidden, packed) -> sums of hidden states, [n, embed] float32`.

    hidden: [tokens, embed]. packed: [2, n] int32, where stretches of tokens begin and how long they are.
    """

    def pool(hidden: jax.Array, packed: jax.Array) -> jax.Array:
        trace_counts["pool"] += 1
        start, length = packed[:, :, None]
        token = jnp.arange(hidden.shape[0])
        within = (token >= start) & (token < start + length)
        # What stands outside of all stretches may be anything, and nothing times infinity is no number.
        states = jnp.where(within.any(axis=0)[:, None], hidden, 0).astype(jnp.float32)
        return jnp.matmul(within.astype(jnp.float32), states, precision=jax.lax.Precision.HIGHEST)

    return jax.jit(pool, out_shardings=hidden.sharding).lower(hidden, packed).compile()


def compile_draw(logits: Any, sampling: Any) -> jax.stages.Compiled:
    """Compile the sampler's draw by itself, `(logits, SamplingState) -> tokens`, to be measured."""
    return jax.jit(draw).lower(logits, sampling).compile()


def on_device(make: Callable[[], Any], sharding: jax.sharding.Sharding) -> Any:
    """Build a pytree of arrays right on its device, without a copy on the host."""
    return jax.jit(make, out_shardings=sharding)()


def _admit(state: BatchState, packed: jax.Array, capacity: int) -> BatchState:
    drafts = None
    if state.drafts is not None:
        packed, draft_end = packed[:-1], packed[-1]
        drafts = state.drafts.admit(packed[0], draft_end)
    new = unpack_admission(packed, capacity, state.block_tables.shape[0])
    # Their rows are shorter than the state's; what stands behind them there belongs to nobody.
    fields = {field.name for field in dataclasses.fields(new)} - {"row", "token_ids", "block_tables"}
    updated = {name: getattr(state, name).at[new.row].set(getattr(new, name)) for name in fields}
    return dataclasses.replace(
        state,
        token_ids=state.token_ids.at[new.row, jnp.arange(capacity)].set(new.token_ids, mode="drop"),
        block_tables=state.block_tables.at[:, new.row, : new.block_tables.shape[1]].set(new.block_tables),
        drafts=drafts,
        **updated,
    )


def _edit(state: BatchState, edits: jax.Array) -> BatchState:
    address, value = edits
    tables, places = state.block_tables.reshape(-1), state.places.reshape(-1)
    tables = tables.at[address].set(value, mode="drop")
    # A negative index would count from the end.
    place = jnp.where(address < tables.size, places.size, address - tables.size)
    places = places.at[place].set(value, mode="drop")
    return dataclasses.replace(
        state, block_tables=tables.reshape(state.block_tables.shape), places=places.reshape(state.places.shape)
    )


def _fork(kv_cache: KVCache, state: BatchState, packed: jax.Array) -> tuple[KVCache, BatchState]:
    plan = unpack_forks(packed, state.num_rows)
    source, target, token_id = plan.row_forks
    rows = jnp.minimum(source, state.num_rows - 1)

    def copy_rows(array: jax.Array) -> jax.Array:
        return array.at[target].set(array[rows], mode="drop")

    copied = {
        field.name: jax.tree.map(copy_rows, getattr(state, field.name))
        for field in dataclasses.fields(state)
        if field.name not in ("block_tables", "places", "hidden")
    }
    copied["block_tables"] = jax.vmap(copy_rows)(state.block_tables)
    last = copied["num_tokens"].at[target].get(mode="clip") - 1
    copied["token_ids"] = copied["token_ids"].at[target, last].set(token_id, mode="drop")

    def copy_block(index: jax.Array, buffers: list[jax.Array]) -> list[jax.Array]:
        source_id, target_id = plan.copies[0, index], plan.copies[1, index]
        return [buffer.at[target_id].set(buffer[source_id]) for buffer in buffers]

    buffers = jax.lax.fori_loop(0, plan.num_copies, copy_block, kv_cache.buffers)
    return dataclasses.replace(kv_cache, buffers=buffers), dataclasses.replace(state, **copied)


def _step(
    params: Params, kv_cache: KVCache, state: BatchState, config: ProgramConfig, bucket: Bucket, target: Target
) -> tuple[KVCache, BatchState, StepResult, jax.Array]:
    model = model_for(config.model.architecture)
    rows, query_lens = state.places[:, : bucket.num_rows]

    query_start = jnp.concatenate([jnp.zeros(1, jnp.int32), running_sum(query_lens)])
    num_tokens, num_computed = state.num_tokens[rows], state.num_computed_tokens[rows]
    if state.drafts is not None:
        query_lens = state.drafts.live_query_lens(rows, query_lens, num_tokens, num_computed)
    tokens, positions, metadata = _batch_of(state, kv_cache, bucket, target, query_start, query_lens)
    kv_lens = metadata.kv_lens
    hidden, kv_cache = model.forward(params, tokens, positions, kv_cache, metadata, config.model)

    # A row draws only when its last known token is computed; prompts that go on in a later step do not. Behind that
    # token may lie drafts, and it draws behind each of them, too.
    draws = (query_lens > 0) & (kv_lens >= num_tokens)
    num_checked = jnp.where(draws, kv_lens - num_tokens, 0)
    place = jnp.arange(config.num_draws(bucket))
    last = hidden
    if bucket.max_query_len > 1:
        first = query_start[:-1] + jnp.maximum(query_lens - num_checked, 1) - 1
        last = hidden[jnp.minimum(first[:, None] + place, bucket.num_tokens - 1).reshape(-1)]
    with jax.named_scope("logits"):
        logits = model.logits(params, last, config.model)  # [rows * draws, vocab]
    known = num_tokens[:, None] + place  # what each draw follows
    drawing = draws[:, None] & (place <= num_checked[:, None])
    of_row, wanted = jnp.repeat(rows, place.size), drawing.reshape(-1)
    with jax.named_scope("sample"):
        sampling, processing = _sampling_states(state, of_row, known.reshape(-1), wanted, config)
        drawn = sample(logits, sampling, processing, target.place_logits)
    with jax.named_scope("logprobs"):
        asked = jnp.where(wanted, state.num_logprobs[of_row], -1)
        logprobs = token_logprobs(logits, drawn, asked, config.num_logprobs)

    drawn = drawn.reshape(-1, place.size)
    drafts = state.token_ids.at[rows[:, None], known[:, :-1]].get(mode="clip")
    num_accepted = count_accepted(drawn, drafts, num_checked)
    kept = draws[:, None] & (place <= num_accepted[:, None])
    num_new = jnp.sum(kept, axis=1, dtype=jnp.int32)
    token_ids = state.token_ids.at[jnp.where(kept, rows[:, None], state.num_rows), known].set(drawn, mode="drop")
    draft_state, num_drafts = state.drafts, None
    if draft_state is not None and config.speculative is not None:
        with jax.named_scope("propose"):
            draft_state, token_ids, num_drafts = draft_state.propose(
                token_ids, rows, num_tokens + num_new, draws, config.speculative
            )
    updated = dataclasses.replace(
        state,
        token_ids=token_ids,
        # Padding names some row, and adds nothing to it.
        num_tokens=state.num_tokens.at[rows].add(num_new),
        num_computed_tokens=state.num_computed_tokens.at[rows].add(query_lens - num_checked + num_accepted),
        hidden=state.hidden.at[: bucket.num_tokens].set(hidden),
        drafts=draft_state,
    )
    result = StepResult(jnp.where(kept, drawn, -1), logprobs, num_drafts)
    return kv_cache, updated, result, logits if place.size == 1 else logits.reshape(*drawn.shape, -1)[:, 0]


def _batch_of(
    state: BatchState,
    kv_cache: KVCache,
    bucket: Bucket,
    target: Target,
    query_start: jax.Array,
    query_lens: jax.Array,
) -> tuple[jax.Array, jax.Array, AttentionMetadata]:
    """A step's tokens and their positions, both [tokens] int32, and what attention must know of them.

    query_start: [rows + 1], where the host has made room for each row's tokens; query_lens: [rows], those there are.
    """
    rows = state.places[0, : bucket.num_rows]
    num_computed = state.num_computed_tokens[rows]
    # Which row each token belongs to, and where in the row it stands.
    token = jnp.arange(bucket.num_tokens)
    if bucket.max_query_len == 1:
        index = token
        live = query_lens > 0
    else:
        index = jnp.minimum(
            jnp.searchsorted(query_start[1:], token, side="right", method="compare_all"), bucket.num_rows - 1
        )
        live = token - query_start[index] < query_lens[index]
    positions = num_computed[index] + token - query_start[index]
    if bucket.max_query_len == 1:
        positions = num_computed
    positions = jnp.where(live, positions, 0)
    token_rows = rows[index]
    slots = []
    for table, size in zip(state.block_tables, (group.block_size for group in kv_cache.layout.groups), strict=True):
        slot = table[token_rows, positions // size] * size + positions % size
        slots.append(jnp.where(live, slot, kv_cache.num_blocks * size))
    kv_lens = jnp.where(query_lens > 0, num_computed + query_lens, 0)
    metadata = AttentionMetadata(
        slots=slots,
        block_tables=state.block_tables[:, rows],
        query_start=query_start,
        query_lens=query_lens,
        kv_lens=kv_lens,
        rope_lengths=jnp.maximum(state.num_prompt_tokens[token_rows], positions + 1),
        max_query_len=bucket.max_query_len,
        target=target,
    )
    return state.token_ids[token_rows, positions], positions, metadata


def _redraw(
    logits: jax.Array, state: BatchState, packed: jax.Array, config: ProgramConfig, target: Target
) -> tuple[BatchState, StepResult]:
    rows = state.places[0, : logits.shape[0]]
    redraw, mask = packed[:, 0], packed[:, 1:]
    draws = redraw == DRAW_AGAIN
    # Back to where the step stood when it drew; a draw that is undone takes the row's last computed token with it.
    num_tokens = state.num_tokens.at[rows].add(-(redraw != KEEP_DRAW).astype(jnp.int32))
    num_computed = state.num_computed_tokens.at[rows].add(-(redraw == UNDO_DRAW).astype(jnp.int32))
    before = dataclasses.replace(state, num_tokens=num_tokens, num_computed_tokens=num_computed)
    sampling, processing = _sampling_states(before, rows, num_tokens[rows], draws, config)
    drawn = sample_within(logits, mask, sampling, processing, target.place_logits)
    logprobs = token_logprobs(logits, drawn, jnp.where(draws, state.num_logprobs[rows], -1), config.num_logprobs)
    updated = dataclasses.replace(
        before,
        token_ids=state.token_ids.at[jnp.where(draws, rows, state.num_rows), num_tokens[rows]].set(drawn, mode="drop"),
        num_tokens=num_tokens.at[rows].add(draws.astype(jnp.int32)),
    )
    return updated, StepResult(jnp.where(draws, drawn, -1)[:, None], logprobs)


def _sampling_states(
    state: BatchState, rows: jax.Array, num_tokens: jax.Array, draws: jax.Array, config: ProgramConfig
) -> tuple[SamplingState, ProcessingState]:
    """The options of a step's draws; those that are not made have none.

    rows: [n] int32, of each draw; num_tokens: [n] int32, tokens that it follows; draws: [n] bool, whether it is made.
    """

    def where_drawn(values: jax.Array, off: float) -> jax.Array:
        return jnp.where(draws, values[rows], off)

    sampling = SamplingState(
        temperature=where_drawn(state.temperature, 0),
        top_k=where_drawn(state.top_k, 0),
        top_p=where_drawn(state.top_p, 1),
        min_p=where_drawn(state.min_p, 0),
        seed=state.seed[rows],
        position=num_tokens,
    )
    processing = ProcessingState(
        rows=rows,
        num_prompt_tokens=state.num_prompt_tokens[rows],
        num_tokens=num_tokens,
        min_tokens=where_drawn(state.min_tokens, 0),
        stop_token_ids=state.stop_token_ids[rows],
        repetition_penalty=where_drawn(state.repetition_penalty, 1),
        presence_penalty=where_drawn(state.presence_penalty, 0),
        frequency_penalty=where_drawn(state.frequency_penalty, 0),
        has_rules=draws & state.has_rules[rows],
        token_ids=state.token_ids,
        rules=state.rules,
        own=jnp.where(draws, state.own_processors[rows], 0),
        layout=rules_layout(config.model.vocab_size),
        processors=tuple(processor.function for processor in config.processors),
    )
    return sampling, processing
