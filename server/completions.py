"""POST /v1/completions: one or many prompts, as text or as token ids, each with `n` choices."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput
from jaxpage.server.answer import Form, answer
from jaxpage.server.protocol import Completion, CompletionChoice, CompletionRequest
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
    params = request.engine_params(max_tokens, engine.max_model_len)
    prompts = split_prompts(request.prompt)
    if (num_choices := len(prompts) * (request.n or 1)) > MAX_CHOICES:
        raise RequestError(
            f"{len(prompts)} prompts with n={request.n or 1} are {num_choices} choices: at most {MAX_CHOICES}", "prompt"
        )

    def encode_prompts() -> list[list[int]]:
        return [engine.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]

    return await answer(http_request, request, await encode(body, encode_prompts), params, FORM)


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


def _choice(index: int, output: CompletionOutput, num_sent: int = 0) -> CompletionChoice:
    """A choice, or what is new of it behind `num_sent` characters."""
    return CompletionChoice(
        index=index,
        text=output.text[num_sent:],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
    )


def _steps(index: int, output: CompletionOutput, num_sent: int | None) -> Iterator[CompletionChoice]:
    choice = _choice(index, output, num_sent or 0)
    if choice.text or choice.finish_reason is not None:
        yield choice


FORM = Form("cmpl", reply=Completion, chunk=Completion, choice=_choice, steps=_steps)
