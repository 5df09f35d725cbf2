"""An engine on a tiny checkpoint, in this process."""

from pathlib import Path

import tiny

from jaxpage.config import EngineConfig
from jaxpage.engine.core import EngineCore

MAX_STEP_TOKENS = 64


def open_engine(folder: Path, name: str, *, max_model_len: int, num_blocks: int, max_num_seqs: int) -> EngineCore:
    """The config `name` of `tiny.TINY`, whose steps compute at most 64 tokens. Whoever opens it must close it."""
    tiny.write_checkpoint(folder, tiny.TINY[name], tiny.make_weights(tiny.TINY[name]))
    return EngineCore(
        EngineConfig(
            model=str(folder),
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_STEP_TOKENS,
            background_compile=False,
            strict_shapes=True,
        )
    )
