"""POST /v1/completions: one or many prompts, as text or as token ids, each with `n` choices."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.server.answer import Choice
from jaxpage.server.openai.form import Form, answer
from jaxpage.server.openai.logprobs import ScoredTokens, of_prompt
from jaxpage.server.openai.protocol import Completion, CompletionChoice, CompletionRequest, Usage
from jaxpage.server.service import encode, read_request, service_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's `max_tokens` of a completion that names none."""
MAX_CHOICES = 2048
"""Most choices of one request, over all its prompts."""


async def completions(http_request: Request) -> Response:
    """Answers in one piece or, with `stream`, as server-sent events."""
    request, body = await read_request(http_request, CompletionRequest)
    engine, add_special_tokens = service_of(http_request).engine, request.add_special_tokens is not False
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    # The engine takes no prompt without drawing a token behind it.
    params = request.engine_params(1 if request.only_echo else max_tokens, engine.max_model_len)
    prompts = split_prompts(request.prompt)
    if (num_choices := len(prompts) * request.num_generated) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with {request.num_generated} each are {num_choices} choices: at most "
            f"{MAX_CHOICES}",
            "prompt",
        )

    def encode_prompts() -> list[list[int]]:
        return [engine.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

    token_ids = await encode(body, encode_prompts)
    echo = None
    if request.echo:
        skip_special_tokens = request.skip_special_tokens is not False
        echo = _Echo(
            [p if isinstance(p, str) else engine.decode(p, skip_special_tokens) for p in prompts],
            [[engine.token_text(token_id) for token_id in ids] for ids in token_ids],
            request.num_generated,
            request.only_echo,
        )
    return answer(http_request, request, token_ids, params, _form(request, echo))


def split_prompts(prompt: str | list[str | int | list[int]], field: str = "prompt") -> list[str] | list[list[int]]:
    """The prompts in the field: a text, token ids, or a list of either. Raises `RequestError` if kinds are mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{field} is an empty list: give a text, token ids, or a list of either", field)
    token_ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    if len(texts) == len(prompt):
        return texts
    if len(lists) == len(prompt):
        return lists
    raise RequestError(f"{field} mixes texts, token ids and lists of ids: give only one kind", field)


@dataclass(frozen=True, slots=True)
class _Echo:
    """Prompts that go before what was generated, in each choice of theirs."""

    prompts: Sequence[str]
    tokens: Sequence[list[str]]
    """Their tokens' texts."""
    num_choices: int
    """Of each."""
    alone: bool
    """Nothing is to be generated; what was, is left out."""

    def view(self, choice: Choice) -> Choice:
        if self.alone:
            tokens = None if choice.tokens is None else ScoredTokens([], [])
            choice = dataclasses.replace(choice, text="", tokens=tokens, finish_reason="length", stop_reason=None)
        if not choice.is_first:
            return choice
        number, tokens = choice.index // self.num_choices, choice.tokens
        if tokens is not None:
            of_prompt = choice.prompt_logprobs or ()
            tokens = ScoredTokens([*self.tokens[number], *tokens.texts], [*of_prompt, *tokens.entries])
        return dataclasses.replace(choice, text=self.prompts[number] + choice.text, tokens=tokens)

    def count(self, usage: Usage) -> Usage:
        if not self.alone:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)


def _form(request: CompletionRequest, echo: _Echo | None) -> Form:
    num_kept = None if request.num_generated == (request.n or 1) else request.n or 1

    offsets: dict[int, int] = {}
    """Characters of the tokens of each choice that were sent."""

    def worded(choice: Choice) -> CompletionChoice:
        tokens, offset = choice.tokens, offsets.get(choice.index, 0)
        if tokens is not None:
            offsets[choice.index] = offset + sum(map(len, tokens.texts))
        asked = request.prompt_logprobs is not None and choice.prompt_logprobs is not None
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=None if tokens is None or request.num_logprobs is None else tokens.of_completion(offset),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            prompt_logprobs=of_prompt(choice.prompt_logprobs or ()) if asked else UNSET,
        )

    def steps(choice: Choice) -> Iterator[CompletionChoice]:
        step = worded(choice)
        if step.text or step.finish_reason is not None or (step.logprobs is not None and step.logprobs.tokens):
            yield step

    form = Form(
        "cmpl",
        reply=Completion,
        chunk=Completion,
        choice=worded,
        steps=steps,
        num_kept=num_kept,
    )
    return form if echo is None else dataclasses.replace(form, view=echo.view, count=echo.count)
