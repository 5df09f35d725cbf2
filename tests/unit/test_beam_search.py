"""Beam search on models small enough to work out by hand, or to try every sequence of."""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from jaxpage.errors import RequestError
from jaxpage.requests.beam_search import BeamSearch, FinishedBeam
from jaxpage.requests.request_group import Continuation
from jaxpage.sampling_params import MAX_BEAM_WIDTH, MAX_STOP_TOKEN_IDS, BeamSearchParams

EOS = 0
A, B, C = 1, 2, 3

Model = Callable[[tuple[int, ...]], Mapping[int, float]]
"""Output so far -> token id -> log-probability."""


def scripted(script: dict[tuple[int, ...], dict[int, float]]) -> Model:
    """Allows what the script says and nothing else."""
    return lambda output: script.get(output, {})


def random_model(seed: int, vocab_size: int) -> Model:
    def logprobs(output: tuple[int, ...]) -> dict[int, float]:
        random = np.random.RandomState(zlib.crc32(repr((seed, output)).encode()))
        return dict(enumerate(np.log(random.dirichlet(np.full(vocab_size, 0.5)) + 1e-9).tolist()))

    return logprobs


def candidates_of(model: Model, outputs: Sequence[tuple[int, ...]], count: int) -> list[list[tuple[int, float]]]:
    return [sorted(model(output).items(), key=lambda pair: -pair[1])[:count] for output in outputs]


def run(model: Model, eos_token_ids: Sequence[int] = (EOS,), count: int | None = None, **options: Any) -> BeamSearch:
    """A whole search, `count` candidates to a beam; by default as many as it asks for."""
    search = BeamSearch(BeamSearchParams(**options), frozenset(eos_token_ids))
    live: list[tuple[int, ...]] = [()]
    while live:
        assert not search.finished
        continuations = search.advance(candidates_of(model, live, count or search.num_candidates))
        live = [(*live[beam.source], beam.token_id) for beam in continuations]
    assert search.finished
    return search


def found(model: Model, **options: Any) -> list[tuple[int, ...]]:
    return [beam.token_ids for beam in run(model, **options).results()]


def every_sequence(model: Model, max_tokens: int, length_penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    """(Score, tokens) of all complete sequences, best first."""
    complete, open_ends = [], [((), 0.0)]
    while open_ends:
        output, logprob = open_ends.pop()
        if EOS in output or len(output) == max_tokens:
            complete.append((logprob / len(output) ** length_penalty, output))
            continue
        open_ends += [((*output, token_id), logprob + step) for token_id, step in model(output).items()]
    return sorted(complete, reverse=True)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_a_score_counts_every_generated_token_and_the_ending_one(length_penalty: float) -> None:
    model = scripted({(): {A: -1.0}, (A,): {B: -1.0}, (A, B): {EOS: -0.5}})
    (beam,) = run(model, beam_width=1, length_penalty=length_penalty).results()
    score = pytest.approx(-2.5 / 3**length_penalty)
    assert beam == FinishedBeam((A, B, EOS), pytest.approx(-2.5), score, "stop")  # type: ignore[arg-type]


def test_a_sequence_may_end_with_its_first_token() -> None:
    beam = run(scripted({(): {EOS: -0.1, A: -3.0}}), beam_width=2).results()[0]
    assert beam == FinishedBeam((EOS,), -0.1, -0.1, "stop")


def test_at_max_tokens_the_best_candidates_are_results_whether_they_end_or_not() -> None:
    model = scripted({(): {A: -1.0, B: -1.5}, (A,): {C: -1.0, EOS: -1.1, A: -1.3, B: -9.0}, (B,): {C: -9.0}})
    results = run(model, beam_width=3, max_tokens=2).results()
    assert [(beam.token_ids, beam.finish_reason) for beam in results] == [
        ((A, C), "length"),
        ((A, EOS), "stop"),
        ((A, A), "length"),
    ]


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_a_search_in_which_nothing_ends_takes_max_tokens_steps(max_tokens: int) -> None:
    results = run(random_model(1, 40), eos_token_ids=(), beam_width=4, max_tokens=max_tokens).results()
    assert [len(beam.token_ids) for beam in results] == [max_tokens] * 4
    assert {beam.finish_reason for beam in results} == {"length"}


def test_beams_go_on_best_first_with_the_index_of_the_one_they_come_from() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=3), frozenset([EOS]))
    assert search.advance([[(A, -1.0), (B, -2.0), (C, -3.0)]]) == [
        Continuation(0, A),
        Continuation(0, B),
        Continuation(0, C),
    ]
    step = [[(A, -4.0), (B, -6.0)], [(C, -0.5), (B, -1.0)], [(A, -1.5), (C, -5.0)]]
    assert search.advance(step) == [Continuation(1, C), Continuation(1, B), Continuation(2, A)]


