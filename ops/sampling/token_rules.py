"""What a request says of single tokens, as one row of int32: packed by the host (numpy), read by the sampler (JAX)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

ANY_TOKEN = -1
"""Stands before a bad word that is shorter than the longest may be."""
UNUSED = 2**31 - 1
"""Where there is no token: an index out of every vocabulary."""


@dataclass(frozen=True)
class TokenRules:
    """The rules of some rows."""

    allowed: jax.Array  # [rows, vocab] bool, tokens that may be drawn
    bias_ids: jax.Array  # [rows, biases] int32, UNUSED where there is none
    bias: jax.Array  # [rows, biases] float32
    bad_words: jax.Array  # [rows, words, length] int32, ends aligned, UNUSED where there is none


@dataclass(frozen=True)
class RulesLayout:
    """What a packed row has room for."""

    vocab_size: int
    max_biases: int
    max_bad_words: int
    """Of several tokens; one of a single token is a token that is not allowed."""
    max_bad_word_tokens: int

    @property
    def size(self) -> int:
        """int32 values of a packed row."""
        return self._bad_words_start + self.max_bad_words * self.max_bad_word_tokens

    @property
    def _num_allowed_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def _bad_words_start(self) -> int:
        return self._num_allowed_words + 2 * self.max_biases

    def pack(
        self,
        allowed_token_ids: Sequence[int] | None,
        logit_bias: Mapping[int, float],
        bad_words: Sequence[Sequence[int]],
    ) -> np.ndarray:
        """One row, as [size] int32. None allows every token."""
        packed = np.full(self.size, UNUSED, np.int32)
        allowed = np.zeros(self._num_allowed_words * 32, np.uint8)
        allowed[slice(self.vocab_size) if allowed_token_ids is None else list(allowed_token_ids)] = 1
        allowed[[word[0] for word in bad_words if len(word) == 1]] = 0
        packed[: self._num_allowed_words] = np.packbits(allowed, bitorder="little").view("<i4")
        bias_ids, bias = packed[self._num_allowed_words : self._bad_words_start].reshape(2, -1)
        bias_ids[: len(logit_bias)] = list(logit_bias)
        bias[: len(logit_bias)] = np.array(list(logit_bias.values()), np.float32).view(np.int32)
        words = packed[self._bad_words_start :].reshape(self.max_bad_words, self.max_bad_word_tokens)
        for index, word in enumerate(word for word in bad_words if len(word) > 1):
            words[index, : -len(word)] = ANY_TOKEN
            words[index, -len(word) :] = word
        return packed

    def unpack(self, packed: jax.Array) -> TokenRules:
        """The inverse of `pack` for several rows, [rows, size] int32, in a compiled program."""
        rows = packed.shape[0]
        words = packed[:, : self._num_allowed_words]
        allowed = (words[:, :, None] >> jnp.arange(32)) & 1
        biases = packed[:, self._num_allowed_words : self._bad_words_start].reshape(rows, 2, -1)
        return TokenRules(
            allowed=allowed.reshape(rows, -1)[:, : self.vocab_size].astype(bool),
            bias_ids=biases[:, 0],
            bias=jax.lax.bitcast_convert_type(biases[:, 1], jnp.float32),
            bad_words=packed[:, self._bad_words_start :].reshape(rows, self.max_bad_words, self.max_bad_word_tokens),
        )
