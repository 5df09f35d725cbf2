"""A user's own model whose layers alternate attention and a gated linear recurrence, on a mesh of two devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.models.run_layers import run_layers
from jaxpage.models.served_model import Hidden, ServedModel
from jaxpage.ops.attention.paged import KVCache, StepContext, attend
from jaxpage.ops.recurrent import recur
from jaxpage.ops.state_spec import KVSpec, RecurrentSpec

VOCAB, WIDTH, HEADS, HEAD_DIM, LAYERS, LONGEST = 64, 32, 4, 8, 4, 512
Params = dict[str, Any]


def make_params(mesh: Mesh, *, attends: bool) -> Params:
    """Random ones, with heads and the output head's vocabulary over the mesh."""
    rng = np.random.default_rng(1)

    def put(*shape: int, axes: tuple[str | None, ...] = ()) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    def layer(index: int) -> Params:
        weights = {
            "qkv": put(WIDTH, 3, HEADS, HEAD_DIM, axes=(None, None, "model")),
            "out": put(HEADS, HEAD_DIM, WIDTH, axes=("model",)),
        }
        return weights | ({} if attends and index % 2 == 0 else {"gate": put(WIDTH, HEADS, axes=(None, "model"))})

    layers = [layer(index) for index in range(LAYERS)]
    return {"table": put(VOCAB, WIDTH), "layers": layers, "head": put(WIDTH, VOCAB, axes=(None, "model"))}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    return params["table"][tokens] * 4


def update(carry: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """One token of each row: the state, [rows, heads, head_dim, head_dim], fades by the gate and takes in k v^T."""
    q, k, v, gate = token
    carry = carry * gate[..., None, None] + jnp.einsum("rhd,rhe->rhde", k, v)
    return carry, jnp.einsum("rhd,rhde->rhe", q, carry)


def forward(params: Params, x: jax.Array, states: KVCache, step: StepContext) -> tuple[Hidden, KVCache]:
    def layer(weights: Params, x: jax.Array, states: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        state, *others = states
        if others:  # mixed with the token before, which is a state of its own
            before, last = recur(lambda carry, token: (token, carry), norm(x), others[0])
            q, k, v = jnp.einsum("te,ephd->pthd", norm(x) + before / 2, weights["qkv"])
            gate = jax.nn.sigmoid(3 + jnp.einsum("te,eh->th", norm(x), weights["gate"]))
            found, state = recur(update, (q, k, v, gate), state)
            others = [last]
        else:
            q, k, v = jnp.einsum("te,ephd->pthd", norm(x), weights["qkv"])
            found, state = attend(q, k, v, state, scale=HEAD_DIM**-0.5)
        return x + jnp.einsum("thd,hde->te", found, weights["out"]), (state, *others)

    outputs, states = run_layers(layer, params["layers"], x, states, step)
    return Hidden(norm(outputs[-1]), {}), states


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    return (hidden @ params["head"]).astype(jnp.float32)


def make(*, attends: bool = True) -> ServedModel:
    """What is served: `--model own_hybrid:make`."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    attention = KVSpec(HEADS, HEAD_DIM)
    recurrence = RecurrentSpec((HEADS, HEAD_DIM, HEAD_DIM), "float32", ("model", None, None))
    last = RecurrentSpec((WIDTH,), "float32", (None,))
    return ServedModel(
        name="hybrid",
        vocab_size=VOCAB,
        embed_size=WIDTH,
        max_model_len=LONGEST,
        states=((attention,) if attends else (recurrence, last), (recurrence, last)) * (LAYERS // 2),
        params=make_params(mesh, attends=attends),
        mesh=mesh,
        embed=embed,
        forward=forward,
        logits=logits,
        heads_axis="model",
        eos_token_ids=(0,),
    )


def make_recurrent() -> ServedModel:
    """The same without attention: what it keeps of a sequence does not grow."""
    return make(attends=False)
