"""The beams of one search inside the engine: which requests they are, and how they go on when all have reported."""

from collections.abc import Sequence

from jaxpage.requests.beam_search import BeamSearch
from jaxpage.requests.request import Request
from jaxpage.requests.request_group import Continuation
from jaxpage.wire import BeamOutput, BeamSequence, TokenLogprobs

Candidates = Sequence[tuple[int, float]]
"""(token id, log-probability), the most probable first."""


class BeamGroup:
    """A `RequestGroup` of beams, `search.params.beam_width` of them; the first are live, best first.

    A search begins with one live beam, its prompt.
    """

    def __init__(self, search: BeamSearch, beams: list[Request]) -> None:
        self.members = beams
        self._search = search
        self._num_live = 1
        self._candidates: dict[int, Candidates] = {}
        for beam in beams:
            beam.group = self

    @property
    def live(self) -> list[Request]:
        """The beams that there are now, best first."""
        return self.members[: self._num_live]

    def take(self, member: Request, found: TokenLogprobs) -> list[Continuation] | BeamOutput | None:
        """Take in how a beam could go on. When all have reported, the search chooses; see `RequestGroup.take`."""
        self._candidates[member.index] = found.top
        if len(self._candidates) < self._num_live:
            return None
        continuations = self._search.advance([self._candidates[i] for i in range(self._num_live)])
        self.forget()
        if not continuations:
            return self._output()
        sources = [(beam.token_ids, beam.keys, beam.num_computed_tokens) for beam in self.live]
        for beam, continuation in zip(self.members, continuations, strict=False):
            token_ids, keys, num_computed_tokens = sources[continuation.source]
            beam.token_ids, beam.keys = [*token_ids, continuation.token_id], list(keys)
            beam.num_computed_tokens = num_computed_tokens
        self._num_live = len(continuations)
        return continuations

    def forget(self) -> None:
        """Drop what has been reported: the beams start their step anew."""
        self._candidates.clear()

    def _output(self) -> BeamOutput:
        first = self.members[0]
        sequences = [
            BeamSequence(list(beam.token_ids), beam.cumulative_logprob, beam.score, beam.finish_reason)
            for beam in self._search.results()
        ]
        return BeamOutput(first.request_id, sequences, first.num_cached_tokens or 0)
