"""Requests on the API side as tests make them: opened with a tokenizer of bytes, and fed with tokens."""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxpage.errors import RequestError
from jaxpage.outputs import CompletionOutput, RequestOutput
from jaxpage.requests.accumulate import Accumulator
from jaxpage.requests.open_request import OpenRequest, Prompt, open_request
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.text.chat_template import ChatTemplates
from jaxpage.text.tokenizer import Tokenizer
from jaxpage.wire import AddRequest, Ready, SequenceOutput, TokenOutput

TEXT = "Zwölf Boxkämpfer 🦙 漢字かな"


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and "</s>", which is special and the last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, named_tokens={"eos_token": "</s>"}, chat_templates=ChatTemplates({}))


TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.vocab_size - 1
LIMITS = Ready(
    max_model_len=64,
    vocab_size=TOKENIZER.vocab_size,
    eos_token_ids=[EOS],
    num_blocks=100,
    block_size=16,
    max_num_seqs=8,
    logits_processors=["own"],
    max_beam_tokens=[200 // width for width in range(1, 17)],
    embedding_size=6,
)


class ReadRequest:
    """An open request with someone who reads its outputs."""

    def __init__(self, request: OpenRequest) -> None:
        self.request = request
        self._accumulator = Accumulator(request)

    @property
    def message(self) -> AddRequest:
        return self.request.message

    @property
    def sequence_ids(self) -> list[str]:
        return self.request.sequence_ids

    @property
    def finished(self) -> bool:
        return self.request.finished

    def take(self, output: SequenceOutput) -> tuple[RequestOutput, bool]:
        """The request so far, and whether the engine must be told to stop the sequence."""
        delta, must_abort = self.request.take(output)
        self._accumulator.add(delta)
        return self._accumulator.output(), must_abort

    def end(self, reason: str) -> RequestOutput:
        self._accumulator.add(self.request.end(reason))
        return self._accumulator.output()


def opened(
    prompt: Prompt = "Hi", params: SamplingParams | BeamSearchParams | None = None, *, seed: int = 5, **options: Any
) -> ReadRequest:
    params = params or SamplingParams()
    return ReadRequest(
        open_request(prompt, params, request_id="r", seed=seed, tokenizer=TOKENIZER, limits=LIMITS, **options)
    )


def refusal(
    prompt: Prompt = "Hi", params: SamplingParams | BeamSearchParams | None = None, **options: Any
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        opened(prompt, params, **options)
    return caught.value


def completion(output: RequestOutput) -> CompletionOutput:
    assert len(output.outputs) == 1
    return output.outputs[0]


def stream(
    request: ReadRequest, token_ids: list[int], last: TokenOutput | None = None
) -> list[tuple[RequestOutput, bool]]:
    """Feed tokens one by one, and then `last`, until the request is finished."""
    taken = []
    for output in [*(TokenOutput("r", [token_id]) for token_id in token_ids), *([last] if last else [])]:
        taken.append(request.take(output))
        if request.finished:
            break
    return taken
