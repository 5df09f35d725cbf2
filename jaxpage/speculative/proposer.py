"""What guesses at the next tokens of rows: one protocol for whatever looks at tokens, or at the model as well."""

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxpage.ops.attention.paged import KVCache


@dataclass(frozen=True)
class Rows:
    """Rows whose next tokens are guessed at."""

    token_ids: jax.Array  # [batch rows, max_model_len] int32, of all rows
    rows: jax.Array  # [rows] int32, those that are meant
    num_tokens: jax.Array  # [rows] int32, known tokens; 0 where no drafts are wanted
    seed: jax.Array  # [rows, 2] uint32, each request's
    branch_free: bool
    """Whether there must be no loop of unknown length: at each of its turns, a GPU's host would wait for the device."""


class Proposer(Protocol):
    """Traced inside a program, so that it is made of JAX's operations. Drafts never change an answer: only how fast."""

    key: str
    """All that it depends on: programs are kept under it."""
    max_drafts: int
    """Most drafts behind a row's tokens."""
    reads_model: bool
    """Whether it reads weights, KV cache and hidden states, in a program of its own behind the draws. Else it is part
    of theirs, and these are None."""
    extras: tuple[str, ...]
    """Hidden states that it reads besides the last ones: see `models.served_model.Hidden`."""

    def propose(
        self, rows: Rows, params: Any, kv_cache: KVCache | None, hidden: dict[str, jax.Array] | None
    ) -> tuple[jax.Array, jax.Array]:
        """Drafts of each row, [rows, max_drafts] int32, and how many of them there are, [rows] int32.

        hidden: "last" and the extras of the last step's tokens, [most tokens of a step, ...] each.
        """
