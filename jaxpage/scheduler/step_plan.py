"""What a step is made of: what the scheduler tells the runner, and what the runner gives back. No JAX."""

from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from jaxpage.kv_cache.manager import BlockCopy
from jaxpage.requests.request import Request, SamplerKind
from jaxpage.wire import TokenLogprobs


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that gets a row in this step, in full. A resumed one carries its output as known tokens."""

    row: int
    request: Request
    token_ids: list[int]
    num_computed_tokens: int
    block_tables: list[list[int]]
    """Per KV group, this step's blocks included."""


@dataclass(frozen=True, slots=True)
class StateSave:
    """Recurrent states of a row to be kept: those behind its first `position` tokens."""

    row: int
    position: int
    block_ids: list[int]
    """Where their bytes go, in order."""


@dataclass(frozen=True, slots=True)
class StateLoad:
    """Recurrent states that an admitted row begins from: those behind its first `position` tokens."""

    row: int
    position: int
    block_ids: list[int]
    """Where their bytes are, in order."""


@dataclass(frozen=True, slots=True)
class RowFork:
    """A row that goes on as a copy of another one, whose last token is replaced."""

    source: int
    target: int
    token_id: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a piece of a prompt."""

    first: int
    """The position behind which they begin."""
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class PooledStates:
    """The sum of the final hidden states of a piece of a prompt."""

    first: int
    """The position where it begins."""
    total: np.ndarray  # [embed] float32


_SAMPLER_KIND = attrgetter("sampler_kind")
PromptPiece = PromptLogprobs | PooledStates
"""What a step gives a request of its prompt."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: what changed since the last one, and how many tokens each row computes.

    Saves and loads of recurrent states come first, in this order: blocks that are loaded from may be written later in
    the same step. Then row forks, which all read the rows as the last step left them; block copies, admissions, the
    step. Saves and row forks read no row that a load writes but to read what it held before.
    """

    row_forks: list[RowFork]
    block_copies: list[BlockCopy]
    admitted: list[AdmittedRequest]
    requests: list[Request]
    """Scheduled requests, in the order of the step's tokens."""
    rows: list[int]
    """Their rows."""
    query_lens: list[int]
    """Their tokens in this step, each at least 1; of those that are speculated on, the most that there can be."""
    new_blocks: list[tuple[int, int, int, int]]
    """(row, KV group, index in its block table, block id) of rows that were admitted earlier."""
    num_drafts: dict[str, int] = field(default_factory=dict)
    """How many of their tokens are drafts, by request id; without those that have none."""
    saves: list[StateSave] = field(default_factory=list)
    loads: list[StateLoad] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def sampler_kind(self) -> SamplerKind:
        """What it takes to draw for all of the scheduled requests."""
        return max(map(_SAMPLER_KIND, self.requests), default=SamplerKind.GREEDY)

    @property
    def wants_logprobs(self) -> bool:
        """Whether any of the scheduled requests asks for log-probabilities."""
        return self.sampler_kind is SamplerKind.ANY and any(request.num_logprobs >= 0 for request in self.requests)
