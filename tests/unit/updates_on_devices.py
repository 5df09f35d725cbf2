"""Weights that change in an engine of two devices, from arrays on eight; prints what came of it, as JSON.

A process of its own, with JAX_NUM_CPU_DEVICES=8. Argument: a folder of compiled programs.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from own_model import make, make_params

from jaxpage import LLM, RequestError, RequestOutput, SamplingParams
from jaxpage.runner.compile_watch import num_compiles
from jaxpage.runner.weights.assign import Assign

PROMPT = [5, 9, 2, 41, 7] * 8
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TRAINER = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


def at_the_trainer(params: Any, scale: float) -> Any:
    """The same weights but for their size, divided as a trainer would."""

    def place(array: jax.Array) -> jax.Array:
        axes = ("fsdp" if array.shape[0] % 4 == 0 else None, "tp" if array.shape[-1] % 2 == 0 else None)
        spec = PartitionSpec(axes[0], *[None] * (array.ndim - 2), axes[1])
        return jax.device_put(np.asarray(array) * np.float32(scale), NamedSharding(TRAINER, spec))

    return jax.tree.map(place, params)


def llm_of(**options: Any) -> LLM:
    settings = {
        "tokenizer": "smollm2-135m",
        "max_model_len": 128,
        "num_blocks": 80,
        "block_size": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "background_compile": False,
        "compile_cache_dir": sys.argv[1],
    }
    return LLM(make(2), multiprocess=False, **{**settings, **options})


def answer(llm: LLM, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> RequestOutput:
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != name}


def refusals(llm: LLM, new: Any) -> dict[str, str]:
    """What is said of weights that are wrong in one place."""
    deleted = jnp.zeros(new["table"].shape)
    deleted.delete()
    wrong = {
        "missing": without(new, "head"),
        "extra": new | {"tail": new["head"]},
        "shape": new | {"head": new["head"].T},
        "kind": new | {"head": new["head"].astype(jnp.int32)},
        "nan": new
        | {"layers": [new["layers"][0], new["layers"][1] | {"up": new["layers"][1]["up"].at[3, 4].set(jnp.nan)}]},
        "host": new | {"head": np.asarray(new["head"])},
        "deleted": new | {"table": deleted},
    }
    found = {}
    for name, params in wrong.items():
        try:
            llm.update_params(params)
        except RequestError as error:
            found[name] = str(error)
    return found


def while_it_streams(llm: LLM, news: list[Any], running: str, before: int) -> list[RequestOutput]:
    """A request's outputs; the weights change behind each from the given one on, as long as there are others."""
    outputs, news = [], list(news)
    for output in llm.stream(PROMPT, GREEDY):
        outputs.append(output)
        if len(outputs) >= before and news:
            llm.update_params(news.pop(0), running=running)
    return outputs


def in_chunks() -> dict[str, Any]:
    """What a copy to other devices takes, for each way that both arrays may be divided."""
    sizes: list[int] = []
    put = jax.device_put

    def noted(array: jax.Array, device: Any) -> jax.Array:
        sizes.append(array.nbytes)
        return put(array, device)

    mesh, rng = make(2).mesh, np.random.default_rng(0)
    values = rng.normal(size=(96, 64)).astype(np.float32)
    right = []
    for spec in (PartitionSpec("fsdp", "tp"), PartitionSpec(None, ("tp", "fsdp")), PartitionSpec()):
        new = put(values, NamedSharding(TRAINER, spec))
        for target in (PartitionSpec("model"), PartitionSpec(None, "model"), PartitionSpec()):
            old = put(jnp.zeros(values.shape, jnp.bfloat16), NamedSharding(mesh, target))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(jax, "device_put", noted)
                copied = Assign(2048).copy(old, new)
            is_right = np.array_equal(np.asarray(copied), values.astype(jnp.bfloat16))
            right.append(is_right and copied.sharding == old.sharding and old.is_deleted())
    return {"right": right, "most_bytes": max(sizes), "num_copies": len(sizes)}


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = make_params(make(2).mesh)
    two, three = at_the_trainer(plain, 2.0), at_the_trainer(plain, 3.0)
    with llm_of() as llm:
        found["old"] = tokens(answer(llm))
        found["refused"] = refusals(llm, two)
        found["old_again"] = tokens(answer(llm))
        with jax.transfer_guard("disallow_explicit"):
            found["version"] = llm.update_params(two)
        output = answer(llm)
        found["two"], found["cached"] = tokens(output), output.num_cached_tokens
        found["versions"] = output.outputs[0].weight_versions
        llm.update_params(three, version=70)
        found["three"], found["versions_of_three"] = tokens(answer(llm)), answer(llm).outputs[0].weight_versions
        before = num_compiles()
        (kept,) = while_it_streams(llm, [two, three] * 50, "keep", 1)[-1].outputs
        found["kept"] = [kept.finish_reason, len(kept.token_ids), kept.weight_versions]
        for number in range(100):
            llm.update_params((two, three)[number % 2])
        found["three_again"] = tokens(answer(llm))
        found["num_compiles"] = num_compiles() - before
        # What a kept request computes under two sets of weights is nobody else's.
        while_it_streams(llm, [two], "keep", 3)
        output = answer(llm)
        found["behind_a_kept"] = [tokens(output), output.num_cached_tokens]
        *_, again = while_it_streams(llm, [three], "recompute", 3)
        num_old = again.outputs[0].weight_versions.count(min(again.outputs[0].weight_versions))
        known, others = tokens(again)[:num_old], tokens(again)[num_old:]
        found["recomputed"] = others == tokens(answer(llm, [*PROMPT, *known]))[: len(others)] and len(others) > 10
        aborted = while_it_streams(llm, [two], "abort", 3)[-1].outputs[0]
        found["aborted"] = [aborted.finish_reason, tokens(answer(llm)) == found["two"]]
        llm._engine._core.sleep(True)  # type: ignore[union-attr]
        llm._engine._core.wake_up()  # type: ignore[union-attr]
        llm.update_params(three)
        found["behind_sleep"] = tokens(answer(llm))
    found["chunks"] = in_chunks()
    found["alive"] = not any(leaf.is_deleted() for leaf in jax.tree.leaves((two, three)))
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
