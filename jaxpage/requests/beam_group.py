"""The beams of one search inside the engine: which requests they are, and when all have reported."""

from collections.abc import Sequence

from jaxpage.requests.beam_search import BeamSearch, Continuation
from jaxpage.requests.request import Request

Candidates = Sequence[tuple[int, float]]
"""(token id, log-probability), the most probable first."""


class BeamGroup:
    """Requests that advance together, `search.params.beam_width` of them; the first `num_live` are beams now.

    A search begins with one beam, its prompt. Each beam has a row for as long as the group runs.
    """

    def __init__(self, search: BeamSearch, beams: list[Request]) -> None:
        self.search = search
        self.beams = beams
        self.num_live = 1
        self._candidates: dict[int, Candidates] = {}
        for beam in beams:
            beam.beams = self

    @property
    def live(self) -> list[Request]:
        """The beams that there are now, best first."""
        return self.beams[: self.num_live]

    def report(self, beam: Request, candidates: Candidates) -> bool:
        """Take in how a beam could go on. Returns whether all have reported and `advance` may be called."""
        self._candidates[beam.index] = candidates
        return len(self._candidates) == self.num_live

    def advance(self) -> list[Continuation]:
        """Let the beams go on: which of them, and with which token. Their tokens change; KV and rows are the caller's.

        Returns nothing when the search is over.
        """
        continuations = self.search.advance([self._candidates[i] for i in range(self.num_live)])
        self.forget()
        sources = [(beam.token_ids, beam.keys, beam.num_computed_tokens) for beam in self.live]
        for beam, continuation in zip(self.beams, continuations, strict=False):
            token_ids, keys, num_computed_tokens = sources[continuation.source]
            beam.token_ids, beam.keys = [*token_ids, continuation.token_id], list(keys)
            beam.num_computed_tokens = num_computed_tokens
        if continuations:
            self.num_live = len(continuations)
        return continuations

    def forget(self) -> None:
        """Drop what has been reported: the beams start their step anew."""
        self._candidates.clear()
