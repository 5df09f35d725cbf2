"""From a checked request and its prompts to the HTTP response: what all routes that generate have in common.

In: prompts as token ids, the engine's options, and the form in which a route words what was generated. Out: one reply,
or a stream of chunks; both carry the same head.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.outputs import CompletionOutput
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.generation import Generation
from jaxpage.server.protocol import GenerationRequest
from jaxpage.server.service import service_of
from jaxpage.server.sse import event_response, whole_response


@dataclass(frozen=True, slots=True)
class Form:
    """How a route words its answers."""

    id_prefix: str
    reply: Callable[..., msgspec.Struct]
    """Makes a whole answer of id, created, model, choices and usage."""
    chunk: Callable[..., msgspec.Struct]
    """Makes a piece of a stream of the same."""
    choice: Callable[[int, CompletionOutput], msgspec.Struct]
    """A finished choice by its index."""
    steps: Callable[[int, CompletionOutput, int | None], Iterator[msgspec.Struct]]
    """What is new of a choice to a client that has so many characters of it; None: that does not know it yet."""


async def answer(
    http_request: Request,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    params: SamplingParams | BeamSearchParams,
    form: Form,
) -> Response:
    """Generate, and answer in one piece or, with `stream`, as server-sent events."""
    service = service_of(http_request)
    request_id = f"{form.id_prefix}-{uuid.uuid4().hex}"
    head = {"id": request_id, "created": int(time.time()), "model": service.model_name}
    generation = service.admit(
        request_id, prompts, params, priority=request.priority or 0, cache_salt=request.cache_salt
    )
    if request.stream:
        return await event_response(http_request, generation, _chunks(generation, form, head, request.include_usage))

    def reply(outputs: list[tuple[int, CompletionOutput]]) -> msgspec.Struct:
        choices = [form.choice(index, output) for index, output in outputs]
        return form.reply(**head, choices=choices, usage=generation.usage)

    return await whole_response(http_request, generation, reply)


async def _chunks(
    generation: Generation, form: Form, head: dict[str, Any], include_usage: bool
) -> AsyncIterator[msgspec.Struct]:
    no_usage = None if include_usage else UNSET
    num_sent: dict[int, int] = {}  # characters of each choice that the client has
    async for index, output in generation.updates():
        for choice in form.steps(index, output, num_sent.get(index)):
            yield form.chunk(**head, choices=[choice], usage=no_usage)
        num_sent[index] = len(output.text)
    if include_usage:
        yield form.chunk(**head, choices=[], usage=generation.usage)
