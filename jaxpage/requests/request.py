"""A request inside the engine: its tokens, how far they are computed, and whether it goes on."""

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.kv_cache.hashing import BlockKey, ExtraKeys, block_keys
from jaxpage.requests.request_group import RequestGroup
from jaxpage.sampling_params import Pooling, SamplingParams
from jaxpage.wire import TokenLogprobs

if TYPE_CHECKING:
    from jaxpage.structured.constraint import Constraint


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class SamplerKind(enum.IntEnum):
    """What it takes to draw the tokens of a request, or of a step; each can also do what those before it can."""

    GREEDY = 0
    RANDOM = 1
    """Temperature and min-p, which look at each token by itself."""
    FILTERED = 2
    """Top-k and top-p, which look at all of the vocabulary several times."""
    ANY = 3
    """Everything."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence being served."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """The seed in force: the request's own, or one drawn for it on arrival."""
    max_tokens: int
    """Most tokens to generate; the context's room is already taken into account."""
    stop_token_ids: frozenset[int]
    """Ids that end the output: the request's own and, unless it ignores them, the model's EOS ids."""
    arrival: int = 0
    """How many requests came before it."""
    index: int = 0
    """Which of the sequences of one prompt it is."""
    priority: int = 0
    """Lower goes first, where the policy looks at it."""
    num_logprobs: int = -1
    """Most probable tokens whose log-probabilities each step reports, the drawn one's besides; -1 for none of it."""
    num_prompt_logprobs: int | None = None
    """The same at the tokens of its prompt, -1 for the whole vocabulary; None for none of it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """At the prompt's tokens from the second on, as far as they are known."""
    pooling: Pooling | None = None
    """It is one for the hidden states of its prompt, pooled so; it generates a token, which nobody sees."""
    pooled: np.ndarray | None = None  # [embed] float64
    """The sum of the hidden states that are pooled, as far as they are known."""
    bad_words: list[list[int]] = field(default_factory=list)
    """Token sequences that it must not generate."""
    own_processors: int = 0
    """Bit i is set if it asks for the engine's i-th logits processor."""
    extra_keys: ExtraKeys | None = None
    """What its KV depends on besides tokens."""
    prefix: "Request | None" = None
    """A request with the same prompt, to fork from; it must run and its prompt must be computed."""
    forks: "list[Request]" = field(default_factory=list)
    """Requests that wait for this one's prompt in order to fork from it."""
    group: "RequestGroup[Request] | None" = None
    """The requests that it advances with, this one included."""
    constraint: "Constraint | None" = None
    """What its text must fit."""
    awaited: Sequence[Future[Any]] = ()
    """What must be done before it begins; the others go on meanwhile."""
    token_ids: list[int] = field(init=False)
    """Prompt and output: everything that is known."""
    num_in_flight: int = 0
    """Tokens that dispatched steps draw for it, and that are not known yet: the most. They follow the known ones."""
    max_drafts: int = 0
    """Most drafts that may be proposed for it behind its last token; 0 for a request that is not speculated on."""
    num_drafts: int = 0
    """Drafts that the last known step has proposed."""
    num_drafts_in_flight: int = 0
    """Of the tokens in flight, drafts: those that are rejected will never be."""
    sampler_kind: SamplerKind = field(init=False)
    """How its tokens are drawn, but for masks of its `constraint`, by which they are drawn again."""
    max_computed_tokens: int = field(init=False)
    """Most tokens that are ever computed: the last one that it may generate is not."""
    num_computed_tokens: int = 0
    """Tokens whose KV has been scheduled to be written, drafts included: the most."""
    num_cached_tokens: int | None = None
    """Prompt tokens whose KV was found or shared when it was first admitted; None before."""
    row: int = -1
    """Place in the device-resident batch while running."""
    status: RequestStatus = RequestStatus.WAITING
    keys: list[BlockKey] = field(default_factory=list)
    """Names of its first full blocks; `block_keys` brings them up to date."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.max_computed_tokens = len(self.prompt_token_ids) + self.max_tokens - 1
        params = self.params
        is_simple = self.num_logprobs < 0 and not (self.has_rules or self.own_processors or params.changes_logits)
        if not is_simple:
            self.sampler_kind = SamplerKind.ANY
        elif params.greedy:
            self.sampler_kind = SamplerKind.GREEDY
        else:
            self.sampler_kind = SamplerKind.FILTERED if params.top_k > 0 or params.top_p < 1 else SamplerKind.RANDOM

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and accepted output."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_surely_computed_tokens(self) -> int:
        """Tokens whose KV has been scheduled to be written, whatever becomes of the drafts in flight: the fewest."""
        return self.num_computed_tokens - self.num_drafts_in_flight

    @property
    def num_expected_drafts(self) -> int:
        """Drafts that may lie behind its last token, known or in flight.

        With steps in flight they are not known. Where there have just been none, none are expected: to find the next
        ones a step late costs less than to make room for them in every step.
        """
        return self.max_drafts if self.num_in_flight and self.num_drafts else self.num_drafts

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether it may start from KV that others have computed: not if something of every position is asked for."""
        of_all = self.params.prompt_logprobs is not None or self.pooling == "mean"
        return not self.params.skip_reading_prefix_cache and not of_all

    @property
    def has_rules(self) -> bool:
        """Whether it says something of single tokens."""
        return bool(self.bad_words or self.params.logit_bias) or self.params.allowed_token_ids is not None

    @property
    def can_begin(self) -> bool:
        """Whether all that it waits for is there: the grammar that its text must fit, and programs that few need."""
        return (self.constraint is None or self.constraint.is_ready) and all(it.done() for it in self.awaited)

    @property
    def wants_scores(self) -> bool:
        """Whether it asks for log-probabilities that steps do not report."""
        return self.num_prompt_logprobs is not None or self.params.logprobs == -1

    def add_prompt_logprobs(self, first: int, found: list[TokenLogprobs]) -> None:
        """Take in log-probabilities, the first behind position `first`. After preemption, known ones come again."""
        assert first <= len(self.prompt_logprobs), "chunks of a prompt come in order"
        self.prompt_logprobs += found[len(self.prompt_logprobs) - first :]

    def add_pooled(self, first: int, total: np.ndarray) -> None:
        """Take in the sum of hidden states from position `first` on. After preemption, they come again from the first.

        total: [embed] float32.
        """
        begins = self.pooled is None or first == 0 or self.pooling == "last"
        self.pooled = total.astype(np.float64) if begins else self.pooled + total

    @property
    def embedding(self) -> np.ndarray:
        """The pooled hidden states of the whole prompt, [embed] float32."""
        assert self.pooled is not None, "its prompt is computed"
        count = self.num_prompt_tokens if self.pooling == "mean" else 1
        return (self.pooled / count).astype(np.float32)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def block_keys(self, block_size: int) -> list[BlockKey]:
        """Names of its full blocks of known tokens, for the prefix cache."""
        if len(self.token_ids) // block_size > len(self.keys):
            self.keys += block_keys(self.token_ids, block_size, self.keys, self.extra_keys)
        return self.keys

    def begin_anew(self, weights: int) -> None:
        """Its KV will be computed from its first token on, by weights that have been replaced so often."""
        self.extra_keys = replace(self.extra_keys or ExtraKeys(), weights=weights)
        self.keys = []

    def append(self, token_id: int) -> tuple[str | None, int | None]:
        """Add a generated token. Returns the finish reason (None to go on) and the stop token that caused it, if any.

        An EOS id of the model is no stop reason of the request: it gives ("stop", None).
        """
        self.token_ids.append(token_id)
        num_output_tokens = len(self.token_ids) - len(self.prompt_token_ids)
        if (self.constraint is not None and not self.constraint.accept(token_id)) or (
            token_id in self.stop_token_ids and num_output_tokens > self.params.min_tokens
        ):
            return "stop", token_id if token_id in self.params.stop_token_ids else None
        if num_output_tokens >= self.max_tokens:
            return "length", None
        return None, None
