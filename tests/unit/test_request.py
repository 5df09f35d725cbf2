"""A request's own bookkeeping: which tokens are known, and when and why it ends."""

from typing import Any

import pytest

from jaxpage.kv_cache.hashing import ExtraKeys, block_keys
from jaxpage.requests.request import Request, RequestStatus, SamplerKind
from jaxpage.sampling_params import SamplingParams

EOS = 2
STOP = 50


def request(
    *, prompt: list[int] | None = None, max_tokens: int = 100, min_tokens: int = 0, stop: tuple[int, ...] = (STOP,)
) -> Request:
    """A request that ends at `EOS`, the model's, and at `STOP`, its own."""
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop)
    prompt = [5, 6, 7] if prompt is None else prompt
    return Request("a", prompt, params, 0, max_tokens, frozenset((EOS, *stop)))


def test_a_new_request_waits_with_its_prompt_known_and_nothing_computed() -> None:
    new = request(prompt=[5, 6, 7])
    assert new.status is RequestStatus.WAITING
    assert not new.is_finished
    assert (new.token_ids, new.num_tokens, new.num_prompt_tokens, new.num_output_tokens) == ([5, 6, 7], 3, 3, 0)
    assert (new.num_computed_tokens, new.row) == (0, -1)


@pytest.mark.parametrize(
    ("params", "fields", "draw"),
    [
        ({"temperature": 0.0}, {}, SamplerKind.GREEDY),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5}, {}, SamplerKind.GREEDY),
        ({}, {}, SamplerKind.RANDOM),
        ({"temperature": 0.7, "min_p": 0.1, "seed": 3}, {}, SamplerKind.RANDOM),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}, {}, SamplerKind.FILTERED),
        ({"top_k": 5}, {}, SamplerKind.FILTERED),
        ({"top_p": 0.9}, {}, SamplerKind.FILTERED),
        ({"temperature": 0.0}, {"num_logprobs": 0}, SamplerKind.ANY),
        ({}, {"num_logprobs": 5}, SamplerKind.ANY),
        ({}, {"bad_words": [[4, 5]]}, SamplerKind.ANY),
        ({}, {"own_processors": 2}, SamplerKind.ANY),
        ({"logit_bias": {4: 1.0}}, {}, SamplerKind.ANY),
        ({"allowed_token_ids": (4, 5)}, {}, SamplerKind.ANY),
        ({"min_tokens": 3}, {}, SamplerKind.ANY),
        ({"repetition_penalty": 1.1}, {}, SamplerKind.ANY),
        ({"presence_penalty": -0.1}, {}, SamplerKind.ANY),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, {}, SamplerKind.ANY),
    ],
)
def test_how_it_is_drawn_is_the_least_that_does_all_it_asks_for(
    params: dict[str, Any], fields: dict[str, Any], draw: SamplerKind
) -> None:
    new = Request("a", [5, 6, 7], SamplingParams(**params), 0, 9, frozenset(), **fields)
    assert new.sampler_kind is draw


def test_generated_tokens_are_known_tokens_and_leave_the_prompt_alone() -> None:
    prompt = [5, 6, 7]
    grown = request(prompt=prompt)
    assert grown.append(8) == (None, None)
    assert grown.append(9) == (None, None)
    assert (grown.token_ids, grown.num_tokens, grown.num_output_tokens) == ([5, 6, 7, 8, 9], 5, 2)
    assert (prompt, grown.prompt_token_ids, grown.num_prompt_tokens) == ([5, 6, 7], [5, 6, 7], 3)


def test_its_own_stop_token_ends_it_and_is_named() -> None:
    stopped = request()
    assert stopped.append(8) == (None, None)
    assert stopped.append(STOP) == ("stop", STOP)
    assert stopped.token_ids[-1] == STOP


def test_the_models_eos_ends_it_without_being_named() -> None:
    assert request().append(EOS) == ("stop", None)


def test_an_eos_that_is_also_its_own_stop_token_is_named() -> None:
    assert request(stop=(EOS,)).append(EOS) == ("stop", EOS)


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    assert request(prompt=[EOS, STOP]).append(8) == (None, None)


def test_eos_is_a_token_like_any_other_when_it_is_no_stop() -> None:
    params = SamplingParams(ignore_eos=True)
    ignoring = Request("a", [5], params, 0, 2, frozenset())
    assert ignoring.append(EOS) == (None, None)
    assert ignoring.append(EOS) == ("length", None)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_it_ends_for_length_with_exactly_max_tokens(max_tokens: int) -> None:
    limited = request(max_tokens=max_tokens)
    reasons = [limited.append(8)[0] for _ in range(max_tokens)]
    assert reasons == [None] * (max_tokens - 1) + ["length"]
    assert limited.num_output_tokens == max_tokens


@pytest.mark.parametrize(("token_id", "end"), [(STOP, ("stop", STOP)), (EOS, ("stop", None))])
def test_a_stop_token_that_is_also_the_last_one_allowed_counts_as_a_stop(
    token_id: int, end: tuple[str, int | None]
) -> None:
    last = request(max_tokens=2)
    last.append(8)
    assert last.append(token_id) == end


@pytest.mark.parametrize("token_id", [STOP, EOS])
def test_no_stop_token_is_obeyed_among_the_first_min_tokens(token_id: int) -> None:
    held = request(min_tokens=3)
    assert [held.append(token_id)[0] for _ in range(4)] == [None, None, None, "stop"]


def test_length_ends_a_request_whose_min_tokens_equal_its_max_tokens() -> None:
    held = request(min_tokens=2, max_tokens=2)
    assert held.append(STOP) == (None, None)
    assert held.append(STOP) == ("length", None)


def test_length_counts_what_the_context_left_and_not_what_was_asked() -> None:
    clamped = Request("a", [5], SamplingParams(max_tokens=100), 0, 1, frozenset())
    assert clamped.append(8) == ("length", None)


def test_only_a_finished_request_is_finished() -> None:
    some = request()
    for status in RequestStatus:
        some.status = status
        assert some.is_finished == (status is RequestStatus.FINISHED)


# Names of its blocks.


def test_its_block_keys_are_those_of_its_known_tokens() -> None:
    named = request(prompt=[5, 6, 7])
    assert named.block_keys(4) == []
    named.append(8)
    assert named.block_keys(4) == block_keys([5, 6, 7, 8], 4)
    for token_id in range(10, 19):
        named.append(token_id)
        assert named.block_keys(4) == block_keys(named.token_ids, 4)


def test_its_block_keys_know_what_else_its_kv_depends_on() -> None:
    salted, plain = request(prompt=[5, 6, 7, 8]), request(prompt=[5, 6, 7, 8])
    salted.extra_keys = ExtraKeys(cache_salt="a")
    assert salted.block_keys(4) == block_keys([5, 6, 7, 8], 4, extra=ExtraKeys(cache_salt="a")) != plain.block_keys(4)


def test_it_reads_the_prefix_cache_unless_asked_not_to() -> None:
    assert request().reads_prefix_cache
    params = SamplingParams(skip_reading_prefix_cache=True)
    assert not Request("a", [5], params, 0, 1, frozenset()).reads_prefix_cache
