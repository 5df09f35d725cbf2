"""From a checked request and its prompts to the HTTP response: what all routes that generate have in common.

In: prompts as token ids, the engine's options, and the form in which a route words what was generated. Out: one reply,
or a stream of chunks; both carry the same head.
"""

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.generation import Generation
from jaxpage.server.openai.logprobs import Entry, ScoredTokens
from jaxpage.server.openai.protocol import GenerationRequest, Usage
from jaxpage.server.request_log import record_of
from jaxpage.server.service import service_of
from jaxpage.server.sse import data_frames, event_response, whole_response


@dataclass(frozen=True, slots=True)
class Choice:
    """What is new of a choice, or all of it in one piece: what a route makes its words of."""

    index: int
    text: str
    tokens: ScoredTokens | None
    """Where log-probabilities are asked for."""
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: Sequence[Entry] | None = None
    is_first: bool = True
    """Whether nothing of the choice came before."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a route words its answers."""

    id_prefix: str
    reply: Callable[..., msgspec.Struct]
    """Makes a whole answer of id, created, model, choices and usage."""
    chunk: Callable[..., msgspec.Struct]
    """Makes a piece of a stream of the same."""
    choice: Callable[[Choice], msgspec.Struct]
    """A whole choice."""
    steps: Callable[[Choice], Iterator[msgspec.Struct]]
    """What is new of a choice."""
    view: Callable[[Choice], Choice] = lambda choice: choice
    """What the route shows of what was generated."""
    count: Callable[[Usage], Usage] = lambda usage: usage
    """What the route counts of it."""
    num_kept: int | None = None
    """Choices of each prompt that are answered with: those that are most probable per token; None: all, as they are."""
    of_reply: Callable[[Choice], dict[str, Any]] = lambda choice: {}
    """What the whole answer says of its first choice."""


async def answer(
    http_request: Request,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    params: SamplingParams | BeamSearchParams,
    form: Form,
) -> Response:
    """Generate, and answer in one piece or, with `stream`, as server-sent events."""
    generation = await start(http_request, request, prompts, params, form.id_prefix)
    head = {
        "id": f"{form.id_prefix}-{record_of(http_request).request_id}",
        "created": int(time.time()),
        "model": service_of(http_request).model_name,
    }
    if request.stream:
        chunks = _chunks(generation, form, head, request.include_usage)
        return await event_response(http_request, generation, data_frames(chunks))

    def reply(outputs: list[tuple[int, SequenceDelta]]) -> msgspec.Struct:
        if form.num_kept is not None:
            outputs = _best(outputs, generation.num_choices_of_each, form.num_kept)
        choices = [form.view(choice_of(generation, index, output)) for index, output in outputs]
        if form.num_kept is not None:
            choices = [dataclasses.replace(choice, index=place) for place, choice in enumerate(choices)]
        words = [form.choice(choice) for choice in choices]
        return form.reply(**head, choices=words, usage=form.count(generation.usage), **form.of_reply(choices[0]))

    return await whole_response(http_request, generation, reply)


async def start(
    http_request: Request,
    request: GenerationRequest,
    prompts: Sequence[list[int]],
    params: SamplingParams | BeamSearchParams,
    id_prefix: str,
) -> Generation:
    """Admit all prompts, under a name that begins with the prefix. Whoever starts a generation must close it."""
    record, service = record_of(http_request), service_of(http_request)
    try:
        await service.engine.prepare(params)
    except RequestError as error:  # it knows nothing of the request's field
        raise RequestError(str(error), request.structure.field if request.structure else error.param) from error
    record.generation = service.admit(
        f"{id_prefix}-{record.request_id}",
        prompts,
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
    )
    return record.generation


def choice_of(generation: Generation, index: int, output: SequenceDelta, *, is_first: bool = True) -> Choice:
    """What the engine gave of a choice."""
    tokens = None
    if output.logprobs is not None:
        texts = [
            entry[token_id].decoded_token for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
        tokens = ScoredTokens(texts, output.logprobs)
    prompt_logprobs = generation.prompt_logprobs(index)
    return Choice(index, output.text, tokens, output.finish_reason, output.stop_reason, prompt_logprobs, is_first)


def _best(outputs: list[tuple[int, SequenceDelta]], num_choices: int, num_kept: int) -> list[tuple[int, SequenceDelta]]:
    """Of so many choices of each prompt the best, best first; prompts stay in order."""

    def rank(found: tuple[int, SequenceDelta]) -> tuple[int, float]:
        index, output = found
        assert output.cumulative_logprob is not None, "log-probabilities were asked for"
        return index // num_choices, -output.cumulative_logprob / max(len(output.token_ids), 1)

    ranked = sorted(outputs, key=rank)
    return [one for place, one in enumerate(ranked) if place % num_choices < num_kept]


async def _chunks(
    generation: Generation, form: Form, head: dict[str, Any], include_usage: bool
) -> AsyncIterator[msgspec.Struct]:
    no_usage = None if include_usage else UNSET
    begun: set[int] = set()
    async for index, output in generation.updates():
        choice = form.view(choice_of(generation, index, output, is_first=index not in begun))
        begun.add(index)
        for step in form.steps(choice):
            yield form.chunk(**head, choices=[step], usage=no_usage)
    if include_usage:
        yield form.chunk(**head, choices=[], usage=form.count(generation.usage))
