"""What the API side knows of a request: checking it on arrival, and turning its tokens into text.

In: a prompt and `SamplingParams`. Out: an `AddRequest` for the engine, and cumulative `RequestOutput`s as tokens come.
"""

import time
from collections.abc import Sequence

from jaxpage import wire
from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxpage.tokenizer import IncrementalDecoder, Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


class OpenRequest:
    """One request from arrival to its end."""

    def __init__(self, message: wire.AddRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self.message = message
        self.finished = False
        self._prompt = prompt
        self._token_ids: list[int] = []
        self._decoder = IncrementalDecoder(tokenizer, message.params.skip_special_tokens, message.prompt_token_ids)
        self._text = StopText(message.params)
        self._arrival_time = time.time()
        self._first_token_time: float | None = None

    @property
    def request_id(self) -> str:
        return self.message.request_id

    def take(self, output: wire.TokenOutput) -> tuple[RequestOutput, bool]:
        """Take in new tokens. Returns the request so far, and whether the engine must be told to stop it.

        A stop string ends a request here, where text is known; the engine goes on until it is told.
        """
        params = self.message.params
        self._first_token_time = self._first_token_time or time.time()
        reason, stop_reason = output.finish_reason, output.stop_token_id
        stopped: str | None = None
        for position, token_id in enumerate(output.token_ids):
            self._token_ids.append(token_id)
            ends_here = reason == "stop" and position == len(output.token_ids) - 1
            # The token that ends the output is no part of its text.
            delta = "" if ends_here else self._decoder.add([token_id])
            stopped = self._text.add(delta, may_stop=len(self._token_ids) >= params.min_tokens)
            if stopped is not None:
                break
        if stopped is None and reason is not None:
            stopped = self._text.finish(self._decoder.finish(), may_stop=len(self._token_ids) >= params.min_tokens)
        must_abort = stopped is not None and reason is None
        if stopped is not None:
            reason, stop_reason = "stop", None
        self.finished = reason is not None
        return self._output(reason, stopped if stopped is not None else stop_reason), must_abort

    def end(self, reason: str) -> RequestOutput:
        """The request as it stands when it is ended from outside ("abort" or "error")."""
        self.finished = True
        self._text.finish("", may_stop=False)
        return self._output(reason, None)

    def _output(self, reason: str | None, stop_reason: int | str | None) -> RequestOutput:
        metrics = RequestMetrics(self._arrival_time, self._first_token_time, time.time() if self.finished else None)
        completion = CompletionOutput(0, self._text.visible, list(self._token_ids), reason, stop_reason)
        return RequestOutput(
            self.request_id, self._prompt, self.message.prompt_token_ids, [completion], self.finished, metrics
        )


class StopText:
    """Text that ends at the earliest stop string to complete. What may belong to one is held back."""

    def __init__(self, params: SamplingParams) -> None:
        self.visible = ""
        """What may be shown; it only grows."""
        self._held = ""
        self._stops = params.stop
        self._longest = max((len(stop) for stop in params.stop), default=0)
        self._include = params.include_stop_str_in_output

    def add(self, delta: str, *, may_stop: bool) -> str | None:
        """Add text. Returns the stop string that it completes, if any; without `may_stop` it is plain text."""
        if not self._stops:
            self.visible += delta
            return None
        num_old = len(self._held)
        self._held += delta
        if may_stop and (found := self._first_complete(num_old)) is not None:
            start, stop = found
            self.visible += self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return stop
        keep = self._unfinished_from() if may_stop else max(0, len(self._held) - self._longest + 1)
        self.visible += self._held[:keep]
        self._held = self._held[keep:]
        return None

    def finish(self, delta: str, *, may_stop: bool) -> str | None:
        """The last text. Returns the stop string that it completes, if any."""
        stopped = self.add(delta, may_stop=may_stop)
        if stopped is None:
            self.visible += self._held
            self._held = ""
        return stopped

    def _first_complete(self, num_old: int) -> tuple[int, str] | None:
        """Where the stop string starts whose last character comes first, past the first `num_old` held ones.

        One that was complete before, when it could not stop, is plain text.
        """
        starts = [(self._held.find(stop, max(0, num_old - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[1:] if found else None

    def _unfinished_from(self) -> int:
        """Where the longest tail begins that may grow into a stop string."""
        for start in range(max(0, len(self._held) - self._longest + 1), len(self._held)):
            if any(stop.startswith(self._held[start:]) for stop in self._stops):
                return start
        return len(self._held)


def open_request(
    prompt: Prompt, params: SamplingParams, *, request_id: str, seed: int, tokenizer: Tokenizer, limits: wire.Ready
) -> OpenRequest:
    """Check a request against the engine's limits. `seed` is used if the request has none.

    `max_tokens` beyond the room that the context leaves is lowered to it. Raises `RequestError` that names what is
    wrong, the limit and the remedy.
    """
    text = prompt if isinstance(prompt, str) else None
    token_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not token_ids:
        raise RequestError("the prompt has no tokens: give it at least one", "prompt")
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"the prompt holds {token_id!r}, and token ids are integers in [0, {limits.vocab_size})", "prompt"
            )
    room = limits.max_model_len - len(token_ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, and max_model_len is {limits.max_model_len} with at least one to "
            "generate: shorten it or raise --max-model-len",
            "prompt",
        )
    for token_id in params.stop_token_ids:
        if token_id >= limits.vocab_size:
            raise RequestError(
                f"stop_token_ids holds {token_id}, and token ids are below {limits.vocab_size}", "stop_token_ids"
            )
    num_stops = len({*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)})
    if num_stops > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids and the model's EOS ids are {num_stops}, and {MAX_STOP_TOKEN_IDS} fit: give fewer",
            "stop_token_ids",
        )
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, and {max_tokens} tokens is all that max_tokens and the context of "
            f"{limits.max_model_len} leave: lower it",
            "min_tokens",
        )
    if params.seed is not None and params.seed != -1:
        seed = params.seed
    return OpenRequest(wire.AddRequest(request_id, token_ids, params, seed, max_tokens), text, tokenizer)
