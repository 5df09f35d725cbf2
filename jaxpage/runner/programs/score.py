"""Log-probabilities that a step does not report itself: at the tokens of prompts, and of whole vocabularies.

In: the hidden states that a step leaves on the device, and who asks for what. Out: numbers on their way to the host.
Two small programs look at a few of the step's tokens at a time: no step program grows by what few requests ask for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np

from jaxpage.models.weights import Params
from jaxpage.ops.sampling.sampling import TokenLogprobs as DeviceLogprobs
from jaxpage.ops.sampling.sampling import logprobs_at
from jaxpage.requests.request import Request
from jaxpage.runner.devices import send_back
from jaxpage.runner.engine_plan import EnginePlan
from jaxpage.runner.program_config import NUM_SCORED_TOKENS
from jaxpage.runner.programs.program import Piece, Program, Stage
from jaxpage.runner.step_table import Ints
from jaxpage.scheduler.step_plan import PromptLogprobs, PromptPiece, SchedulerOutput
from jaxpage.wire import TokenLogprobs

NUM_SCORED_ROWS = 4
"""Tokens that a program scores at a time; whole vocabularies are large."""


class _Scoring(Program[None]):
    """What both have in common: (params, hidden, which tokens) -> log-probabilities."""

    num_scored: int
    """Tokens at a time."""

    def variants(self, plan: EnginePlan) -> Sequence[None]:
        return [None]

    def stage(self, plan: EnginePlan, variant: None) -> tuple[Stage, int]:
        return Stage.SOON, 1

    def takes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return ["params", "hidden"]

    def changes(self, plan: EnginePlan, variant: None) -> Sequence[Piece]:
        return []

    def products(self, plan: EnginePlan, variant: None) -> tuple[int, Any]:
        return self.num_scored, plan.shapes["params"]


class Score(_Scoring):
    """Of some tokens of the last step: log-probabilities of what follows each.

    Its input, [2, NUM_SCORED_TOKENS] int32: whose hidden state is looked at, and which token follows it.
    """

    name = "score"
    num_scored = NUM_SCORED_TOKENS

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return np.zeros((2, NUM_SCORED_TOKENS), np.int32)

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        model, num_logprobs = plan.model, plan.program_config.num_logprobs

        def score(params: Params, hidden: dict[str, jax.Array], packed: jax.Array) -> tuple[tuple[()], DeviceLogprobs]:
            index, following = packed
            return (), logprobs_at(model.logits(params, hidden["last"][index]), following, num_logprobs)

        return score


class ScoreRows(_Scoring):
    """Of fewer tokens: log-probabilities of the whole vocabulary, [NUM_SCORED_ROWS, vocab] float32.

    Its input, [NUM_SCORED_ROWS] int32: whose hidden state is looked at.
    """

    name = "score_rows"
    num_scored = NUM_SCORED_ROWS

    def nothing(self, plan: EnginePlan, variant: None) -> np.ndarray:
        return np.zeros(NUM_SCORED_ROWS, np.int32)

    def function(self, plan: EnginePlan, variant: None) -> Callable[..., Any]:
        model = plan.model

        def score_rows(params: Params, hidden: dict[str, jax.Array], packed: jax.Array) -> tuple[tuple[()], jax.Array]:
            return (), jax.nn.log_softmax(model.logits(params, hidden["last"][packed]), axis=-1)

        return score_rows


SCORE, SCORE_ROWS = Score(), ScoreRows()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A token whose log-probabilities are asked for."""

    step_row: int
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
    """`NUM_SCORED_TOKENS` of `tokens` each."""
    row_parts: list[jax.Array] = field(default_factory=list)
    """`NUM_SCORED_ROWS` of `rows` each, as [NUM_SCORED_ROWS, vocab] float32."""


Run = Callable[[np.ndarray], Any]
"""Takes a program's packed input, and gives its result on the device."""


