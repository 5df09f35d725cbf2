"""Sampling parameters: the edges of what is accepted, and what a refusal says."""

from typing import Any

import msgspec
import pytest

from jaxpage.errors import JaxpageError, RequestError
from jaxpage.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    BeamSearchParams,
    SamplingParams,
    StructuredOutputsParams,
    nth_seed,
)

ACCEPTED: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 0.0, 1e-9, 0.01, 1, 2, 2.0]),
    ("top_p", [1e-9, 0.5, 1, 1.0]),
    ("top_k", [-1, 0, 1, 50, 1_000_000]),
    ("min_p", [0, 0.0, 0.5, 1, 1.0]),
    ("seed", [None, -1, 0, 1, -2, 2**63 - 1, -(2**63)]),
    ("max_tokens", [None, 1, 16, 1_000_000]),
    ("min_tokens", [0, 1, 16]),
    ("stop", [(), ("a",), ("\n", "END"), ("\u0001",), ("a",) * MAX_STOPS]),
    ("stop_token_ids", [(), (0,), (5, 7), tuple(range(MAX_STOP_TOKEN_IDS))]),
    ("include_stop_str_in_output", [False, True]),
    ("ignore_eos", [False, True]),
    ("skip_special_tokens", [False, True]),
    ("shown_special_tokens", [(), ("[TOOL_CALLS]", "[ARGS]")]),
    ("n", [1, 2, MAX_N]),
    ("logprobs", [None, -1, 0, 1, MAX_LOGPROBS]),
    ("prompt_logprobs", [None, -1, 0, 1, MAX_LOGPROBS]),
    ("repetition_penalty", [0.001, 0.5, 1, 1.3, 1000]),
    ("presence_penalty", [-2, -0.5, 0, 2.0]),
    ("frequency_penalty", [-2, -0.5, 0, 2.0]),
    ("logit_bias", [{}, {0: -100}, {5: 100.0, 7: 0}, dict.fromkeys(range(MAX_LOGIT_BIAS), 1.5)]),
    ("allowed_token_ids", [None, (0,), (5, 7), tuple(range(50_000))]),
    ("bad_words", [(), ("a",), ("two words", " x", "\U0001f999")]),
    ("skip_reading_prefix_cache", [False, True]),
    ("logits_processors", [(), ("own",), ("a", "b")]),
    ("structured_outputs", [None, StructuredOutputsParams(json_object=True)]),
]
NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.001, -1, 2.001, NAN, INF, "1", None, True]),
    ("top_p", [0, 0.0, -0.5, 1.001, NAN, INF, "1", None, True]),
    ("top_k", [-2, -100, 1.5, "5", None, True]),
    ("min_p", [-0.001, 1.001, NAN, INF, "0", None, False]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "7", True]),
    ("max_tokens", [0, -1, 1.5, "16", True]),
    ("min_tokens", [-1, 0.5, "0", None, False]),
    ("stop", [("",), ("a", ""), (1,), (None,)]),
    ("stop_token_ids", [(-1,), (5, -1), (1.5,), ("a",), (True,)]),
    ("include_stop_str_in_output", [0, 1, None, "yes"]),
    ("ignore_eos", [0, 1, None, "yes"]),
    ("skip_special_tokens", [0, 1, None, "yes"]),
    ("shown_special_tokens", ["[TOOL_CALLS]", (5,), ("",), None]),
    ("n", [0, -1, MAX_N + 1, 1.5, "2", None, True]),
    ("logprobs", [-2, MAX_LOGPROBS + 1, 1.0, "5", False]),
    ("prompt_logprobs", [-2, MAX_LOGPROBS + 1, 1.0, "5", False]),
    ("repetition_penalty", [0, 0.0, -1, 1e-9, 1001, NAN, INF, "1", None, True]),
    ("presence_penalty", [-2.001, 2.001, NAN, INF, "0", None, False]),
    ("frequency_penalty", [-2.001, 2.001, NAN, INF, "0", None, False]),
    ("logit_bias", [None, 5, "x", [5], [(5, 1)]]),
    ("allowed_token_ids", [(), (-1,), (5, -1), (1.5,), ("a",), (True,)]),
    ("bad_words", [("",), ("a", " "), ("\n\t",), (1,), (None,)]),
    ("skip_reading_prefix_cache", [0, 1, None, "yes"]),
    ("logits_processors", ["own", None]),
    ("structured_outputs", ["json", {"json_object": True}, False]),
]
BEAM_ACCEPTED: list[tuple[str, list[Any]]] = [
    ("beam_width", [1, 2, MAX_BEAM_WIDTH]),
    ("max_tokens", [1, 16, 1_000_000]),
    ("length_penalty", [0, 0.0, -1.5, 1, 2.0, MAX_LENGTH_PENALTY, -MAX_LENGTH_PENALTY]),
    ("early_stopping", [False, True, "never"]),
    ("stop_token_ids", [(), (0,), tuple(range(MAX_STOP_TOKEN_IDS))]),
    ("ignore_eos", [False, True]),
    ("skip_special_tokens", [False, True]),
    ("shown_special_tokens", [(), ("[TOOL_CALLS]", "[ARGS]")]),
]
BEAM_REFUSED: list[tuple[str, list[Any]]] = [
    ("beam_width", [0, -1, MAX_BEAM_WIDTH + 1, 1.5, "2", None, True]),
    ("max_tokens", [0, -1, 1.5, "16", None, True]),
    ("length_penalty", [MAX_LENGTH_PENALTY + 0.1, -MAX_LENGTH_PENALTY - 0.1, NAN, INF, -INF, 10**400, "1", None, True]),
    ("early_stopping", ["always", "", 0, 1, None]),
    ("stop_token_ids", [(-1,), (5, -1), (1.5,), ("a",), (True,)]),
    ("ignore_eos", [0, 1, None, "yes"]),
    ("skip_special_tokens", [0, 1, None, "yes"]),
    ("shown_special_tokens", ["[TOOL_CALLS]", (5,), ("",), None]),
]


