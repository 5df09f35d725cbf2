"""From a request's deltas to its cumulative output, for those who ask for one."""

from jaxpage.outputs import CompletionOutput, RequestDelta, RequestOutput, SequenceDelta
from jaxpage.requests.open_request import OpenRequest


class Accumulator:
    """One request: deltas in, `RequestOutput`s out."""

    def __init__(self, request: OpenRequest) -> None:
        params = request.message.params
        self._request = request
        self._newest = RequestDelta(request.request_id, [], finished=False)
        self._prompt_logprobs = self._newest.prompt_logprobs
        # A beam search shows its sequences when it has found them.
        num_sequences = params.n if request.message.beam is None else 0
        self._sequences = {index: _Sequence(index, params.logprobs is not None) for index in range(num_sequences)}

    def add(self, delta: RequestDelta) -> None:
        """Take in what is new."""
        self._newest = delta
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        for new in delta.outputs:
            self._sequences.setdefault(new.index, _Sequence(new.index, new.logprobs is not None)).add(new)

    def output(self) -> RequestOutput:
        """The request so far."""
        request, newest = self._request, self._newest
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.message.prompt_token_ids,
            [sequence.output() for _, sequence in sorted(self._sequences.items())],
            newest.finished,
            newest.num_cached_tokens,
            request.metrics,
            self._prompt_logprobs,
        )


class _Sequence:
    def __init__(self, index: int, has_logprobs: bool) -> None:
        self._whole = SequenceDelta(
            index,
            "",
            [],
            cumulative_logprob=0.0 if has_logprobs else None,
            logprobs=[] if has_logprobs else None,
        )
        self._new: list[SequenceDelta] = []
        self._output: CompletionOutput | None = None

    def add(self, delta: SequenceDelta) -> None:
        self._new.append(delta)
        self._output = None

    def output(self) -> CompletionOutput:
        """The sequence so far; the same object until there is more of it."""
        if self._output is None:
            whole = self._whole = SequenceDelta.joined([self._whole, *self._new])
            self._new.clear()
            self._output = CompletionOutput(
                whole.index,
                whole.text,
                whole.token_ids,
                whole.finish_reason,
                whole.stop_reason,
                whole.cumulative_logprob,
                whole.logprobs,
                whole.score,
                whole.embedding,
                whole.weight_versions,
            )
        return self._output
