"""How completions and chat word their answers: choices in one reply, or in chunks that end with `[DONE]`.

In: a generation. Out: a struct, or server-sent events; both carry the same head.
"""

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.server.answer import Answer, Asked, Choice, choice_of, data_frames
from jaxpage.server.generation import Generation
from jaxpage.server.openai.protocol import GenerationRequest, Usage
from jaxpage.server.request_log import record_of
from jaxpage.server.service import service_of


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


@dataclass(frozen=True, slots=True)
class Choices:
    """One request's answer in a form."""

    form: Form
    head: dict[str, Any]
    """What the reply and every chunk begin with."""
    include_usage: bool
    continuous_usage: bool

    def reply(self, generation: Generation, outputs: list[tuple[int, SequenceDelta]]) -> msgspec.Struct:
        """All choices, or the best of them."""
        form = self.form
        if form.num_kept is not None:
            outputs = _best(outputs, generation.num_choices_of_each, form.num_kept)
        choices = [form.view(choice_of(generation, index, output)) for index, output in outputs]
        if form.num_kept is not None:
            choices = [dataclasses.replace(choice, index=place) for place, choice in enumerate(choices)]
        words = [form.choice(choice) for choice in choices]
        return form.reply(**self.head, choices=words, usage=form.count(generation.usage), **form.of_reply(choices[0]))

    def frames(self, generation: Generation) -> AsyncIterator[bytes]:
        """The chunks as events without names."""
        return data_frames(self._chunks(generation))

    async def _chunks(self, generation: Generation) -> AsyncIterator[msgspec.Struct]:
        form, no_usage = self.form, None if self.include_usage else UNSET
        begun: set[int] = set()
        async for index, output in generation.updates():
            choice = form.view(choice_of(generation, index, output, is_first=index not in begun))
            begun.add(index)
            for step in form.steps(choice):
                usage = form.count(generation.usage) if self.continuous_usage else no_usage
                yield form.chunk(**self.head, choices=[step], usage=usage)
        if self.include_usage:
            yield form.chunk(**self.head, choices=[], usage=form.count(generation.usage))


def answer(
    http_request: Request,
    request: GenerationRequest,
    prompts: list[list[int]],
    params: SamplingParams | BeamSearchParams,
    form: Form,
    as_client_error: Callable[[RequestError], RequestError] = lambda error: error,
) -> Answer:
    """The answer to a request, in its form."""
    name = f"{form.id_prefix}-{record_of(http_request).request_id}"
    head = {"id": name, "created": int(time.time()), "model": service_of(http_request).model_name}
    asked = Asked.of(request, name, prompts, params, as_client_error)
    words = Choices(form, head, request.include_usage, request.continuous_usage)
    return Answer(http_request, asked, words.reply, words.frames if request.stream else None)


def _best(outputs: list[tuple[int, SequenceDelta]], num_choices: int, num_kept: int) -> list[tuple[int, SequenceDelta]]:
    """Of so many choices of each prompt the best, best first; prompts stay in order."""

    def rank(found: tuple[int, SequenceDelta]) -> tuple[int, float]:
        index, output = found
        assert output.cumulative_logprob is not None, "log-probabilities were asked for"
        return index // num_choices, -output.cumulative_logprob / max(len(output.token_ids), 1)

    ranked = sorted(outputs, key=rank)
    return [one for place, one in enumerate(ranked) if place % num_choices < num_kept]
