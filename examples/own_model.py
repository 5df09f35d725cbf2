"""A user's own model, as a JAX shop has one: plain functions, parameters of its own making, a mesh of its own."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpage.models.run_layers import run_layers
from jaxpage.models.served_model import Hidden, ServedModel
from jaxpage.ops.attention.paged import KVCache, StepContext, attend
from jaxpage.ops.rope import RopeConfig, rope_cos_sin
from jaxpage.ops.state_spec import KVSpec

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, LONGEST = 64, 32, 4, 2, 8, 2, 512
GAIN = 4.0
ROPE = RopeConfig(kind="default", theta=1e4, rotary_dim=HEAD_DIM, max_position=LONGEST, original_max_position=LONGEST)
Params = dict[str, Any]


def make_params(mesh: Mesh) -> Params:
    """Random ones, with heads and the output head's vocabulary over the mesh."""
    rng = np.random.default_rng(0)

    def put(*shape: int, axes: tuple[str | None, ...] = ()) -> jax.Array:
        values = rng.normal(size=shape).astype(np.float32) / np.sqrt(shape[0])
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes)))

    layers = [
        {
            "q": put(WIDTH, HEADS, HEAD_DIM, axes=(None, "model")),
            "kv": put(WIDTH, 2, KV_HEADS, HEAD_DIM, axes=(None, None, "model")),
            "out": put(HEADS, HEAD_DIM, WIDTH, axes=("model",)),
            "up": put(WIDTH, 4 * WIDTH, axes=(None, "model")),
            "down": put(4 * WIDTH, WIDTH, axes=("model",)),
        }
        for _ in range(LAYERS)
    ]
    return {"table": put(VOCAB, WIDTH), "layers": layers, "head": put(WIDTH, VOCAB, axes=(None, "model"))}


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    return params["table"][tokens] * GAIN


def forward(params: Params, x: jax.Array, states: KVCache, step: StepContext) -> tuple[Hidden, KVCache]:
    rope = rope_cos_sin(step.positions, step.rope_lengths, ROPE)

    def layer(weights: Params, x: jax.Array, states: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        (kv,) = states
        q = jnp.einsum("te,ehd->thd", norm(x), weights["q"])
        k, v = jnp.einsum("te,exgd->xtgd", norm(x), weights["kv"])
        attended, kv = attend(q, k, v, kv, rope=rope, scale=HEAD_DIM**-0.5)
        x = x + jnp.einsum("thd,hde->te", attended, weights["out"])
        return x + jax.nn.gelu(norm(x) @ weights["up"]) @ weights["down"], (kv,)

    outputs, states = run_layers(layer, params["layers"], x, states, step)
    return Hidden(norm(outputs[-1]), {"layer_0": outputs[0]}), states


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    return (hidden @ params["head"]).astype(jnp.float32)


def make(num_devices: int = 2) -> ServedModel:
    """What is served: `--model own_model:make`."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
    return ServedModel(
        name="own",
        vocab_size=VOCAB,
        embed_size=WIDTH,
        max_model_len=LONGEST,
        states=((KVSpec(KV_HEADS, HEAD_DIM, num_heads=HEADS),),) * LAYERS,
        params=make_params(mesh),
        mesh=mesh,
        embed=embed,
        forward=forward,
        logits=logits,
        heads_axis="model",
        eos_token_ids=(0,),
    )


make_alone = partial(make, 1)
