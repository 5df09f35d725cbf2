"""/v1/messages: Anthropic's protocol, for clients that speak it."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import SamplingParams
from jaxpage.server.answer import Answer, Asked, Choice, choice_of, named_frames
from jaxpage.server.anthropic.message_blocks import Blocks
from jaxpage.server.anthropic.protocol import (
    CountTokensRequest,
    Message,
    MessageDelta,
    MessageEvent,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    Stop,
    StopReason,
    TokenCount,
)
from jaxpage.server.errors import describe_to_anthropic
from jaxpage.server.generation import Generation
from jaxpage.server.parsing.conversation import converse
from jaxpage.server.parsing.splitter import Splitter
from jaxpage.server.request_log import record_of
from jaxpage.server.service import encode, read_request, service_of


async def create_message(http_request: Request) -> Response:
    """POST /v1/messages: whole or, with `stream`, as events."""
    request, body = await read_request(http_request, MessagesRequest)
    service = service_of(http_request)
    chat = request.chat()
    params = request.engine_params(request.max_tokens, service.engine.max_model_len)
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, chat, params))
    request_id = record_of(http_request).request_id
    asked = Asked.of(
        request, f"msg-{request_id}", [conversation.token_ids], conversation.params, conversation.as_client_error
    )
    words = _Words(request_id, service.model_name, request.max_tokens, conversation.splitter())
    return Answer(http_request, asked, words.reply, words.frames if request.stream else None)


async def count_tokens(http_request: Request) -> Response:
    """POST /v1/messages/count_tokens: what the same conversation would have as input tokens."""
    request, body = await read_request(http_request, CountTokensRequest)
    service, chat = service_of(http_request), request.chat()
    conversation = await encode(body, lambda: converse(service.engine, service.dialect, chat, SamplingParams()))
    count = TokenCount(input_tokens=len(conversation.token_ids))
    return Response(msgspec.json.encode(count), media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Words:
    """One message while it comes into being."""

    request_id: str
    model_name: str
    max_tokens: int
    splitter: Splitter
    blocks: Blocks = field(default_factory=Blocks)

    def reply(self, generation: Generation, outputs: list[tuple[int, SequenceDelta]]) -> Message:
        """The whole message."""
        [(index, output)] = outputs
        choice = choice_of(generation, index, output)
        for _ in itertools.chain(self.blocks.take(self.splitter.split(choice.text)), self.blocks.finish()):
            pass
        message = self._head(generation)
        stop = _stop(choice, message.usage, self.max_tokens, self.splitter)
        return msgspec.structs.replace(
            message, content=self.blocks.blocks, stop_reason=stop.stop_reason, stop_sequence=stop.stop_sequence
        )

    def frames(self, generation: Generation) -> AsyncIterator[bytes]:
        """The stream's events under their names."""
        return named_frames(self._events(generation), lambda error: describe_to_anthropic(error, self.request_id)[1])

    async def _events(self, generation: Generation) -> AsyncIterator[MessageEvent]:
        await generation.started()  # only then is known how much of the prompt was cached
        yield MessageStart(message=self._head(generation))
        choice: Choice | None = None
        async for index, output in generation.updates():
            choice = choice_of(generation, index, output)
            for event in self.blocks.take(self.splitter.feed(choice.text)):
                yield event
        assert choice is not None, "a generation without updates raises"
        for event in itertools.chain(self.blocks.take(self.splitter.finish()), self.blocks.finish()):
            yield event
        usage = _usage(generation)
        yield MessageDelta(delta=_stop(choice, usage, self.max_tokens, self.splitter), usage=usage)
        yield MessageStop()

    def _head(self, generation: Generation) -> Message:
        return Message(
            id=f"msg_{self.request_id}",
            model=self.model_name,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(generation),
        )


def _usage(generation: Generation) -> MessageUsage:
    usage = generation.usage
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _stop(choice: Choice, usage: MessageUsage, max_tokens: int, splitter: Splitter) -> Stop:
    reason: StopReason = "end_turn"
    sequence = None
    if choice.finish_reason == "length":
        reason = "max_tokens" if usage.output_tokens >= max_tokens else "model_context_window_exceeded"
    elif isinstance(choice.stop_reason, str):
        reason, sequence = "stop_sequence", choice.stop_reason
    elif splitter.has_calls:
        reason = "tool_use"
    return Stop(stop_reason=reason, stop_sequence=sequence)