def test_an_ending_takes_no_place_of_a_beam_that_goes_on() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset([EOS]))
    assert search.advance([[(EOS, -0.5), (A, -1.0), (B, -2.0)]]) == [Continuation(0, A), Continuation(0, B)]
    assert [beam.token_ids for beam in search.results()] == [(EOS,)]


def test_an_ending_ranked_below_beam_width_is_dropped() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset([EOS]))
    assert len(search.advance([[(A, -0.5), (B, -1.0), (EOS, -1.1)]])) == 2
    assert search.results() == []


def test_of_equal_candidates_the_first_of_the_first_beam_wins() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=2), frozenset([EOS]))
    assert search.advance([[(C, -1.0), (B, -1.0), (A, -1.0)]]) == [Continuation(0, C), Continuation(0, B)]
    step = [[(B, -1.0), (A, -1.0)], [(C, -1.0), (A, -1.0)]]
    assert search.advance(step) == [Continuation(0, B), Continuation(0, A)]


def test_of_equal_scores_the_one_found_earlier_comes_first() -> None:
    model = scripted({(): {C: -1.0, A: -1.5}, (C,): {EOS: -1.0}, (A,): {A: -0.75}, (A, A): {EOS: -0.75}})
    assert found(model, beam_width=2) == [(C, EOS), (A, A, EOS)]


STOPPING = scripted(
    {
        (): {EOS: -1.0, A: -1.2, B: -8.0},
        (A,): {B: -0.1, EOS: -0.4},  # two are finished: scores -1.0 and -0.8; a live one at -1.3 / 2
        (A, B): {EOS: -0.1, C: -2.7},  # -1.4 / 3 replaces -1.0; a live one at -4.0 / 3, which is below -0.8
        (A, B, C): {A: 0.0, B: -9.0},
        (A, B, C, A): {A: 0.0, B: -9.0},
        (A, B, C, A, A): {EOS: 0.0, B: -9.0},  # -4.0 / 6 replaces -0.8
    }
)


@pytest.mark.parametrize(
    ("early_stopping", "results"),
    [
        (True, [(A, EOS), (EOS,)]),
        (False, [(A, B, EOS), (A, EOS)]),
        ("never", [(A, B, EOS), (A, B, C, A, A, EOS)]),
    ],
)
def test_early_stopping_says_when_a_search_with_enough_results_ends(
    early_stopping: Any, results: list[tuple[int, ...]]
) -> None:
    assert found(STOPPING, beam_width=2, max_tokens=8, early_stopping=early_stopping) == results


def test_a_live_beam_that_only_equals_the_worst_result_ends_a_search() -> None:
    model = scripted({(): {EOS: -1.0, A: -1.0}, (A,): {EOS: -0.5}})
    assert found(model, beam_width=1) == [(EOS,)]
    assert found(model, beam_width=1, early_stopping="never") == [(A, EOS)]


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_negative_penalty_lets_no_score_rise_with_length(early_stopping: Any) -> None:
    model = scripted({(): {EOS: -1.0, A: -1.2}, (A,): {B: -0.01, EOS: -0.9}, (A, B): {EOS: -0.01, C: -9.0}})
    # At two tokens the results have -1.0 and -2.1 * 2, and the live beam -1.21 * 2, the best it may reach.
    beams = found(model, beam_width=2, length_penalty=-1, early_stopping=early_stopping)
    assert beams == [(EOS,), (A, B, EOS)]


def test_no_value_of_early_stopping_ends_a_search_short_of_results() -> None:
    model = scripted({(): {EOS: -0.1, A: -50.0}, (A,): {A: -50.0}, (A, A): {EOS: -50.0}})
    for early_stopping in (True, False, "never"):
        assert found(model, beam_width=2, early_stopping=early_stopping) == [(EOS,), (A, A, EOS)]


