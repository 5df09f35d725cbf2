"""Serves the same requests by engines on one device and on several, and prints what each gives, as JSON.

A process of its own, with JAX_NUM_CPU_DEVICES=8: how many devices a CPU has is settled when JAX starts.
PYTHONPATH must hold `tests` and `tests/golden`. Arguments: a folder for checkpoints, and the models to serve.
"""

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tiny
from conftest import ascii_tokenizer

from jaxpage import LLM, SamplingParams
from jaxpage.errors import ConfigError, EngineDeadError
from jaxpage.ops.sampling.sampling import exponential_noise
from jaxpage.outputs import CompletionOutput, RequestOutput

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"num_key_value_heads": 1, "vocab_size": 130},
    "gemma3": {
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
    },
}
"""What makes a tiny model, of 8 heads, one for several devices."""
PROMPT_LENS = (21, 9, 30, 4)


def requests(vocab_size: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded ones, more than the pool holds at once; the last forks."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, vocab_size, length).tolist() for length in PROMPT_LENS]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": -1}
    return [
        (prompts[0], SamplingParams(temperature=0, **common)),
        (prompts[1], SamplingParams(temperature=1, seed=5, **common)),
        (prompts[2], SamplingParams(temperature=0, **common)),
        (prompts[3], SamplingParams(temperature=0.8, seed=-7, n=3, **common)),
    ]


def margin(prompt: list[int], sequence: CompletionOutput, params: SamplingParams, index: int) -> float:
    """By how much the drawn tokens won at least, as a difference of logits."""
    seed = ((params.seed or 0) + index) & (2**64 - 1)
    seeds = jnp.array([[seed >> 32, seed & (2**32 - 1)]], jnp.uint32)
    gaps = []
    for count, (token, logprobs) in enumerate(zip(sequence.token_ids, sequence.logprobs or [], strict=True)):
        scores = np.array([logprobs[token_id].logprob for token_id in range(len(logprobs))])
        if params.temperature:
            noise = exponential_noise(seeds, jnp.array([len(prompt) + count]), len(scores))
            scores -= params.temperature * np.log(np.asarray(noise)[0])
        gaps.append(scores[token] - np.delete(scores, token).max())
    return float(min(gaps))


def generate(llm: LLM) -> list[RequestOutput]:
    prompts, params = zip(*requests(llm.tokenizer.vocab_size), strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def generated(llm: LLM) -> tuple[dict[str, Any], list[RequestOutput]]:
    """What is compared, and the first of two runs of it."""
    first, again = generate(llm), generate(llm)
    return {
        "tokens": [[sequence.token_ids for sequence in output.outputs] for output in first],
        "tokens again": [[sequence.token_ids for sequence in output.outputs] for output in again],
        "logprobs": [sequence.cumulative_logprob for output in first for sequence in output.outputs],
        "num_cached_tokens": sum(output.num_cached_tokens for output in again),
        "num_preemptions": llm.stats["num_preemptions"],
    }, first


def serve(options: dict[str, Any], num_devices: int, with_margins: bool) -> dict[str, Any]:
    with LLM(**options, tensor_parallel_size=num_devices, multiprocess=False) as llm:
        found, first = generated(llm)
        found["kv_heads_on_a_device"] = kv_heads_on_a_device(llm)
        if with_margins:
            found["margin"] = min(
                margin(output.prompt_token_ids, sequence, wanted, index)
                for output, (_, wanted) in zip(first, requests(llm.tokenizer.vocab_size), strict=True)
                for index, sequence in enumerate(output.outputs)
            )
        return found


def kv_heads_on_a_device(llm: LLM) -> int:
    batch = llm._engine._core.runner._batch  # type: ignore[union-attr]
    return int(batch["kv_cache"].buffers[0].addressable_shards[0].data.shape[3])


def serve_in_two_processes(options: dict[str, Any]) -> dict[str, Any]:
    """A device in each. In the end the follower is killed: what the leader then raises is "error"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = options | {"tensor_parallel_size": 2, "num_processes": 2, "coordinator_address": address}
    flags = [
        f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
        + (f"={value}" if type(value) is not bool else "")
        for name, value in options.items()
    ]
    follower = subprocess.Popen([sys.executable, "-m", "jaxpage", "serve", *flags, "--process-id=1"])
    try:
        with LLM(**options) as llm:
            found, _ = generated(llm)
            follower.kill()
            try:
                generate(llm)
            except EngineDeadError as error:
                found["error"] = str(error)
    finally:
        follower.kill()
        follower.wait()
    return found


def refusal(options: dict[str, Any], num_devices: int) -> str:
    try:
        LLM(**options, tensor_parallel_size=num_devices, multiprocess=False)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{num_devices} devices were not refused")


def main(root: Path, names: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    served: dict[str, Any] = {}
    for name in names:
        config = tiny.TINY[name] | {"num_attention_heads": 8} | MODELS[name]
        tiny.write_checkpoint(root / name, config, tiny.make_weights(config))
        ascii_tokenizer().save(str(root / name / "tokenizer.json"))
        options = {
            "model": str(root / name),
            "compile_cache_dir": str(root / "programs"),
            "background_compile": False,
            "strict_shapes": True,
            "max_model_len": 56,
            "block_size": 4,
            "num_blocks": 200 if name == "gemma3" else 36,  # it has several KV groups
            "max_num_seqs": 4,
            "max_num_batched_tokens": 16,
        }
        several = serve_in_two_processes(options) if name == "llama" else serve(options, 8, with_margins=False)
        served[name] = {"one": serve(options, 1, with_margins=True), "several": several}
    refused = {size: refusal(options, size) for size in (3, 16)}
    print(json.dumps({"served": served, "refused": refused}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
