"""Sampling parameters: the edges of what is accepted, and what a refusal says."""

from typing import Any

import msgspec
import pytest

from jaxpage.errors import JaxpageError, RequestError
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

ACCEPTED: list[tuple[str, list[Any]]] = [
    ("temperature", [0, 0.0, 1e-9, 0.01, 1, 2, 2.0]),
    ("top_p", [1e-9, 0.5, 1, 1.0]),
    ("top_k", [-1, 0, 1, 50, 1_000_000]),
    ("min_p", [0, 0.0, 0.5, 1, 1.0]),
    ("seed", [None, -1, 0, 1, -2, 2**63 - 1, -(2**63)]),
    ("max_tokens", [None, 1, 16, 1_000_000]),
    ("min_tokens", [0, 1, 16]),
    ("stop", [(), ("a",), ("\n", "END"), ("\u0001",)]),
    ("stop_token_ids", [(), (0,), (5, 7), tuple(range(MAX_STOP_TOKEN_IDS))]),
    ("include_stop_str_in_output", [False, True]),
    ("ignore_eos", [False, True]),
    ("skip_special_tokens", [False, True]),
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
    culprit = value[-1] if isinstance(value, tuple) else value
    assert error.param == name
    assert str(error).startswith(f"{name} is {culprit!r}: it must be ")


def test_the_tables_above_cover_every_field() -> None:
    fields = {field.name for field in msgspec.structs.fields(SamplingParams)}
    switches = {"include_stop_str_in_output", "ignore_eos", "skip_special_tokens"}
    assert {name for name, _ in ACCEPTED} == fields
    assert {name for name, _ in REFUSED} == fields - switches


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
