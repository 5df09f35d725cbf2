"""The whole sampling pipeline in plain numpy float64, a row at a time, and rows of options as the device holds them.

A row is a dict of `SamplingParams`' options besides what the request is at: `prompt` and `output` token ids, its
`bad_words` as token sequences, its `stop_token_ids`, and `logits`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpage.ops.sampling.processing import LAST_RESORT, ProcessingState
from jaxpage.ops.sampling.sampling import SamplingState, exponential_noise
from jaxpage.runner.state import rules_layout

NUM_STOPS = 4
MAX_MODEL_LEN = 40
"""Room for prompt and output."""
_UNUSED = 2**31 - 1
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": (),
    "min_tokens": 0,
    "stop_token_ids": (),
    "prompt": (3, 4, 5),
    "output": (),
    "mask": None,  # the tokens that a grammar lets follow
    "position": None,  # of the draw, where it is not behind prompt and output
}
_PENALTIES = ("repetition", "presence", "frequency")
_RULES = ("allowed_token_ids", "logit_bias", "bad_words")
Row = dict[str, Any]


def full(row: Row) -> Row:
    """A row with all options; what it leaves out is off."""
    assert not row.keys() - _DEFAULTS.keys(), row.keys() - _DEFAULTS.keys()
    return _DEFAULTS | row


def reference_process(logits: np.ndarray, row: Row) -> np.ndarray:
    """What the options make of one row of logits, [vocab] float64."""
    row = full(row)
    found = logits.astype(np.float64)
    prompt, output = list(row["prompt"]), list(row["output"])
    if row["allowed_token_ids"] is not None:
        found[[token for token in range(len(found)) if token not in row["allowed_token_ids"]]] = -np.inf
    for token, bias in row["logit_bias"].items():
        found[token] += bias
    for token in {*prompt, *output}:
        found[token] *= 1 / row["repetition_penalty"] if found[token] > 0 else row["repetition_penalty"]
    for token in set(output):
        found[token] -= row["frequency_penalty"] * output.count(token) + row["presence_penalty"]
    if len(output) < row["min_tokens"]:
        stops = list(row["stop_token_ids"])
        found[stops] = np.minimum(found[stops], LAST_RESORT)
    for *beginning, last in row["bad_words"]:
        if output[len(output) - len(beginning) :] == beginning:
            found[last] = min(found[last], LAST_RESORT if beginning else -np.inf)
    if row["mask"] is not None:
        within = np.isin(np.arange(len(found)), row["mask"])
        found = np.where(within, np.maximum(found, LAST_RESORT), -np.inf)
    return found


def reference_support(processed: np.ndarray, row: Row, slack: float = 0.0) -> np.ndarray:
    """Tokens that temperature, min-p, top-k and top-p leave, as [vocab] bool; ties with the last one stay.

    `slack` loosens the two thresholds of probability, which float32 cannot meet exactly; below 0 it tightens them.
    """
    row = full(row)
    if row["temperature"] == 0:
        return np.asarray(np.arange(len(processed)) == processed.argmax())
    probabilities = np.exp((processed - processed.max()) / row["temperature"])
    probabilities[probabilities < min(row["min_p"] * (1 - slack), 1)] = 0  # the most probable one is 1 exactly
    ordered = np.sort(probabilities)[::-1]
    if 0 < row["top_k"] < len(ordered):
        probabilities[probabilities < ordered[row["top_k"] - 1]] = 0
    probabilities /= probabilities.sum()
    ordered = np.sort(probabilities)[::-1]
    if row["top_p"] < 1:
        enough = int(np.argmax(np.cumsum(ordered) >= min(row["top_p"] + slack, 1 - 1e-12)))
        probabilities[probabilities < ordered[enough]] = 0
    return np.asarray(probabilities > 0)


def reference_scores(logits: np.ndarray, row: Row) -> np.ndarray:
    """[vocab] float64, of which the largest is drawn: who is early in the race that the row's noise decides."""
    row = full(row)
    processed = reference_process(logits, row)
    if row["temperature"] == 0:
        return processed
    kept = np.where(reference_support(processed, row), processed, -np.inf)
    states, _ = device_states([row], len(logits))
    noise = np.asarray(exponential_noise(states.seed, states.position, len(logits)))[0].astype(np.float64)
    return np.asarray((kept - kept.max()) / row["temperature"] - np.log(noise))


def reference_logprobs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of the raw distribution, [..., vocab] float64."""
    exact = logits.astype(np.float64)
    return np.asarray(exact - np.logaddexp.reduce(exact, axis=-1, keepdims=True))


def device_states(rows: Sequence[Row], vocab_size: int) -> tuple[SamplingState, ProcessingState]:
    """The same rows as the sampler takes them; every row of the batch is one of the step, in reverse order."""
    filled = [full(row) for row in rows]

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.array([row[name] for row in filled], dtype)

    seeds = [row["seed"] & (2**64 - 1) for row in filled]
    lengths = jnp.array([len(row["prompt"]) + len(row["output"]) for row in filled], jnp.int32)
    token_ids = np.random.default_rng(0).integers(vocab_size, size=(len(rows), MAX_MODEL_LEN))  # left-overs
    for known, row in zip(token_ids, filled, strict=True):
        known[: len(row["prompt"]) + len(row["output"])] = [*row["prompt"], *row["output"]]
    stops = [[*row["stop_token_ids"], *[_UNUSED] * (NUM_STOPS - len(row["stop_token_ids"]))] for row in filled]
    layout = rules_layout(vocab_size)
    has_rules = [any(row[name] != _DEFAULTS[name] for name in _RULES) for row in filled]
    packed = [
        layout.pack(*(row[name] for name in _RULES)) if has else None
        for row, has in zip(filled, has_rules, strict=True)
    ]
    left_over = next((rules for rules in packed if rules is not None), np.zeros(layout.size, np.int32))
    rules = np.stack([left_over if own is None else own for own in packed])
    sampling = SamplingState(
        **{name: column(name, jnp.float32) for name in ("temperature", "top_p", "min_p")},
        top_k=jnp.array([min(max(row["top_k"], 0), _UNUSED) for row in filled], jnp.int32),
        seed=jnp.array([[seed >> 32, seed & (2**32 - 1)] for seed in seeds], jnp.uint32),
        position=jnp.array(
            [len(row["prompt"]) + len(row["output"]) if row["position"] is None else row["position"] for row in filled],
            jnp.int32,
        ),
    )
    processing = ProcessingState(
        rows=jnp.arange(len(rows))[::-1],
        num_prompt_tokens=jnp.array([len(row["prompt"]) for row in filled], jnp.int32),
        num_tokens=lengths,
        min_tokens=column("min_tokens", jnp.int32),
        stop_token_ids=jnp.array(stops, jnp.int32),
        **{f"{name}_penalty": column(f"{name}_penalty", jnp.float32) for name in _PENALTIES},
        has_rules=jnp.array(has_rules),
        token_ids=jnp.asarray(token_ids[::-1], jnp.int32),
        rules=jnp.asarray(rules[::-1]),
        own=jnp.zeros(len(rows), jnp.int32),
        layout=layout,
        processors=(),
    )
    return sampling, processing
