"""Serves a few rows by step programs on one device and on eight, and prints the tokens that each gives, as JSON.

A process of its own, with JAX_NUM_CPU_DEVICES=8: how many devices a CPU has is settled when JAX starts.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.kv_cache.spec import plan_layout
from jaxpage.models.params import map_weights
from jaxpage.models.registry import model_for
from jaxpage.ops.attention import KV_CACHE_SPEC
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.plan import NUM_EDITS, pack_edits, pack_forks, rules_layout
from jaxpage.runner.state import empty_kv_cache, empty_state
from jaxpage.runner.step import ProgramConfig, compile_fork, compile_step
from jaxpage.runner.step_table import StepTable
from jaxpage.scheduler import RowFork, SchedulerOutput

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GEMMA = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 20, "sliding_window_pattern": 2}
GEMMA |= {"tie_word_embeddings": False}  # tied, random weights repeat the last token for ever
PROMPT_LENS = (40, 17, 70, 5)
NUM_ROWS, FORKED_ROW, BLOCK_SIZE, MAX_MODEL_LEN = 5, 4, 16, 112
NO_EDITS = np.zeros((2, 0), np.int32)
PREFILL, DECODE = Bucket(64, NUM_ROWS, 64), Bucket(NUM_ROWS, NUM_ROWS, 1)


def serve(hf: dict[str, Any], num_devices: int) -> dict[str, Any]:
    """Prompts in chunks beside decodes, a fork, and decodes. Returns the token ids of every row."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("tp",))
    model = model_for(hf["architectures"][0])
    config = model.config_from_hf(hf)
    rng = np.random.default_rng(0)

    def put(array: Any, *spec: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    params = map_weights(
        lambda weight: jax.device_put(rng.normal(size=weight.shape).astype(np.float32) * 0.3, weight.sharding(mesh)),
        model.param_specs(config),
    )
    layout = plan_layout(model.kv_specs(config), BLOCK_SIZE)
    state = empty_state(
        *(NUM_ROWS, MAX_MODEL_LEN, len(layout.groups), BLOCK_SIZE, 4),
        rules_size=rules_layout(config.vocab_size).size,
        hidden=jnp.zeros((PREFILL.num_tokens, config.hidden_size)),
    )
    num_blocks = state.block_tables.size + 1
    token_ids = np.zeros(state.token_ids.shape, np.int32)
    for row, length in enumerate(PROMPT_LENS):
        token_ids[row, :length] = rng.integers(0, 128, length)
    lens = np.array([*PROMPT_LENS, 0], np.int32)
    state = dataclasses.replace(
        state,
        token_ids=token_ids,
        num_tokens=lens,
        num_prompt_tokens=lens.copy(),
        block_tables=rng.permutation(np.arange(1, num_blocks)).reshape(state.block_tables.shape).astype(np.int32),
        temperature=np.array([0, 0, 1, 0.7, 0], np.float32),
        top_k=np.array([0, 0, 0, 20, 0], np.int32),
        top_p=np.ones(NUM_ROWS, np.float32),
        repetition_penalty=np.ones(NUM_ROWS, np.float32),
        seed=rng.integers(0, 2**32, (NUM_ROWS, 2)).astype(np.uint32),
    )
    state = jax.tree.map(put, state)
    kv_cache = jax.tree.map(
        lambda buffer: jax.device_put(jnp.full_like(buffer, jnp.nan), NamedSharding(mesh, KV_CACHE_SPEC)),
        empty_kv_cache(layout, num_blocks, np.dtype(np.float32)),
    )
    program_config = ProgramConfig(config, 4)
    steps = {
        bucket: compile_step(program_config, bucket, params, kv_cache, state, pack_edits(NO_EDITS, NUM_EDITS))
        for bucket in (PREFILL, DECODE)
    }

    def pack(forks: list[RowFork], copies: list[tuple[int, int]]) -> np.ndarray:
        return pack_forks(SchedulerOutput(forks, copies, [], [], [], [], []), NUM_ROWS, len(layout.groups))

    fork = compile_fork(kv_cache, state, pack([], []))
    table = StepTable(NUM_ROWS, len(layout.groups), state.block_tables.shape[2])

    def run(bucket: Bucket, work: dict[int, int]) -> None:
        """Query length by row."""
        nonlocal kv_cache, state
        edits, _ = table.advance(SchedulerOutput([], [], [], [], list(work), list(work.values()), []))
        kv_cache, state, _ = steps[bucket](params, kv_cache, state, pack_edits(edits, NUM_EDITS))

    run(PREFILL, {0: 40, 1: 17})
    run(PREFILL, {0: 1, 1: 1, 2: 50, 3: 5})
    run(PREFILL, {0: 1, 1: 1, 2: 20, 3: 1})
    for _ in range(8):
        run(DECODE, dict.fromkeys(range(4), 1))
    # Row 4 goes on as a copy of row 0 with another last token; both own their blocks.
    tables = np.asarray(state.block_tables)
    copies = [(int(s), int(t)) for table in tables for s, t in zip(table[0], table[FORKED_ROW], strict=True)]
    for start in range(0, len(copies), NUM_ROWS):
        forks = [RowFork(0, FORKED_ROW, 7)] if start == 0 else []
        kv_cache, state = fork(kv_cache, state, pack(forks, copies[start : start + NUM_ROWS]))
    state = dataclasses.replace(state, block_tables=put(tables))
    for _ in range(8):
        run(DECODE, dict.fromkeys(range(NUM_ROWS), 1))
    lens = np.asarray(state.num_tokens)
    shard = kv_cache.buffers[0].addressable_shards[0].data.shape
    return {
        "tokens": [row[:n].tolist() for row, n in zip(np.asarray(state.token_ids), lens, strict=True)],
        "kv_heads_on_a_device": shard[3],
    }


if __name__ == "__main__":
    models = {"llama": LLAMA, "gemma3": GEMMA}
    print(json.dumps({name: {n: serve(hf, n) for n in (1, 8)} for name, hf in models.items()}))