def test_never_ends_where_max_tokens_leave_no_room_for_a_better_score() -> None:
    steps = []

    def model(output: tuple[int, ...]) -> dict[int, float]:
        steps.append(output)
        return {EOS: -1.0, A: -4.1} if not output else {A: 0.0}

    # The live beam has -4.1, and could reach -4.1 / 4 at best: below -1.0.
    assert found(model, beam_width=1, early_stopping="never", max_tokens=4) == [(EOS,)]
    assert steps == [()]
    assert found(model, beam_width=1, early_stopping="never", max_tokens=5) == [(A, A, A, A, A)]


def test_a_vocabulary_smaller_than_beam_width_gives_each_sequence_once() -> None:
    model = random_model(2, 2)
    results = found(model, beam_width=MAX_BEAM_WIDTH, max_tokens=3)
    assert sorted(results) == sorted(sequence for _, sequence in every_sequence(model, 3, 1.0))


def test_tokens_of_probability_zero_are_never_taken() -> None:
    model = scripted({(): {A: -1.0, B: -math.inf, EOS: -math.inf}, (A,): {B: -1.0, A: -math.inf}})
    assert found(model, beam_width=3, max_tokens=2) == [(A, B)]


def test_a_search_with_no_allowed_token_ends_with_what_it_has() -> None:
    assert found(scripted({(): {A: -math.inf}}), beam_width=2) == []
    assert found(scripted({(): {EOS: -1.0, A: -1.0}}), beam_width=2) == [(EOS,)]


def test_stop_token_ids_end_a_sequence_as_eos_does_and_ignore_eos_leaves_them() -> None:
    model = scripted({(): {A: -1.0}, (A,): {EOS: -1.0}, (A, EOS): {B: -1.0}, (A, EOS, B): {C: -1.0}})
    assert found(model, beam_width=1) == [(A, EOS)]
    assert found(model, beam_width=1, stop_token_ids=[A]) == [(A,)]
    beams = run(model, beam_width=1, ignore_eos=True, stop_token_ids=[B]).results()
    assert [(beam.token_ids, beam.finish_reason) for beam in beams] == [((A, EOS, B), "stop")]


def test_one_beam_is_greedy() -> None:
    for seed in range(20):
        model, output = random_model(seed, 12), ()
        while len(output) < 6 and EOS not in output:
            output = (*output, max(model(output).items(), key=lambda pair: pair[1])[0])
        assert found(model, beam_width=1, max_tokens=6) == [output]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize(("vocab_size", "max_tokens"), [(4, 3), (3, 4)])
def test_a_search_wide_enough_finds_the_best_of_all_sequences_in_order(
    vocab_size: int, max_tokens: int, length_penalty: float
) -> None:
    # No more than 16 candidates before the last token: none is ever dropped.
    for seed in range(25):
        model = random_model(seed, vocab_size)
        search = run(
            model,
            beam_width=MAX_BEAM_WIDTH,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping="never",
        )
        expected = every_sequence(model, max_tokens, length_penalty)[:MAX_BEAM_WIDTH]
        assert [beam.token_ids for beam in search.results()] == [output for _, output in expected]
        np.testing.assert_allclose([beam.score for beam in search.results()], [score for score, _ in expected])


OPTIONS = list(itertools.product((1, 2, 3, 5, 16), (-1.0, 0.0, 0.5, 1.0, 2.0), (False, True, "never")))


@pytest.mark.parametrize(("beam_width", "length_penalty", "early_stopping"), OPTIONS)
def test_results_are_distinct_complete_sequences_with_their_own_scores_best_first(
    beam_width: int, length_penalty: float, early_stopping: Any
) -> None:
    model = random_model(7, 20)
    beams = run(
        model,
        eos_token_ids=(EOS, A, B),
        beam_width=beam_width,
        max_tokens=6,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    ).results()
    assert len({beam.token_ids for beam in beams}) == beam_width
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)
    for beam in beams:
        steps = [model(beam.token_ids[:index])[token_id] for index, token_id in enumerate(beam.token_ids)]
        assert beam.cumulative_logprob == pytest.approx(sum(steps))
        assert beam.score == pytest.approx(sum(steps) / len(steps) ** length_penalty)
        assert not {EOS, A, B} & set(beam.token_ids[:-1])
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] in {EOS, A, B} else "length")
        assert beam.finish_reason == "stop" or len(steps) == 6


