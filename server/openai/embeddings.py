"""/v1/embeddings in OpenAI's shape, and /score in vLLM's: prompts as points in space, and how near they are.

In: texts or token ids. Out: the served model's final hidden states, pooled; or the cosine of the angle between two.
"""

import math
import sys
import time
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.outputs import SequenceDelta
from jaxpage.sampling_params import PoolingParams
from jaxpage.server.answer import Answer, Asked
from jaxpage.server.generation import Generation
from jaxpage.server.openai.completions import split_prompts
from jaxpage.server.openai.protocol import NEUTRAL, Int64, ModelRequest, Neutral
from jaxpage.server.request_log import record_of
from jaxpage.server.service import encode, read_request, service_of

MAX_PROMPTS = 2048
"""Most prompts of one request, as OpenAI has it."""


class PoolingRequest(ModelRequest, kw_only=True):
    """What both have in common."""

    pooling: str | None = None
    add_special_tokens: bool | None = None
    priority: Int64 | None = None
    cache_salt: str | None = None

    def pooling_params(self, **options: Any) -> PoolingParams:
        """What the engine is to do with each prompt. Raises `RequestError` that names the field at fault."""
        given = {"pooling": self.pooling, **options}
        return PoolingParams(**{name: value for name, value in given.items() if value is not None})


class EmbeddingsRequest(PoolingRequest, kw_only=True):
    """Body of POST /v1/embeddings."""

    neutral: ClassVar[Neutral] = {**NEUTRAL, "messages": ()}

    input: str | list[str | Int64 | list[Int64]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int64 | None = None
    normalize: bool | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """Body of POST /score: one text and one or many others, or as many on either side."""

    neutral: ClassVar[Neutral] = {**NEUTRAL, "mm_processor_kwargs": ()}

    text_1: str | list[str]
    text_2: str | list[str]


class PromptUsage(msgspec.Struct, kw_only=True):
    """Tokens of all prompts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(msgspec.Struct, kw_only=True):
    """One prompt's."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or the same as float32 in little-endian order, in base64."""


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer of /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Score(msgspec.Struct, kw_only=True):
    """How near a pair of texts is, from -1 to 1."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Answer of /score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


async def embeddings(http_request: Request) -> Response:
    """POST /v1/embeddings."""
    request, body = await read_request(http_request, EmbeddingsRequest)
    params = request.pooling_params(dimensions=request.dimensions, normalize=request.normalize)
    prompts = split_prompts(request.input, "input")

    def reply(vectors: Sequence[list[float]], usage: PromptUsage) -> msgspec.Struct:
        data = [
            Embedding(index=index, embedding=in_base64(vector) if request.encoding_format == "base64" else vector)
            for index, vector in enumerate(vectors)
        ]
        return EmbeddingList(data=data, model=service_of(http_request).model_name, usage=usage)

    return await _answer(http_request, request, body, prompts, params, "input", "embd", reply)


async def score(http_request: Request) -> Response:
    """POST /score: the cosine of the angle between the embeddings of each pair, as vLLM has it of such a model."""
    request, body = await read_request(http_request, ScoreRequest)
    pairs = _pairs(request)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    place = {text: index for index, text in enumerate(texts)}
    params = request.pooling_params()

    def reply(vectors: Sequence[list[float]], usage: PromptUsage) -> msgspec.Struct:
        data = [
            Score(index=index, score=math.sumprod(vectors[place[one]], vectors[place[other]]))
            for index, (one, other) in enumerate(pairs)
        ]
        return ScoreList(
            id=f"score-{record_of(http_request).request_id}",
            created=int(time.time()),
            model=service_of(http_request).model_name,
            data=data,
            usage=usage,
        )

    return await _answer(http_request, request, body, texts, params, None, "score", reply)


def _pairs(request: ScoreRequest) -> list[tuple[str, str]]:
    firsts = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    seconds = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    for name, texts in (("text_1", firsts), ("text_2", seconds)):
        if not texts:
            raise RequestError(f"{name} is an empty list: give a text, or a list of texts", name)
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise RequestError(
            f"text_1 has {len(firsts)} texts and text_2 has {len(seconds)}: give one, or as many as text_2 has",
            "text_1",
        )
    return list(zip(firsts, seconds, strict=True))


async def _answer(
    http_request: Request,
    request: PoolingRequest,
    body: bytes,
    prompts: Sequence[str] | Sequence[list[int]],
    params: PoolingParams,
    field: str | None,
    id_prefix: str,
    reply: Callable[[Sequence[list[float]], PromptUsage], msgspec.Struct],
) -> Response:
    """Embed all prompts, and answer with what `reply` makes of their embeddings and the usage.

    field: which one the prompts came from, if it was one.
    """
    service = service_of(http_request)
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{len(prompts)} texts: at most {MAX_PROMPTS} in one request", field)
    special = request.add_special_tokens is not False

    def encode_prompts() -> list[list[int]]:
        return [service.engine.encode(p, special) if isinstance(p, str) else p for p in prompts]

    token_ids = await encode(body, encode_prompts)

    def as_client_error(error: RequestError) -> RequestError:
        return RequestError(str(error), field if error.param == "prompt" else error.param)

    asked = Asked(
        f"{id_prefix}-{record_of(http_request).request_id}",
        token_ids,
        params,
        priority=request.priority or 0,
        cache_salt=request.cache_salt,
        as_client_error=as_client_error,
    )

    def reply_of(generation: Generation, outputs: Sequence[tuple[int, SequenceDelta]]) -> msgspec.Struct:
        num_tokens = generation.usage.prompt_tokens
        vectors = [output.embedding or [] for _, output in outputs]
        return reply(vectors, PromptUsage(prompt_tokens=num_tokens, total_tokens=num_tokens))

    return Answer(http_request, asked, reply_of)


def in_base64(vector: Sequence[float]) -> str:
    """As float32 in little-endian order."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()
