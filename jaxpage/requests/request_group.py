"""What the scheduler knows of requests that advance together: one small protocol, for whatever makes them do so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxpage.wire import SequenceOutput, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a member goes on: with the tokens (and KV) that live member `source` had before, then `token_id`."""

    source: int
    token_id: int


class RequestGroup[R](Protocol):
    """Requests (`R`) that run, are preempted and resume together; a request that runs alone has no group.

    The first member stands for all: in the waiting queue, in the name of what they give, and to be aborted.
    """

    @property
    def members(self) -> Sequence[R]:
        """Each has a row for as long as the group runs."""

    @property
    def live(self) -> Sequence[R]:
        """The members that compute now: the first ones, at least one."""

    def take(self, member: R, found: TokenLogprobs) -> Sequence[Continuation] | SequenceOutput | None:
        """Take in what a step gave a live member.

        None: other members' results are waited for. Continuations, one for each member that is live from now on: their
        tokens are brought up to date, their rows and KV are for the caller to copy. An output: the group is over.
        """

    def forget(self) -> None:
        """Drop what was taken in since the last continuations: the members were preempted and compute it again."""