@pytest.mark.parametrize("num_endings", [0, 1, 2, 8])
def test_more_candidates_than_asked_for_change_nothing(num_endings: int) -> None:
    for seed, beam_width in itertools.product(range(10), (1, 2, 4)):
        options: dict[str, Any] = {"eos_token_ids": range(num_endings), "beam_width": beam_width, "max_tokens": 5}

        def model(output: tuple[int, ...], seed: int = seed) -> dict[int, float]:
            # Ending tokens are likely, so that they take the first places.
            logprobs = random_model(seed, 30)(output)
            return {token_id: logprob + 4 * (token_id < num_endings) for token_id, logprob in logprobs.items()}

        assert run(model, **options).results() == run(model, count=30, **options).results()


def test_a_step_asks_for_beam_width_candidates_and_one_for_each_ending_token() -> None:
    def num_candidates(**options: Any) -> int:
        return BeamSearch(BeamSearchParams(beam_width=5, **options), frozenset([EOS, A])).num_candidates

    assert num_candidates() == 7
    assert num_candidates(stop_token_ids=(A, B)) == 8
    assert num_candidates(stop_token_ids=(A, B), ignore_eos=True) == 7
    assert num_candidates(ignore_eos=True) == 5


ACCEPTED: list[tuple[str, list[Any]]] = [
    ("beam_width", [1, 2, MAX_BEAM_WIDTH]),
    ("max_tokens", [1, 16, 1_000_000]),
    ("length_penalty", [-10, 0, 0.5, 1, 10.0]),
    ("early_stopping", [False, True, "never"]),
    ("stop_token_ids", [(), (0,), tuple(range(MAX_STOP_TOKEN_IDS))]),
    ("ignore_eos", [False, True]),
    ("skip_special_tokens", [False, True]),
    ("shown_special_tokens", [(), ("[TOOL_CALLS]",)]),
]
REFUSED: list[tuple[str, list[Any]]] = [
    ("beam_width", [0, -1, MAX_BEAM_WIDTH + 1, 1.5, "3", None, True]),
    ("max_tokens", [0, -1, 1.5, "16", None, True]),
    ("length_penalty", [-10.1, 10.1, math.nan, math.inf, "1", None, True]),
    ("early_stopping", [0, 1, None, "always", "Never", 0.0]),
    ("stop_token_ids", [5, None, "5", (-1,), (5, -1), (1.5,), ("a",), (True,)]),
    ("ignore_eos", [0, None, "yes"]),
    ("skip_special_tokens", [1, None, "yes"]),
    ("shown_special_tokens", [None, "[TOOL_CALLS]"]),
]


def cases(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_a_value_up_to_the_edge_is_accepted_and_survives_the_wire(name: str, value: Any) -> None:
    params = BeamSearchParams(**{"beam_width": 2, name: value})
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=BeamSearchParams)
    assert decoded == params
    assert getattr(decoded, name) == value
    assert type(decoded.early_stopping) is type(params.early_stopping)


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_beyond_the_edge_is_refused_by_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 2, name: value})
    culprit = value[-1] if isinstance(value, tuple) else value
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} is {culprit!r}: it must be ")


def test_too_many_stop_token_ids_are_refused_by_their_number() -> None:
    with pytest.raises(RequestError, match=r"stop_token_ids is '65 ids': it must be at most 64 ids"):
        BeamSearchParams(beam_width=2, stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)))


def test_the_tables_above_cover_every_field() -> None:
    fields = {field.name for field in msgspec.structs.fields(BeamSearchParams)}
    assert {name for name, _ in ACCEPTED} == fields
    assert {name for name, _ in REFUSED} == fields


def test_the_largest_penalty_and_max_tokens_do_not_overflow() -> None:
    params = BeamSearchParams(beam_width=1, max_tokens=2**63, length_penalty=10, early_stopping="never")
    search = BeamSearch(params, frozenset([EOS]))
    assert search.advance([[(EOS, -20.0), (A, -30.0)]]) == [Continuation(0, A)]
