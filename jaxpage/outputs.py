"""What a request gives back, frozen: what is new of it (a delta), and all of it so far (an output)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments of one request, in seconds since the Unix epoch; None while they have not happened."""

    arrival_time: float
    scheduled_time: float | None = None
    """When its first step was sent to the device."""
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token (TTFT)."""
        return _seconds(self.arrival_time, self.first_token_time)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the end."""
        return _seconds(self.arrival_time, self.finished_time)

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step."""
        return _seconds(self.arrival_time, self.scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from the first step to the first token."""
        return _seconds(self.scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """Seconds from the first token to the end."""
        return _seconds(self.first_token_time, self.finished_time)

    @property
    def inference_time(self) -> float | None:
        """Seconds from the first step to the end."""
        return _seconds(self.scheduled_time, self.finished_time)


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability in the model's own distribution, before any option changes it."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    decoded_token: str
    """Its text when it stands alone."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence. `text` and `token_ids` are cumulative and never take anything back."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """One of `FINISH_REASONS`, or None while the sequence grows."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended the sequence; None for end-of-sequence."""
    cumulative_logprob: float | None = None
    """Sum over the generated tokens, where `logprobs` was asked for, and of a beam search."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per generated token, by token id: its own log-probability and those of as many alternatives as asked for."""
    score: float | None = None
    """Of a beam search: cumulative_logprob / tokens ** length_penalty."""
    embedding: list[float] | None = None
    """Of the prompt, where that was asked for; there is no text then."""
    weight_versions: list[int] = field(default_factory=list)
    """Per generated token, which weights gave it; empty as long as it was those that the engine began with."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and what it has generated so far."""

    request_id: str
    prompt: str | None
    """The prompt as text, when it was given as text."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One per sequence asked for; those of a beam search come when it ends, best first."""
    finished: bool
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=0.0))
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per token of the prompt, where asked for: as in `CompletionOutput.logprobs`, and None for the first token. They
    come with the first generated token."""


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What is new of one generated sequence. Fields without a word here are as in `CompletionOutput`."""

    index: int
    text: str
    """New text; all of them, joined, are the sequence's."""
    token_ids: list[int]
    """New tokens."""
    finish_reason: str | None = None
    """In the last delta only, as is `stop_reason`."""
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    """Of all tokens so far."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Of the new tokens."""
    score: float | None = None
    embedding: list[float] | None = None
    weight_versions: list[int] = field(default_factory=list)
    """Of the new tokens."""

    @staticmethod
    def joined(deltas: "Sequence[SequenceDelta]") -> "SequenceDelta":
        """Successive deltas of one sequence, at least one, as a single one."""
        if len(deltas) == 1:
            return deltas[0]
        last = deltas[-1]
        return SequenceDelta(
            last.index,
            "".join([delta.text for delta in deltas]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            last.finish_reason,
            last.stop_reason,
            last.cumulative_logprob,
            None if last.logprobs is None else [entry for delta in deltas for entry in delta.logprobs or ()],
            last.score,
            last.embedding,
            _joined_versions(deltas) if any(delta.weight_versions for delta in deltas) else [],
        )


def _joined_versions(deltas: "Sequence[SequenceDelta]") -> list[int]:
    return [version for it in deltas for version in it.weight_versions or [0] * len(it.token_ids)]


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """What is new of a request."""

    request_id: str
    outputs: list[SequenceDelta]
    """Of the sequences that have grown or ended, at most one of each; those of a beam search come when it ends."""
    finished: bool
    num_cached_tokens: int = 0
    """As in `RequestOutput`."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """As in `RequestOutput`, in one delta only."""

    @staticmethod
    def joined(deltas: "Sequence[RequestDelta]") -> "RequestDelta":
        """Successive deltas of one request, at least one, as a single one."""
        if len(deltas) == 1:
            return deltas[0]
        of_sequences: dict[int, list[SequenceDelta]] = {}
        for delta in deltas:
            for output in delta.outputs:
                of_sequences.setdefault(output.index, []).append(output)
        last = deltas[-1]
        return RequestDelta(
            last.request_id,
            [SequenceDelta.joined(found) for _, found in sorted(of_sequences.items())],
            last.finished,
            last.num_cached_tokens,
            next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt as a point in space."""

    embedding: list[float]
    """Empty where the request has failed."""


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt: str | None
    """The prompt as text, when it was given as text."""
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
