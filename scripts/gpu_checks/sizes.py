"""How much is measured: on a card, or where numbers mean nothing."""

from dataclasses import dataclass
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
TINY = LLAMA_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Sizes:
    """Of all parts."""

    model: dict[str, Any]
    """What synthetic engines serve."""
    batches: dict[int, int]
    """Rows of an engine's decode, and the prompt tokens of each."""
    num_steps: int
    """Decode steps that are timed."""
    token_budget: int
    copy_bytes: int
    product: int
    """Rows and columns of the matrices whose product gives the peak."""
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]
    """Query heads per KV head."""
    long_context: int
    """Of the longest row in checks of attention: long enough to be split."""
    heads: tuple[int, int, int]
    """Of attention that is timed: query heads, KV heads, their size."""
    decode_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    pool_blocks: int
    """Most blocks of the KV that is attended to."""
    product_rows: tuple[int, ...]
    most_inside: int
    """Runs of a kernel within one program, at most."""
    seconds_per_case: float
    """Of timing one kernel, about."""
    num_prompts: int
    """Real prompts whose tokens are compared."""
    real_batches: dict[int, int]
    """Rows of the engine that serves them, and tokens of a step."""

    @property
    def max_model_len(self) -> int:
        return max(self.contexts)

    @property
    def context(self) -> int:
        return max(self.batches.values())


CARD = Sizes(
    model=LLAMA_8B,
    batches={1: 1024, 32: 1024, 256: 512},
    num_steps=48,
    token_budget=2048,
    copy_bytes=2**31,
    product=8192,
    head_dims=(64, 128, 256),
    groups=(1, 4, 7, 8),
    long_context=3000,
    heads=(32, 8, 128),
    decode_rows=(1, 8, 32, 256),
    contexts=(1024, 8192, 32768, 131072),
    pool_blocks=2**19,
    product_rows=(1, 32, 256, 2048),
    most_inside=64,
    seconds_per_case=0.2,
    num_prompts=20,
    real_batches={4: 512, 32: 512},
)
SMALL = Sizes(
    model=TINY,
    batches={1: 24, 2: 24},
    num_steps=4,
    token_budget=16,
    copy_bytes=2**20,
    product=128,
    head_dims=(16,),
    groups=(2,),
    long_context=80,
    heads=(4, 2, 16),
    decode_rows=(2,),
    contexts=(64,),
    pool_blocks=64,
    product_rows=(2,),
    most_inside=2,
    seconds_per_case=0.0,
    num_prompts=2,
    real_batches={2: 16},
)
SIZES = {"card": CARD, "small": SMALL}
