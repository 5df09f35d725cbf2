"""Model families by architecture, and how one becomes the `ServedModel` of a checkpoint."""

import dataclasses
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol, cast

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpage.errors import ModelLoadError
from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.checkpoints.open import FORMATS
from jaxpage.models.checkpoints.packaged import PACKAGED_NAMES
from jaxpage.models.families import gemma, llama
from jaxpage.models.families.hf_config import ModelConfig, UnsupportedModelError
from jaxpage.models.families.parallel import divide_model
from jaxpage.models.served_model import Hidden, ServedModel
from jaxpage.models.weights import MESH_AXES, Params, load_params, param_shapes
from jaxpage.ops.attention.paged import HEADS_AXIS, KVCache, StepContext
from jaxpage.ops.state_spec import KVSpec

logger = logging.getLogger(__name__)

_COMPARED_ROWS = 1024


class Family(Protocol):
    """Pure functions over a params pytree; see `families.llama` for shapes."""

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...
    def param_specs(self, cfg: ModelConfig) -> Params: ...
    def kv_specs(self, cfg: ModelConfig) -> tuple[tuple[KVSpec, ...], ...]: ...
    def embed(self, params: Params, tokens: jax.Array, cfg: ModelConfig) -> jax.Array: ...
    def forward(
        self, params: Params, x: jax.Array, states: KVCache, step: StepContext, cfg: ModelConfig
    ) -> tuple[Hidden, KVCache]: ...
    def logits(self, params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array: ...


_ARCHITECTURES = {
    cast(Family, llama): ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    cast(Family, gemma): ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
}
FAMILIES: dict[str, Family] = {name: family for family, names in _ARCHITECTURES.items() for name in names}


def serve_checkpoint(
    checkpoint: Checkpoint, mesh: Mesh, dtype: np.dtype[Any], *, axis: str = HEADS_AXIS
) -> ServedModel:
    """The model of a checkpoint on the devices of a mesh, whose weights are read when they are asked for.

    dtype: of weights and activations. axis: what divides heads, MLPs and vocabulary. Raises `ModelLoadError` naming
    what the checkpoint lacks or jaxpage does not implement, and `ConfigError` where the devices do not divide it.
    """
    try:
        family, cfg = resolve_family(checkpoint)
    except UnsupportedModelError as error:
        raise ModelLoadError(f"{checkpoint.path}: {error}") from error
    cfg = divide_model(cfg, mesh.shape[axis])
    specs = family.param_specs(cfg)
    mesh_axes = {name: None if over is None else axis for name, over in MESH_AXES.items()}
    return ServedModel(
        name=str(checkpoint.path),
        key=f"{cfg} {dtype}",
        vocab_size=cfg.vocab_size,
        embed_size=cfg.hidden_size,
        max_model_len=cfg.max_position_embeddings,
        states=family.kv_specs(cfg),
        params=partial(load_params, specs, checkpoint, dtype, mesh, mesh_axes),
        param_shapes=param_shapes(specs, dtype, mesh, mesh_axes),
        mesh=mesh,
        embed=partial(family.embed, cfg=cfg),
        forward=partial(family.forward, cfg=cfg),
        logits=partial(family.logits, cfg=cfg),
        dtype=dtype,
        heads_axis=axis,
        eos_token_ids=tuple(eos_token_ids(checkpoint.generation_config, checkpoint.config)),
        config=cfg,
    )


def list_models() -> dict[str, Any]:
    """What can be served: architectures by family, formats of checkpoints, packaged models, and a user's own."""
    families: dict[str, list[str]] = {}
    for architecture, family in FAMILIES.items():
        families.setdefault(str(getattr(family, "__name__", family)).rpartition(".")[2], []).append(architecture)
    return {
        "families": families,
        "formats": FORMATS,
        "packaged": list(PACKAGED_NAMES),
        "own": "package.module:function, which gives a jaxpage.models.served_model.ServedModel",
    }


def eos_token_ids(generation_config: Mapping[str, object], config: Mapping[str, object]) -> list[int]:
    """The model's end-of-sequence ids: generation_config's word first, then config's; one id or a list."""
    for source in (generation_config, config):
        match source.get("eos_token_id"):
            case int() as token_id:
                return [token_id]
            case list() as token_ids:
                return [int(token_id) for token_id in token_ids]
    return []


def resolve_family(checkpoint: Checkpoint) -> tuple[Family, ModelConfig]:
    """Pick the family and read the config of a checkpoint, settling which output head it has.

    Raises `UnsupportedModelError` naming what jaxpage does not implement.
    """
    architectures = checkpoint.config.get("architectures") or []
    if not architectures:
        raise UnsupportedModelError(f'{checkpoint.path}: the config names no architecture ("architectures")')
    if architectures[0] not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {architectures[0]!r} is not supported: jaxpage has {', '.join(FAMILIES)}"
        )
    family = FAMILIES[architectures[0]]
    return family, _settle_output_head(family.config_from_hf(checkpoint.config), checkpoint)


def _settle_output_head(cfg: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """A config's word on tied embeddings against what the checkpoint holds; the tensors win, with a warning."""
    has_head = "lm_head.weight" in set(checkpoint.names())
    if has_head and cfg.tie_word_embeddings:
        if not _are_equal(checkpoint, ("model.embed_tokens.weight", "lm_head.weight"), cfg):
            logger.warning(
                "%s says tie_word_embeddings but holds a different lm_head.weight: using lm_head.weight",
                checkpoint.path,
            )
            return dataclasses.replace(cfg, tie_word_embeddings=False)
    elif not has_head and not cfg.tie_word_embeddings:
        logger.warning("%s holds no lm_head.weight: using the embeddings as output head", checkpoint.path)
        return dataclasses.replace(cfg, tie_word_embeddings=True)
    return cfg


def _are_equal(checkpoint: Checkpoint, names: tuple[str, str], cfg: ModelConfig) -> bool:
    """Whether two tensors of the size of the embeddings hold the same, read a few rows at a time."""
    shape = (cfg.vocab_size, cfg.hidden_size)
    for start in range(0, cfg.vocab_size, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, cfg.vocab_size)), slice(0, cfg.hidden_size))
        one, other = (checkpoint.read(name, shape, rows) for name in names)
        if not np.array_equal(one, other):
            return False
    return True