def dispatch_scores(output: SchedulerOutput, first_tokens: Ints, *, score: Run, score_rows: Run) -> Scores:
    """Score what a step's requests ask for. first_tokens: [requests], of each among the tokens of the step."""
    scores = Scores()
    for step_row, (request, query_len) in enumerate(zip(output.requests, output.query_lens, strict=True)):
        start = int(first_tokens[step_row])
        prompt = scores.rows if request.num_prompt_logprobs == -1 else scores.tokens
        prompt.extend(_in_prompt(request, step_row, query_len, start))
        if request.params.logprobs == -1 and request.num_computed_tokens >= request.num_prompt_tokens:
            scores.rows.append(_Asked(step_row, request.num_computed_tokens - 1, start + query_len - 1, -1))
    for at in range(0, len(scores.tokens), NUM_SCORED_TOKENS):
        packed = np.zeros((2, NUM_SCORED_TOKENS), np.int32)
        for i, asked in enumerate(scores.tokens[at : at + NUM_SCORED_TOKENS]):
            packed[:, i] = asked.index, asked.target
        scores.token_parts.append(send_back(score(packed)))
    for at in range(0, len(scores.rows), NUM_SCORED_ROWS):
        indices = np.zeros(NUM_SCORED_ROWS, np.int32)
        for i, asked in enumerate(scores.rows[at : at + NUM_SCORED_ROWS]):
            indices[i] = asked.index
        scores.row_parts.append(send_back(score_rows(indices)))
    return scores


def _in_prompt(request: Request, step_row: int, query_len: int, start: int) -> Iterator[_Asked]:
    """What a request asks for of its prompt among the `query_len` tokens that it has from `start` on in the step."""
    if request.num_prompt_logprobs is None:
        return
    first = request.num_computed_tokens - query_len
    for position in range(first, min(request.num_computed_tokens, request.num_prompt_tokens - 1)):
        yield _Asked(step_row, position, start + position - first, request.prompt_token_ids[position + 1])


def fetch_scores(
    scores: Scores,
    requests: Sequence[Request],
    drawn: Sequence[list[TokenLogprobs] | None],
    pieces: list[PromptPiece | None],
) -> list[list[TokenLogprobs] | None]:
    """Wait for scores. Returns `drawn` with whole vocabularies, and puts into `pieces` what is asked for of prompts."""
    with_rows = list(drawn)
    prompts: dict[int, PromptLogprobs] = {}

    def add(asked: _Asked, found: TokenLogprobs) -> None:
        if (prompt := prompts.get(asked.step_row)) is None:
            pieces[asked.step_row] = prompt = prompts[asked.step_row] = PromptLogprobs(asked.position, [])
        prompt.logprobs.append(found)

    parts = [jax.tree.map(np.asarray, part) for part in scores.token_parts]
    for i, asked in enumerate(scores.tokens):
        wanted = requests[asked.step_row].num_prompt_logprobs or 0
        add(asked, host_logprobs(parts[i // NUM_SCORED_TOKENS], i % NUM_SCORED_TOKENS, wanted))
    whole = [np.asarray(part) for part in scores.row_parts]
    for i, asked in enumerate(scores.rows):
        row = whole[i // NUM_SCORED_ROWS][i % NUM_SCORED_ROWS]
        vocabulary = row.tobytes()
        if asked.target >= 0:
            rank = 1 + int(np.sum(row > row[asked.target]))
            add(asked, TokenLogprobs(float(row[asked.target]), rank, [], vocabulary))
        elif (found := with_rows[asked.step_row]) is not None:  # one: such a request has no drafts
            with_rows[asked.step_row] = [msgspec.structs.replace(one, vocabulary=vocabulary) for one in found]
    return with_rows


def host_logprobs(found: DeviceLogprobs, row: int, wanted: int) -> TokenLogprobs:
    """One row of what has been fetched, with as many alternatives as are wanted."""
    top = zip(found.top_ids[row, :wanted].tolist(), found.top[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(float(found.token[row]), int(found.rank[row]), list(top))
