"""The three loops give the same: 200 requests of every kind, arriving, stopping, aborted and preempted as they may."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from real_models import CASES, Model, open_model

from jaxpage import RequestOutput, SamplingParams, StructuredOutputsParams
from jaxpage.engine.loops import LOOPS
from jaxpage.requests.open_request import open_request

NUM_REQUESTS, FULL_NUM_REQUESTS = 40, 200
STRUCTURES = (
    *[None] * 4,
    StructuredOutputsParams(regex="[a-z]{3}|[0-9]+"),
    StructuredOutputsParams(json={"type": ["boolean", "integer"]}),
)
ARRIVALS_PER_STEP = 2


@dataclass(frozen=True)
class Work:
    """A request, and when its client leaves."""

    prompt: list[int]
    params: SamplingParams
    abort_after: int | None
    """Tokens of which, at the latest, the client has had enough."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every model or, unless a test run is a full one, the first."""
    models = list(CASES) if metafunc.config.getoption("--full") else list(CASES)[:1]
    metafunc.parametrize("model", models, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with open_model(request.param) as model:
        yield model


def workload(prompts: Sequence[list[int]], num_requests: int) -> list[Work]:
    rng = random.Random(0)
    text = max(prompts, key=len)
    found = []
    for index in range(num_requests):
        start = rng.choice((0, 0, rng.randrange(len(text) // 2)))  # many begin alike
        greedy = rng.random() < 0.5
        is_long = index % 10 == 0  # enough to outgrow the pool beside the others
        max_tokens = 30 if is_long else rng.randint(1, 4)
        params = SamplingParams(
            temperature=0.0 if greedy else rng.choice((0.5, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 50)),
            seed=index,
            n=1 if greedy else rng.choice((1, 1, 2)),
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, max_tokens)),
            ignore_eos=is_long or rng.random() < 0.5,
            stop=() if is_long else rng.choice(((), (" the", "e"), (".", " a"))),
            stop_token_ids=() if is_long else rng.choice(((), tuple(rng.sample(text, 3)))),
            structured_outputs=None if is_long else rng.choice(STRUCTURES),
        )
        prompt = text[start : start + rng.randint(1, 30)]
        abort_after = None if is_long else rng.choice((None, None, None, rng.randint(0, max_tokens)))
        found.append(Work(prompt, params, abort_after))
    return found


def serve(model: Model, work: Sequence[Work]) -> list[RequestOutput]:
    """Run all of it, two arriving with each step."""
    core, tokenizer = model.core, model.llm.tokenizer
    numbers = itertools.count()
    arriving = [
        (
            open_request(
                it.prompt, it.params, request_id=str(next(numbers)), seed=0, tokenizer=tokenizer, limits=core.ready
            ),
            it,
        )
        for it in work
    ]
    of_sequence = {name: (request, it) for request, it in arriving for name in request.sequence_ids}
    results: dict[str, RequestOutput] = {}
    arriving.reverse()
    while arriving or core.has_requests:
        for _ in range(min(ARRIVALS_PER_STEP, len(arriving))):
            core.add(arriving.pop()[0].message)
        for output in core.step():
            request, it = of_sequence[output.sequence_id]
            if request.finished:
                continue
            results[request.request_id], must_abort = request.take(output)
            if must_abort:
                core.abort(output.sequence_id)
            if it.abort_after is not None and request.num_generated_tokens >= it.abort_after and not request.finished:
                results[request.request_id] = request.end("abort")
                for name in request.sequence_ids:
                    core.abort(name)
    return [results[str(index)] for index in range(len(work))]


def test_a_random_workload_gives_the_same_in_every_mode(model: Model, full: bool) -> None:
    work = workload(model.prompts, FULL_NUM_REQUESTS if full else NUM_REQUESTS)
    given: dict[str, list[RequestOutput]] = {}
    for mode in LOOPS:
        with model.host(caching=True, num_blocks=model.case.crowded_pool, mode=mode) as scheduler:
            given[mode] = serve(model, work)
            assert scheduler.num_preemptions > 0, mode
    reasons = {sequence.finish_reason for output in given["sync"] for sequence in output.outputs}
    assert reasons == {"stop", "length", "abort"}
    for mode in ("overlap", "resident"):
        for it, output, expected in zip(work, given[mode], given["sync"], strict=True):
            for got, wanted in zip(output.outputs, expected.outputs, strict=True):
                if it.abort_after is None:
                    assert (got.token_ids, got.text, got.finish_reason) == (
                        wanted.token_ids,
                        wanted.text,
                        wanted.finish_reason,
                    )
                else:  # how much comes before an abort is a matter of time
                    assert all(x == y for x, y in zip(got.token_ids, wanted.token_ids, strict=False))
