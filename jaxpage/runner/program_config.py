"""What programs depend on besides their shapes: the same for all programs of an engine."""

from dataclasses import dataclass, field

from jaxpage.runner.buckets import Bucket
from jaxpage.runner.programs.logits_processors import OwnProcessor
from jaxpage.speculative.proposer import Proposer

NUM_SCORED_TOKENS = 64
"""Tokens whose log-probabilities `programs.score` gives at a time."""


@dataclass(frozen=True)
class ProgramConfig:
    """Its representation says all: programs are kept under it."""

    model_key: str
    vocab_size: int
    num_logprobs: int
    """Most alternatives that a row may ask for."""
    processors: tuple[OwnProcessor, ...] = ()
    """The user's own logits processors, in the order of their bits in `BatchState.own_processors`."""
    proposer_key: str = ""
    proposer: Proposer | None = field(default=None, repr=False)
    """What proposes drafts; None in an engine that does not speculate."""

    def num_logits(self, bucket: Bucket) -> int:
        """Most tokens that a step draws."""
        return bucket.num_rows * self.num_draws(bucket)

    def num_draws(self, bucket: Bucket) -> int:
        """Most tokens that a row draws in a step: one, and one behind each of its drafts."""
        if self.proposer is None or bucket.max_query_len == 1:
            return 1
        return min(1 + self.proposer.max_drafts, bucket.max_query_len)
