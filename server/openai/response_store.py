"""The responses that `previous_response_id` may go on from: the newest ones, in memory.

In: a response as JSON, and the conversation that it ends. Out: both, by id, until newer ones take their place.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpage.server.errors import ApiError

MAX_BYTES = 256 * 2**20
"""Most bytes of all stored responses, by the length of what was asked and answered."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended."""

    body: bytes
    """As it was, or would have been, sent whole."""
    messages: Sequence[dict[str, Any]]
    """The conversation in the chat template's form, without instructions, up to the response itself."""
    num_bytes: int
    """What it takes, roughly; messages that it shares with earlier ones do not count."""


class ResponseStore:
    """At most `max_responses` responses, and `MAX_BYTES` of them."""

    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def is_enabled(self) -> bool:
        """Whether anything is kept."""
        return self._max_responses > 0

    def __len__(self) -> int:
        return len(self._responses)

    def get(self, response_id: str) -> StoredResponse:
        """A stored response, which counts as new again. Raises a 404."""
        if (found := self._responses.get(response_id)) is None:
            raise _unknown(404, response_id, "response_id")
        self._responses.move_to_end(response_id)
        return found

    def previous(self, response_id: str) -> StoredResponse:
        """The response that a request goes on from. Raises OpenAI's 400 for one that is not known."""
        try:
            return self.get(response_id)
        except ApiError:
            raise _unknown(400, response_id, "previous_response_id") from None

    def put(self, response_id: str, response: StoredResponse) -> None:
        """Keep a response in place of the oldest ones, as far as the limits ask for it."""
        self._responses[response_id] = response
        self._num_bytes += response.num_bytes
        while self._responses and (len(self._responses) > self._max_responses or self._num_bytes > MAX_BYTES):
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def delete(self, response_id: str) -> None:
        """Forget a response. Raises a 404."""
        self._num_bytes -= self.get(response_id).num_bytes
        del self._responses[response_id]


def _unknown(status: int, response_id: str, param: str) -> ApiError:
    return ApiError(
        status,
        f"there is no response {response_id!r}: it was never stored, has been deleted, or newer ones took its place "
        "(--max-stored-responses)",
        param=param,
        code="previous_response_not_found" if status == 400 else "response_not_found",
    )
