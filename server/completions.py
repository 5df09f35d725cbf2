"""POST /v1/completions: one or many prompts, as text or as token ids, each with `n` choices."""

import time
import uuid
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput
from jaxpage.server.generation import Generation
from jaxpage.server.protocol import Completion, CompletionChoice, CompletionRequest, decode
from jaxpage.server.service import encode, read_body, service_of
from jaxpage.server.sse import event_response, whole_response

DEFAULT_MAX_TOKENS = 16
"""OpenAI's `max_tokens` of a completion that names none."""
MAX_CHOICES = 2048
"""Most choices of one request, over all its prompts."""


async def completions(http_request: Request) -> Response:
    """Answers in one piece or, with `stream`, as server-sent events."""
    service = service_of(http_request)
    service.check_available()
    body = await read_body(http_request)
    request = decode(body, CompletionRequest)
    service.check_model(request.model)
    prompts = split_prompts(request.prompt)
    if (num_choices := len(prompts) * (request.n or 1)) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n={request.n or 1} are {num_choices} choices: at most {MAX_CHOICES}", "prompt"
        )
    engine, add_special_tokens = service.engine, request.add_special_tokens is not False

    def encode_prompts() -> list[list[int]]:
        return [engine.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

    params = request.sampling_params(DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens)
    ids_per_prompt = await encode(body, encode_prompts)
    reply = Completion(id=f"cmpl-{uuid.uuid4().hex}", created=int(time.time()), model=service.model_name, choices=[])
    generation = service.admit(reply.id, ids_per_prompt, params)
    if request.stream:
        return await event_response(http_request, generation, _chunks(generation, reply, request.include_usage))

    def completion(outputs: list[CompletionOutput]) -> Completion:
        choices = [_choice(index, output, output.text) for index, output in enumerate(outputs)]
        return msgspec.structs.replace(reply, choices=choices, usage=generation.usage)

    return await whole_response(http_request, generation, completion)


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """The prompts in the field: a text, token ids, or a list of either. Raises `RequestError` if kinds are mixed."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is an empty list: give a text, token ids, or a list of either", "prompt")
    token_ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    if len(texts) == len(prompt):
        return texts
    if len(lists) == len(prompt):
        return lists
    raise RequestError("prompt mixes texts, token ids and lists of ids: give only one kind", "prompt")


async def _chunks(generation: Generation, reply: Completion, include_usage: bool) -> AsyncIterator[Completion]:
    reply = msgspec.structs.replace(reply, usage=None if include_usage else UNSET)
    num_sent = [0] * generation.num_choices  # characters of each choice that the client has
    async for index, output in generation.updates():
        text = output.text[num_sent[index] :]
        if text or output.finish_reason is not None:
            num_sent[index] = len(output.text)
            yield msgspec.structs.replace(reply, choices=[_choice(index, output, text)])
    if include_usage:
        yield msgspec.structs.replace(reply, usage=generation.usage)


def _choice(index: int, output: CompletionOutput, text: str) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, finish_reason=output.finish_reason, stop_reason=output.stop_reason)
