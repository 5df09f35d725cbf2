"""Log-probabilities that a step does not report itself: at the tokens of prompts, and of whole vocabularies.

In: the hidden states that a step leaves on the device, and who asks for what. Out: numbers on their way to the host.
Two small programs look at a few of the step's tokens at a time: no step program grows by what few requests ask for.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpage.models.params import Params
from jaxpage.ops.sampling import TokenLogprobs as DeviceLogprobs
from jaxpage.request import Request
from jaxpage.runner.programs import ProgramStore
from jaxpage.runner.step import ProgramConfig, compile_score, compile_score_rows
from jaxpage.scheduler import PromptLogprobs, SchedulerOutput
from jaxpage.wire import TokenLogprobs

_NUM_TOKENS, _NUM_ROWS = 64, 4
"""Tokens that a program scores at a time; whole vocabularies are large."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A token whose log-probabilities are asked for."""

    place: int
    """Of its request among those of the step."""
    position: int
    """Whose hidden state tells of the token behind it."""
    index: int
    """Of that position among the tokens of the step."""
    target: int
    """The token, -1 for one that the step draws."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a step's requests ask for, in parts that are on their way to the host."""

    tokens: list[_Asked] = field(default_factory=list)
    rows: list[_Asked] = field(default_factory=list)
    """The same where whole vocabularies are asked for."""
    token_parts: list[DeviceLogprobs] = field(default_factory=list)
    """`_NUM_TOKENS` of `tokens` each."""
    row_parts: list[jax.Array] = field(default_factory=list)
    """`_NUM_ROWS` of `rows` each, as [_NUM_ROWS, vocab] float32."""


class Scorer:
    """The two programs, compiled once: in the background, or by the first step that needs them."""

    num_programs = 2

    def __init__(self, store: ProgramStore, config: ProgramConfig) -> None:
        self._store = store
        self._config = config
        self._programs: dict[str, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def warm_up(self, params: Params, hidden: Any) -> None:
        """Make both programs ready for arguments of these shapes (arrays or `ShapeDtypeStruct`s)."""
        for name in ("score", "score_rows"):
            self._program(name, params, hidden)

    def dispatch(self, params: Params, hidden: jax.Array, output: SchedulerOutput) -> Scores | None:
        """Score what a step's requests ask for, if anything. hidden: [tokens, embed], as the step left it."""
        if not any(request.wants_scores for request in output.requests):
            return None
        scores = Scores()
        start = 0
        for place, (request, query_len) in enumerate(zip(output.requests, output.query_lens, strict=True)):
            prompt = scores.rows if request.num_prompt_logprobs == -1 else scores.tokens
            prompt.extend(_in_prompt(request, place, query_len, start))
            start += query_len
            if request.params.logprobs == -1 and request.num_computed_tokens >= request.num_prompt_tokens:
                scores.rows.append(_Asked(place, request.num_computed_tokens - 1, start - 1, -1))
        for at in range(0, len(scores.tokens), _NUM_TOKENS):
            packed = np.zeros((2, _NUM_TOKENS), np.int32)
            for i, asked in enumerate(scores.tokens[at : at + _NUM_TOKENS]):
                packed[:, i] = asked.index, asked.target
            scores.token_parts.append(self._run("score", params, hidden, packed))
        for at in range(0, len(scores.rows), _NUM_ROWS):
            indices = np.zeros(_NUM_ROWS, np.int32)
            for i, asked in enumerate(scores.rows[at : at + _NUM_ROWS]):
                indices[i] = asked.index
            scores.row_parts.append(self._run("score_rows", params, hidden, indices))
        return scores

    def _run(self, name: str, params: Params, hidden: jax.Array, packed: np.ndarray) -> Any:
        result = self._program(name, params, hidden)(params, hidden, packed)
        for array in jax.tree.leaves(result):
            array.copy_to_host_async()
        return result

    def _program(self, name: str, params: Params, hidden: Any) -> jax.stages.Compiled:
        with self._lock:
            if name not in self._programs:
                is_rows = name == "score_rows"
                packed = np.zeros(_NUM_ROWS if is_rows else (2, _NUM_TOKENS), np.int32)
                compile_it = compile_score_rows if is_rows else compile_score
                self._programs[name] = self._store.get(
                    name,
                    self._config,
                    (params, hidden, packed),
                    lambda: compile_it(self._config, params, hidden, packed),
                )
            return self._programs[name]


def _in_prompt(request: Request, place: int, query_len: int, start: int) -> Iterator[_Asked]:
    """What a request asks for of its prompt among the `query_len` tokens that it has from `start` on in the step."""
    if request.num_prompt_logprobs is None:
        return
    first = request.num_computed_tokens - query_len
    for position in range(first, min(request.num_computed_tokens, request.num_prompt_tokens - 1)):
        yield _Asked(place, position, start + position - first, request.prompt_token_ids[position + 1])


def fetch_scores(
    scores: Scores, requests: Sequence[Request], drawn: Sequence[TokenLogprobs | None]
) -> tuple[list[PromptLogprobs | None], list[TokenLogprobs | None]]:
    """Wait for scores: what each request of the step asks for of its prompt, and `drawn` with whole vocabularies."""
    prompts: list[PromptLogprobs | None] = [None] * len(requests)
    with_rows = list(drawn)

    def add(asked: _Asked, found: TokenLogprobs) -> None:
        if (prompt := prompts[asked.place]) is None:
            prompt = prompts[asked.place] = PromptLogprobs(asked.position, [])
        prompt.logprobs.append(found)

    parts = [jax.tree.map(np.asarray, part) for part in scores.token_parts]
    for i, asked in enumerate(scores.tokens):
        wanted = requests[asked.place].num_prompt_logprobs or 0
        add(asked, host_logprobs(parts[i // _NUM_TOKENS], i % _NUM_TOKENS, wanted))
    whole = [np.asarray(part) for part in scores.row_parts]
    for i, asked in enumerate(scores.rows):
        row = whole[i // _NUM_ROWS][i % _NUM_ROWS]
        vocabulary = row.tobytes()
        if asked.target >= 0:
            rank = 1 + int(np.sum(row > row[asked.target]))
            add(asked, TokenLogprobs(float(row[asked.target]), rank, [], vocabulary))
        elif (one := with_rows[asked.place]) is not None:
            with_rows[asked.place] = msgspec.structs.replace(one, vocabulary=vocabulary)
    return prompts, with_rows


def host_logprobs(found: DeviceLogprobs, row: int, wanted: int) -> TokenLogprobs:
    """One row of what has been fetched, with as many alternatives as are wanted."""
    top = zip(found.top_ids[row, :wanted].tolist(), found.top[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(float(found.token[row]), int(found.rank[row]), list(top))