def cases(table: list[tuple[str, list[Any]]]) -> list[tuple[str, Any]]:
    return [(name, value) for name, values in table for value in values]


def refusal(**options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    return caught.value


@pytest.mark.parametrize(("name", "value"), cases(ACCEPTED))
def test_a_value_up_to_the_edge_is_accepted_and_kept(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(REFUSED))
def test_a_value_beyond_the_edge_is_refused_by_field_and_value(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    culprit = value[-1] if isinstance(value, tuple) and value else value
    assert error.param == name
    assert str(error).startswith(f"{name} is {culprit!r}: it must be ")


@pytest.mark.parametrize("bias", [{-1: 5}, {"5": 5}, {1.0: 5}, {True: 5}, {5: "x"}, {5: None}, {5: NAN}, {5: True}])
def test_a16_a_bias_that_is_no_number_or_has_no_token_is_refused(bias: dict[Any, Any]) -> None:
    error = refusal(logit_bias={3: 1.0} | bias)
    [(token_id, value)] = bias.items()
    culprit = value if token_id == 5 and isinstance(token_id, int) and not isinstance(token_id, bool) else token_id
    assert error.param == "logit_bias"
    assert str(error).startswith(f"logit_bias is {culprit!r}: it must be a mapping whose ")


def test_a16_a_bias_beyond_100_counts_as_100() -> None:
    params = SamplingParams(logit_bias={1: 1000, 2: -1e300, 3: 99.5})
    assert params.logit_bias == {1: 100, 2: -100, 3: 99.5}


def test_more_biases_than_fit_are_refused_with_their_number() -> None:
    error = refusal(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0))
    assert f"{MAX_LOGIT_BIAS + 1} ids" in str(error)
    assert f"at most {MAX_LOGIT_BIAS}" in str(error)


@pytest.mark.parametrize(("name", "value"), cases(BEAM_ACCEPTED))
def test_a_beam_search_value_up_to_the_edge_is_accepted_and_kept(name: str, value: Any) -> None:
    assert getattr(BeamSearchParams(**{"beam_width": 4, name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), cases(BEAM_REFUSED))
def test_a_beam_search_value_beyond_the_edge_is_refused_by_field_and_value(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 4, name: value})
    culprit = value[-1] if isinstance(value, tuple) else value
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} is {culprit!r}: it must be ")


