"""Logits processors as a user writes them."""

import jax
import jax.numpy as jnp

from jaxpage.ops.sampling.processing import KnownTokens

ALWAYS = 65


def always(logits: jax.Array, known: KnownTokens) -> jax.Array:
    """One token, whatever the model says."""
    return jnp.full_like(logits, -jnp.inf).at[:, ALWAYS].set(0)


def last_again(logits: jax.Array, known: KnownTokens) -> jax.Array:
    """The last known token once more."""
    last = known.token_ids[jnp.arange(len(logits)), known.num_tokens - 1]
    return logits.at[jnp.arange(len(logits)), last].add(1e6)


def nowhere(logits: jax.Array, known: KnownTokens) -> jax.Array:
    """No number at all but for the tokens that are even."""
    return jnp.where(jnp.arange(logits.shape[1]) % 2 == 0, logits, jnp.nan)


def misshapen(logits: jax.Array, known: KnownTokens) -> jax.Array:
    return logits[:, :1]


def untraceable(logits: jax.Array, known: KnownTokens) -> jax.Array:
    return logits if float(logits[0, 0]) > 0 else -logits


NUMBER = 3
