"""What step programs depend on besides their shapes."""

from dataclasses import dataclass

from jaxpage.models.families.hf_config import ModelConfig
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.logits_processors import OwnProcessor
from jaxpage.speculative.config import SpeculativeConfig


@dataclass(frozen=True)
class ProgramConfig:
    """The same for all programs of an engine."""

    model: ModelConfig
    num_logprobs: int
    """Most alternatives that a row may ask for."""
    processors: tuple[OwnProcessor, ...] = ()
    """The user's own logits processors, in the order of their bits in `BatchState.own_processors`."""
    speculative: SpeculativeConfig | None = None
    """How drafts are proposed; None in an engine that does not speculate."""

    def num_logits(self, bucket: Bucket) -> int:
        """Most tokens that a step draws."""
        return bucket.num_rows * self.num_draws(bucket)

    def num_draws(self, bucket: Bucket) -> int:
        """Most tokens that a row draws in a step: one, and one behind each of its drafts."""
        if self.speculative is None or bucket.max_query_len == 1:
            return 1
        return min(1 + self.speculative.num_speculative_tokens, bucket.max_query_len)
