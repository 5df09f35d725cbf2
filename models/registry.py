"""Architecture name -> model module; the contract that a model module fulfils."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from jaxpage.models.checkpoints.checkpoint import Checkpoint
from jaxpage.models.families import gemma, llama
from jaxpage.models.families.hf_config import ModelConfig, UnsupportedModelError
from jaxpage.models.weights import Params
from jaxpage.ops.attention.paged import AttentionMetadata, KVCache
from jaxpage.ops.kv_spec import KVSpec

logger = logging.getLogger(__name__)


class Model(Protocol):
    """Pure functions over a params pytree; see `models.llama` for shapes."""

    def config_from_hf(self, hf: Mapping[str, Any]) -> ModelConfig: ...
    def param_specs(self, cfg: ModelConfig) -> Params: ...
    def kv_specs(self, cfg: ModelConfig) -> Sequence[KVSpec]: ...
    def forward(
        self,
        params: Params,
        tokens: jax.Array,
        positions: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        cfg: ModelConfig,
    ) -> tuple[jax.Array, KVCache]: ...
    def logits(self, params: Params, hidden: jax.Array, cfg: ModelConfig) -> jax.Array: ...


_ARCHITECTURES = {
    cast(Model, llama): ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    cast(Model, gemma): ("Gemma2ForCausalLM", "Gemma3ForCausalLM"),
}
MODELS: dict[str, Model] = {name: model for model, names in _ARCHITECTURES.items() for name in names}


def model_for(architecture: str) -> Model:
    """The module that implements `architecture`. Raises `UnsupportedModelError` naming it and the known ones."""
    if architecture not in MODELS:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported: jaxpage has {', '.join(MODELS)}")
    return MODELS[architecture]


def resolve_model(checkpoint: Checkpoint) -> tuple[Model, ModelConfig]:
    """Pick the module and read the config of a checkpoint, settling which output head it has.

    Raises `UnsupportedModelError` naming what jaxpage does not implement.
    """
    architectures = checkpoint.config.get("architectures") or []
    if not architectures:
        raise UnsupportedModelError(f'{checkpoint.path}: the config names no architecture ("architectures")')
    model = model_for(architectures[0])
    return model, _settle_output_head(model.config_from_hf(checkpoint.config), checkpoint)


def _settle_output_head(cfg: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """A config's word on tied embeddings against what the checkpoint holds; the tensors win, with a warning."""
    has_head = "lm_head.weight" in set(checkpoint.names())
    if has_head and cfg.tie_word_embeddings:
        shape = (cfg.vocab_size, cfg.hidden_size)
        embed = checkpoint.read("model.embed_tokens.weight", shape)
        if not np.array_equal(checkpoint.read("lm_head.weight", shape), embed):
            logger.warning(
                "%s says tie_word_embeddings but holds a different lm_head.weight: using lm_head.weight",
                checkpoint.path,
            )
            return dataclasses.replace(cfg, tie_word_embeddings=False)
    elif not has_head and not cfg.tie_word_embeddings:
        logger.warning("%s holds no lm_head.weight: using the embeddings as output head", checkpoint.path)
        return dataclasses.replace(cfg, tie_word_embeddings=True)
    return cfg
