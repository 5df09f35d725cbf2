"""Beam search over one prompt, the algorithm alone. In: each live beam's best next tokens. Out: which beams go on.

The rules are those of transformers 5's `generate(num_beams=...)`, so that its rankings and scores are ours, too.
At every step:

1. All pairs of a live beam and a next token are ranked by cumulative log-probability.
2. Of the best `beam_width` pairs, those which end (by an ending token, or because they have `max_tokens`) are
   finished; all other endings are dropped. The best `beam_width` finished beams, by score, are kept.
3. The best `beam_width` pairs that do not end go on.
4. The search is over when none goes on, or when `beam_width` beams are finished and nothing better is to be
   expected, which is for `early_stopping` to say.

A score is cumulative log-probability / number of tokens ** length_penalty. Of the tokens, the prompt does not count
and an ending token does. Beams of one length rank by score as they do by log-probability, so rule 1 needs no penalty.

Two things differ. transformers fills a step that has fewer than `beam_width` candidates with copies, and may return
them; here there are fewer results. And for one beam it takes greedy search: here that is a search like any other,
with the greedy result unless `early_stopping` is "never".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpage.requests.request_group import Continuation
from jaxpage.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A sequence that was found."""

    token_ids: tuple[int, ...]
    """Without the prompt, with the token that ended it."""
    cumulative_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]
    """A last token that is an ending one gives "stop", be it the last that `max_tokens` allowed."""


@dataclass(frozen=True, slots=True)
class _LiveBeam:
    token_ids: tuple[int, ...]
    cumulative_logprob: float


class BeamSearch:
    """One search. At first the prompt is its only live beam; `advance` makes the live beams of the next step."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int]) -> None:
        self.params = params
        self._ending_token_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ending_token_ids |= eos_token_ids
        self._live = [_LiveBeam((), 0.0)]
        self._finished: list[FinishedBeam] = []  # best first, at most beam_width

    @property
    def num_candidates(self) -> int:
        """Candidates that a step must supply for each live beam, or the whole vocabulary if that is smaller.

        With as many, one beam alone could fill the next step though every ending token ranks above its others.
        """
        return self.params.beam_width + len(self._ending_token_ids)

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return not self._live

    def results(self) -> list[FinishedBeam]:
        """What has been found so far, best first: at most `beam_width`, fewer if there are no more sequences."""
        return list(self._finished)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[Continuation]:
        """Take a step. Returns the beams that go on, best first; [] when the search is over.

        `candidates[b]` holds the `num_candidates` most probable (token id, log-probability) pairs of live beam b,
        best first; live beams are numbered as the last call returned them. Of equals, the first one wins. A
        log-probability of -inf means that the token is not allowed.
        """
        ranked = self._rank(candidates)
        width = self.params.beam_width
        num_tokens = len(self._live[0].token_ids) + 1
        # Both lists take in order of rank, and sorts are stable: the order among equals is kept.
        going_on: list[tuple[Continuation, _LiveBeam]] = []
        finished = list(self._finished)
        for rank, (logprob, source, token_id) in enumerate(ranked):
            is_stop = token_id in self._ending_token_ids
            if is_stop or num_tokens == self.params.max_tokens:
                if rank < width:
                    token_ids = (*self._live[source].token_ids, token_id)
                    score = self._score(logprob, num_tokens)
                    finished.append(FinishedBeam(token_ids, logprob, score, "stop" if is_stop else "length"))
            elif len(going_on) < width:
                beam = _LiveBeam((*self._live[source].token_ids, token_id), logprob)
                going_on.append((Continuation(source, token_id), beam))
        self._finished = sorted(finished, key=lambda beam: -beam.score)[:width]
        if going_on and not self._may_improve(going_on[0][1]):
            going_on = []
        self._live = [beam for _, beam in going_on]
        return [continuation for continuation, _ in going_on]

    def _rank(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[float, int, int]]:
        """(Cumulative log-probability, live beam, token id) of all that are allowed, best first."""
        assert self._live, "the search is over"
        assert len(candidates) == len(self._live), f"{len(candidates)} lists for {len(self._live)} live beams"
        pairs = [
            (beam.cumulative_logprob + logprob, source, token_id)
            for source, beam in enumerate(self._live)
            for token_id, logprob in candidates[source]
            if logprob > -math.inf
        ]
        return sorted(pairs, key=lambda pair: -pair[0])

    def _may_improve(self, best: _LiveBeam) -> bool:
        """Whether `best`, the best live beam, is expected to give a result that is kept."""
        if len(self._finished) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        # A beam's log-probability only falls. A positive penalty lets its score rise with length all the same:
        # "never" allows for that in full, False not at all, so that it may miss a better result.
        num_tokens = len(best.token_ids)
        if self.params.early_stopping == "never" and self.params.length_penalty > 0:
            num_tokens = self.params.max_tokens
        return self._score(best.cumulative_logprob, num_tokens) > self._finished[-1].score

    def _score(self, cumulative_logprob: float, num_tokens: int) -> float:
        return cumulative_logprob / float(num_tokens) ** self.params.length_penalty
