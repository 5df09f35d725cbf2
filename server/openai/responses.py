"""/v1/responses: a turn of a conversation that the server may remember.

In: text, or messages, perhaps behind an earlier response. Out: a response object, whole or as a stream of events.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.server.answer import Answer, Asked, Choice, choice_of, named_frames
from jaxpage.server.errors import describe
from jaxpage.server.generation import Generation
from jaxpage.server.openai.logprobs import ScoredTokens
from jaxpage.server.openai.protocol import Usage
from jaxpage.server.openai.response_items import OutputItems
from jaxpage.server.openai.response_store import StoredResponse
from jaxpage.server.openai.responses_protocol import (
    DeletedResponse,
    IncompleteDetails,
    OutputItem,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
    StreamEvent,
    TextLogprob,
    TopTextLogprob,
)
from jaxpage.server.parsing.conversation import converse
from jaxpage.server.parsing.splitter import Splitter
from jaxpage.server.request_log import record_of
from jaxpage.server.service import Service, encode, read_request, service_of

_DEFAULT_TEMPERATURE, _DEFAULT_TOP_P = 1.0, 1.0


async def create_response(http_request: Request) -> Response:
    """POST /v1/responses."""
    request, body = await read_request(http_request, ResponsesRequest)
    service = service_of(http_request)
    if request.store and not service.response_store.is_enabled:
        raise RequestError("store is true, and this server stores nothing (--max-stored-responses 0)", "store")
    earlier: Sequence[dict[str, Any]] = ()
    if request.previous_response_id is not None:
        earlier = service.response_store.previous(request.previous_response_id).messages
    messages = [*earlier, *request.messages()]
    asked = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    chat = request.chat([*asked, *messages])
    params = request.engine_params(request.max_output_tokens, service.engine.max_model_len)
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, chat, params))
    wanted = Asked.of(
        request,
        f"resp-{record_of(http_request).request_id}",
        [conversation.token_ids],
        conversation.params,
        conversation.as_client_error,
    )
    turn = _Turn(request, service, messages, len(body), conversation.splitter())
    return Answer(http_request, wanted, turn.reply, turn.frames if request.stream else None)


async def get_response(http_request: Request) -> Response:
    """GET /v1/responses/{id}: one that is stored."""
    found = service_of(http_request).response_store.get(http_request.path_params["response_id"])
    return Response(found.body, media_type="application/json")


async def delete_response(http_request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    response_id = http_request.path_params["response_id"]
    service_of(http_request).response_store.delete(response_id)
    return Response(msgspec.json.encode(DeletedResponse(id=response_id)), media_type="application/json")


@dataclass(slots=True)
class _Turn:
    """One response while it comes into being."""

    request: ResponsesRequest
    service: Service
    messages: list[dict[str, Any]]
    """The conversation up to the response."""
    num_body_bytes: int
    splitter: Splitter
    items: OutputItems = field(init=False)
    response_id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created_at: int = field(default_factory=lambda: int(time.time()))
    num_events: int = 0

    def __post_init__(self) -> None:
        self.items = OutputItems(self._next)

    def grow(self, choice: Choice) -> Iterator[StreamEvent]:
        """Take in what is new of the choice, and its end."""
        yield from self.items.take(self.splitter.feed(choice.text), self._logprobs(choice.tokens))
        if choice.finish_reason is not None:
            yield from self.items.take(self.splitter.finish(), [])
            yield from self.items.finish("incomplete" if choice.finish_reason == "length" else "completed")

    def ended(self, choice: Choice, usage: Usage) -> ResponseObject:
        """The response of a choice that has ended, which is stored unless the client wants otherwise."""
        is_complete = choice.finish_reason != "length"
        reasoning = self.items.reasoning
        num_reasoning_tokens = len(self.service.engine.encode(reasoning, add_special_tokens=False)) if reasoning else 0
        response = self._response(
            "completed" if is_complete else "incomplete",
            output=self.items.items,
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else IncompleteDetails(),
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=usage.prompt_tokens_details,
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning_tokens),
                total_tokens=usage.total_tokens,
            ),
        )
        if response.store:
            body = msgspec.json.encode(response)
            messages = [*self.messages, self.items.as_message()]
            stored = StoredResponse(body, messages, self.num_body_bytes + len(body))
            self.service.response_store.put(self.response_id, stored)
        return response

    def failed(self, error: Exception) -> ResponseEvent:
        """The last event of a stream that `error` has ended."""
        status, body = describe(error)
        code = "rate_limit_exceeded" if status == 429 else body.error.code or "server_error"
        response = self._response("failed", error=ResponseError(code=code, message=body.error.message))
        return ResponseEvent(type="response.failed", sequence_number=self._next(), response=response)

    def reply(self, generation: Generation, outputs: list[tuple[int, SequenceDelta]]) -> ResponseObject:
        """The whole response."""
        [(index, output)] = outputs
        choice = choice_of(generation, index, output)
        for _ in self.grow(choice):
            pass
        return self.ended(choice, generation.usage)

    def frames(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream's events under their names."""
        return named_frames(self._events(generation), self.failed)

    async def _events(self, generation: Generation) -> AsyncIterator[StreamEvent]:
        """The stream: the response begins, its items come one after the other, and it ends."""
        begun = self._response("in_progress")
        yield ResponseEvent(type="response.created", sequence_number=self._next(), response=begun)
        yield ResponseEvent(type="response.in_progress", sequence_number=self._next(), response=begun)
        choice: Choice | None = None
        async for index, output in generation.updates():
            choice = choice_of(generation, index, output)
            for event in self.grow(choice):
                yield event
        assert choice is not None, "a generation without updates raises"
        response = self.ended(choice, generation.usage)
        yield ResponseEvent(
            type="response.completed" if response.status == "completed" else "response.incomplete",
            sequence_number=self._next(),
            response=response,
        )

    def _next(self) -> int:
        self.num_events += 1
        return self.num_events - 1

    def _logprobs(self, tokens: ScoredTokens | None) -> list[TextLogprob]:
        """As in chat, but that there is no null: a part of a character has no bytes."""
        if tokens is None:
            return []
        return [
            TextLogprob(
                token=one.token,
                logprob=one.logprob,
                bytes=one.bytes or [],
                top_logprobs=[
                    TopTextLogprob(token=top.token, logprob=top.logprob, bytes=top.bytes or [])
                    for top in one.top_logprobs
                ],
            )
            for one in tokens.of_chat(self.request.top_logprobs or 0).content
        ]

    def _response(self, status: Status, output: Sequence[OutputItem] = (), **fields: Any) -> ResponseObject:
        request = self.request
        return ResponseObject(
            id=self.response_id,
            created_at=self.created_at,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=self.service.model_name,
            output=list(output),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            store=request.store is not False and self.service.response_store.is_enabled,
            temperature=_DEFAULT_TEMPERATURE if request.temperature is None else request.temperature,
            text={"format": {"type": "text"}, **(request.text or {})},
            tool_choice=request.tool_choice or "auto",
            tools=request.tools or [],
            top_logprobs=request.top_logprobs or 0,
            top_p=_DEFAULT_TOP_P if request.top_p is None else request.top_p,
            **fields,
        )
