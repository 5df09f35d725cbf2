"""A request inside the engine: its tokens, how far they are computed, and whether it goes on."""

import enum
from dataclasses import dataclass, field

from jaxpage.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
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
    arrival_time: float
    token_ids: list[int] = field(init=False)
    """Prompt and output: everything that is known."""
    num_computed_tokens: int = 0
    """Tokens whose KV has been scheduled to be written."""
    row: int = -1
    """Place in the device-resident batch while running."""
    status: RequestStatus = RequestStatus.WAITING

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

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
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> tuple[str | None, int | None]:
        """Add a generated token. Returns the finish reason (None to go on) and the stop token that caused it, if any.

        An EOS id of the model is no stop reason of the request: it gives ("stop", None).
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_token_ids and self.num_output_tokens > self.params.min_tokens:
            return "stop", token_id if token_id in self.params.stop_token_ids else None
        if self.num_output_tokens >= self.max_tokens:
            return "length", None
        return None, None