@pytest.mark.parametrize(
    ("struct", "accepted", "refused"),
    [(SamplingParams, ACCEPTED, REFUSED), (BeamSearchParams, BEAM_ACCEPTED, BEAM_REFUSED)],
)
def test_the_tables_above_cover_every_field(
    struct: type[msgspec.Struct], accepted: list[tuple[str, list[Any]]], refused: list[tuple[str, list[Any]]]
) -> None:
    fields = {field.name for field in msgspec.structs.fields(struct)}
    assert {name for name, _ in accepted} == fields
    assert {name for name, _ in refused} == fields


def test_a_refusal_is_a_value_error_of_the_shared_tree() -> None:
    error = refusal(temperature=-1)
    assert isinstance(error, JaxpageError)
    assert isinstance(error, ValueError)


def test_min_tokens_may_reach_max_tokens_and_no_further() -> None:
    assert SamplingParams(max_tokens=5, min_tokens=5).min_tokens == 5
    error = refusal(max_tokens=5, min_tokens=6)
    assert error.param == "min_tokens"
    assert str(error) == "min_tokens is 6: it must be at most max_tokens=5"


def test_min_tokens_has_no_upper_limit_of_its_own_when_max_tokens_is_the_rest_of_the_context() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=5000).min_tokens == 5000


def test_a_bare_stop_string_is_refused_with_the_way_to_write_it() -> None:
    error = refusal(stop="END")
    assert error.param == "stop"
    assert str(error) == "stop is 'END': it must be a list or a tuple, such as ('END',)"


def test_more_stop_strings_than_can_be_looked_for_at_each_token_are_refused() -> None:
    error = refusal(stop=tuple(f"stop {number}" for number in range(MAX_STOPS + 1)))
    assert error.param == "stop"
    assert str(error) == "stop is '257 strings': it must be at most 256"


def test_more_stop_token_ids_than_have_a_place_are_refused() -> None:
    error = refusal(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)))
    assert error.param == "stop_token_ids"
    assert f"{MAX_STOP_TOKEN_IDS + 1} ids" in str(error)
    assert f"at most {MAX_STOP_TOKEN_IDS} ids" in str(error)


def test_lists_are_accepted_for_sequences_and_become_tuples() -> None:
    stops, ids = ["a", "b"], [1, 2]
    params = SamplingParams(stop=stops, stop_token_ids=ids)  # type: ignore[arg-type]
    stops.append("c")
    ids.append(3)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (1, 2))


def test_parameters_cannot_be_changed_and_equal_ones_hash_alike() -> None:
    params = SamplingParams(stop=["a"])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]
    assert len({params, SamplingParams(stop=("a",))}) == 1


def test_only_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize(("given", "effective"), [(0, 0.0), (1e-9, 0.01), (0.009, 0.01), (0.01, 0.01), (0.7, 0.7)])
def test_temperatures_under_a_hundredth_are_raised_to_it_unless_greedy(given: float, effective: float) -> None:
    assert SamplingParams(temperature=given).effective_temperature == effective


def test_several_sequences_need_a_temperature() -> None:
    assert SamplingParams(temperature=0, n=1).n == 1
    assert SamplingParams(temperature=0.01, n=2).n == 2
    error = refusal(temperature=0, n=2)
    assert error.param == "n"
    assert str(error) == "n is 2: it must be 1 with temperature 0, as all sequences would be equal"


def test_a_beam_search_takes_a_list_of_stop_tokens_and_no_more_than_have_a_place() -> None:
    ids = [3, 4]
    params = BeamSearchParams(beam_width=2, stop_token_ids=ids)  # type: ignore[arg-type]
    ids.append(5)
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_TOKEN_IDS} ids"):
        BeamSearchParams(beam_width=2, stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)))


def test_the_seed_of_a_later_sequence_is_the_first_ones_and_its_index() -> None:
    assert [nth_seed(7, index) for index in range(4)] == [7, 8, 9, 10]
    assert nth_seed(-(2**63), 1) == -(2**63) + 1


@pytest.mark.parametrize("first", [2**63 - 1, 2**63 - 5, -2, -5, -MAX_N, -MAX_N - 1, 0, -(2**63)])
def test_seeds_of_all_sequences_are_int64s_that_differ_and_none_of_them_means_none(first: int) -> None:
    seeds = [nth_seed(first, index) for index in range(MAX_N)]
    assert seeds[0] == first
    assert len(set(seeds)) == MAX_N
    assert -1 not in seeds
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
