"""From a sequence's tokens to its text, with stop strings, and to its log-probabilities by token.

In: what each step gave, as the engine tells it. Out: what is new, as `SequenceDelta`s.
"""

import dataclasses
import operator
from array import array

import numpy as np

from jaxpage import wire
from jaxpage.outputs import Logprob, SequenceDelta
from jaxpage.sampling_params import PoolingParams, SamplingParams
from jaxpage.text.incremental import IncrementalDecoder
from jaxpage.text.tokenizer import Tokenizer


class SequenceText:
    """One sequence of a request: tokens in, deltas out."""

    def __init__(self, index: int, message: wire.AddRequest, tokenizer: Tokenizer) -> None:
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self._index = index
        self._params = message.params
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(
            tokenizer,
            message.params.skip_special_tokens,
            message.prompt_token_ids,
            message.params.shown_special_tokens,
        )
        self._text = StopText(message.params)
        self._cumulative_logprob: float | None = None if message.params.logprobs is None else 0.0

    def take(
        self, output: wire.TokenOutput, weight_version: int = 0, embedding: list[float] | None = None
    ) -> SequenceDelta:
        """Take in new tokens, and the embedding that came with them. The sequence must not have ended.

        A stop string ends it, perhaps before the engine does; tokens behind that are dropped.
        """
        num_taken, stopped = self._decode(output)
        token_ids = output.token_ids[:num_taken]
        logprobs = None
        if self._cumulative_logprob is not None:
            logprobs = []
            for token_id, found in zip(token_ids, output.logprobs or (), strict=False):
                logprobs.append(logprobs_at(token_id, found, self._tokenizer))
                self._cumulative_logprob += found.logprob
        self.finish_reason = output.finish_reason if stopped is None else "stop"
        return SequenceDelta(
            self._index,
            self._text.take(),
            token_ids,
            self.finish_reason,
            output.stop_token_id if stopped is None else stopped,
            self._cumulative_logprob,
            logprobs,
            embedding=embedding,
            weight_versions=[weight_version] * len(token_ids) if weight_version else [],
        )

    def take_beam(self, beam: wire.BeamSequence, weight_version: int = 0) -> SequenceDelta:
        """Take in all of a sequence that a beam search has found."""
        stop_token_id = beam.token_ids[-1] if beam.token_ids[-1] in self._params.stop_token_ids else None
        delta = self.take(wire.TokenOutput("", beam.token_ids, beam.finish_reason, stop_token_id), weight_version)
        return dataclasses.replace(delta, cumulative_logprob=beam.cumulative_logprob, score=beam.score)

    def end(self, reason: str) -> SequenceDelta:
        """End it from outside: what was held back of its text is shown. It must not have ended."""
        self.finish_reason = reason
        self._text.finish("", may_stop=False)
        logprobs: list[dict[int, Logprob]] | None = None if self._cumulative_logprob is None else []
        return SequenceDelta(self._index, self._text.take(), [], reason, None, self._cumulative_logprob, logprobs)

    def _decode(self, output: wire.TokenOutput) -> tuple[int, str | None]:
        """Turn tokens into text up to a stop string: how many were taken, and the stop string, if any."""
        num_tokens = len(output.token_ids)
        ends_behind_text = output.finish_reason == "stop" and not output.ends_in_text
        for count, token_id in enumerate(output.token_ids, 1):
            self.num_tokens += 1
            delta = "" if ends_behind_text and count == num_tokens else self._decoder.add([token_id])
            stopped = self._text.add(delta, may_stop=self._may_stop)
            if stopped is not None:
                return count, stopped
        if output.finish_reason is None:
            return num_tokens, None
        return num_tokens, self._text.finish(self._decoder.finish(), may_stop=self._may_stop)

    @property
    def _may_stop(self) -> bool:
        return self.num_tokens >= self._params.min_tokens


class StopText:
    """Text that ends at the earliest stop string to complete. What may belong to one is held back."""

    def __init__(self, params: SamplingParams) -> None:
        self._new = ""
        self._held = ""
        self._stops = params.stop
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._include = params.include_stop_str_in_output

    def take(self) -> str:
        """What may be shown since this was last asked for."""
        new, self._new = self._new, ""
        return new

    def add(self, delta: str, *, may_stop: bool) -> str | None:
        """Add text. Returns the stop string that it completes, if any; without `may_stop` it is plain text."""
        if not self._stops:
            self._new += delta
            return None
        num_old = len(self._held)
        self._held += delta
        if may_stop and (found := self._first_complete(num_old)) is not None:
            start, stop = found
            self._new += self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return stop
        keep = self._unfinished_from() if may_stop else max(0, len(self._held) - self._longest + 1)
        self._new += self._held[:keep]
        self._held = self._held[keep:]
        return None

    def finish(self, delta: str, *, may_stop: bool) -> str | None:
        """The last text. Returns the stop string that it completes, if any."""
        stopped = self.add(delta, may_stop=may_stop)
        if stopped is None:
            self._new += self._held
            self._held = ""
        return stopped

    def _first_complete(self, num_old: int) -> tuple[int, str] | None:
        """Where the stop string starts whose last character comes first, past the first `num_old` held ones.

        One that was complete before, when it could not stop, is plain text.
        """
        starts = [(self._held.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None

    def _unfinished_from(self) -> int:
        """Where the longest tail begins that may grow into a stop string."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return len(self._held)


def logprobs_at(token_id: int, found: wire.TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Log-probabilities by token: the token itself first, then the most probable ones in order."""
    top = _ranked(found.vocabulary) if found.vocabulary else found.top
    ranked = {alternative: (logprob, rank) for rank, (alternative, logprob) in enumerate(top, 1)}
    ranked = {token_id: (found.logprob, found.rank)} | ranked
    return {i: Logprob(logprob, rank, tokenizer.text_of(i)) for i, (logprob, rank) in ranked.items()}


def _ranked(vocabulary: bytes) -> list[tuple[int, float]]:
    """All tokens with their log-probabilities, the most probable first."""
    row = array("f", vocabulary)
    return sorted(enumerate(row), key=operator.itemgetter(1), reverse=True)


def embedding_of(pooled: bytes, params: PoolingParams) -> list[float]:
    """Pooled hidden states (float32) as they are asked for."""
    vector = np.frombuffer(pooled, np.float32)[: params.dimensions].astype(np.float64)
    length = float(np.linalg.norm(vector))
    found: list[float] = (vector / length if params.normalize and length else vector).astype(np.float32).tolist()
    return found
