"""/tokenize and /detokenize, in vLLM's shapes.

In: a prompt or a chat, or token ids. Out: the ids that the model would be given, or their text.
"""

from typing import Any, ClassVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import RequestError
from jaxpage.server.openai.chat_protocol import chat_of
from jaxpage.server.openai.protocol import Int64, ModelRequest, Neutral
from jaxpage.server.service import encode, read_request, service_of


class TokenizeRequest(ModelRequest, kw_only=True):
    """Body of POST /tokenize: either a prompt or messages."""

    neutral: ClassVar[Neutral] = {
        "chat_template": (),
        "continue_final_message": (False,),
        "mm_processor_kwargs": (),
    }

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises `RequestError` unless there is one thing to encode."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt and messages: give exactly one of them", "prompt")
        if self.messages is not None and self.add_special_tokens:
            raise RequestError(
                "add_special_tokens is true, and the chat template adds them already: leave it out",
                "add_special_tokens",
            )
        if self.tools:
            chat_of(self.messages or [], tools=self.tools, tool_choice="auto").check()


class Tokens(msgspec.Struct, kw_only=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    """The text of each token where it stands alone, where asked for."""


class DetokenizeRequest(ModelRequest, kw_only=True):
    """Body of POST /detokenize."""

    neutral: ClassVar[Neutral] = {}

    tokens: list[Int64]


class Text(msgspec.Struct, kw_only=True):
    """Answer of /detokenize."""

    prompt: str


async def tokenize(http_request: Request) -> Response:
    """POST /tokenize."""
    request, body = await read_request(http_request, TokenizeRequest)
    engine = service_of(http_request).engine

    def work() -> list[int]:
        if request.messages is not None:
            return engine.encode_chat(
                request.messages,
                add_generation_prompt=request.add_generation_prompt is not False,
                chat_template_kwargs=request.chat_template_kwargs,
                tools=request.tools or None,
            )
        return engine.encode(request.prompt or "", request.add_special_tokens is not False)

    token_ids = await encode(body, work)
    texts = [engine.token_text(token_id) for token_id in token_ids] if request.return_token_strs else None
    answer = Tokens(count=len(token_ids), max_model_len=engine.max_model_len, tokens=token_ids, token_strs=texts)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(http_request: Request) -> Response:
    """POST /detokenize: the text, special tokens included."""
    request, body = await read_request(http_request, DetokenizeRequest)
    engine = service_of(http_request).engine
    for token_id in request.tokens:
        if not 0 <= token_id < engine.vocab_size:
            raise RequestError(f"tokens holds {token_id}: token ids are in [0, {engine.vocab_size})", "tokens")
    text = await encode(body, lambda: engine.decode(request.tokens, skip_special_tokens=False))
    return Response(msgspec.json.encode(Text(prompt=text)), media_type="application/json")
