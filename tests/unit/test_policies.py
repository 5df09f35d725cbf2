"""Scheduling policies: the order in which requests wait, and who gives way; built in or a user's own."""

import sys
from pathlib import Path

import pytest

from jaxpage.errors import ConfigError
from jaxpage.requests.request import Request
from jaxpage.sampling_params import SamplingParams
from jaxpage.scheduler.policies import FirstComeFirstServed, Priority, load_policy


def request(name: str, arrival: int, priority: int = 0, index: int = 0, num_tokens: int = 1) -> Request:
    prompt = [1] * num_tokens
    return Request(name, prompt, SamplingParams(), 0, 16, frozenset(), arrival, index=index, priority=priority)


A, B, C = request("a", 1, priority=5), request("b", 2, priority=-3), request("c", 3, priority=5)
B1 = request("b1", 2, priority=-3, index=1)


def test_first_come_first_served_goes_by_arrival_and_then_by_index_and_sees_no_priority() -> None:
    assert sorted([C, B1, B, A], key=FirstComeFirstServed().key) == [A, B, B1, C]


def test_first_come_first_served_lets_the_one_admitted_last_give_way() -> None:
    assert FirstComeFirstServed().victim([C, A, B]) is B


def test_priority_goes_by_priority_lower_first_and_then_by_arrival() -> None:
    assert sorted([C, B1, A, B], key=Priority().key) == [B, B1, A, C]


@pytest.mark.parametrize("running", [[A, B, C], [C, B, A], [B, C, A]])
def test_priority_lets_the_last_of_the_least_urgent_give_way_wherever_it_runs(running: list[Request]) -> None:
    assert Priority().victim(running) is C


def test_the_built_in_policies_are_known_by_name() -> None:
    assert isinstance(load_policy("fcfs"), FirstComeFirstServed)
    assert isinstance(load_policy("priority"), Priority)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's own policies."""
    (tmp_path / "own_policies.py").write_text(
        "class ShortestFirst:\n"
        "    def key(self, request): return request.num_prompt_tokens\n"
        "    def victim(self, running): return max(running, key=self.key)\n"
        "class NoVictim:\n"
        "    def key(self, request): return 0\n"
        "class NeedsArguments(ShortestFirst):\n"
        "    def __init__(self, weight): pass\n"
        "class Fails(ShortestFirst):\n"
        "    def __init__(self): raise ValueError('no such weights')\n"
        "number = 3\n"
    )
    (tmp_path / "broken_policies.py").write_text("this is no Python\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_policies", raising=False)
    return "own_policies"


def test_a_users_own_class_is_loaded_by_its_import_path(own_module: str) -> None:
    policy = load_policy(f"{own_module}:ShortestFirst")
    short, long = request("short", 2, num_tokens=3), request("long", 1, num_tokens=30)
    assert sorted([long, short], key=policy.key) == [short, long]
    assert policy.victim([long, short]) is long


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("lifo", "must be one of fcfs, priority, or the import path"),
        ("", "must be one of fcfs, priority, or the import path"),
        ("own_policies:", "must be one of fcfs, priority, or the import path"),
        (":ShortestFirst", "cannot be loaded"),
        ("no_such_module:Policy", "cannot be loaded: No module named 'no_such_module'"),
        ("own_policies:Missing", "cannot be loaded: .*Missing"),
        ("own_policies:NeedsArguments", "cannot be loaded: .*weight"),
        ("own_policies:Fails", "cannot be loaded: no such weights"),
        ("own_policies:number", "cannot be loaded: 'int' object is not callable"),
        ("own_policies:NoVictim", r"has no method victim\(\)"),
        ("broken_policies:Policy", "cannot be loaded: invalid syntax"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_a_policy_that_cannot_be_had_is_refused_with_its_name_and_the_reason(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        load_policy(name)
    assert repr(name) in str(error.value)
