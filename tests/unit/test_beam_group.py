"""A beam group: it advances when all live beams have reported, and each beam then knows its source's tokens."""

from jaxpage.kv_cache.hashing import block_keys
from jaxpage.requests.beam_group import BeamGroup
from jaxpage.requests.beam_search import BeamSearch, Continuation
from jaxpage.requests.request import Request
from jaxpage.sampling_params import BeamSearchParams, SamplingParams

EOS = 0
PROMPT = [5, 6, 7]


def group(width: int = 3, max_tokens: int = 10) -> BeamGroup:
    beams = [
        Request(f"a#{index}", list(PROMPT), SamplingParams(), 0, max_tokens, frozenset({EOS}), index=index)
        for index in range(width)
    ]
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    return BeamGroup(BeamSearch(params, frozenset({EOS})), beams)


def spread(beams: BeamGroup, *logprobs: tuple[int, float]) -> list[Continuation]:
    """Take the first step of a search."""
    beams.beams[0].num_computed_tokens = len(PROMPT)
    assert beams.report(beams.beams[0], logprobs)
    return beams.advance()


def known(beams: BeamGroup) -> list[list[int]]:
    return [beam.token_ids for beam in beams.live]


def test_a_search_begins_with_its_prompt_alone_and_every_beam_knows_its_group() -> None:
    beams = group()
    assert beams.live == [beams.beams[0]]
    assert all(beam.beams is beams for beam in beams.beams)


def test_the_first_step_spreads_the_prompt_over_the_beams_best_first() -> None:
    beams = group()
    continuations = spread(beams, (11, -1.0), (12, -2.0), (13, -3.0), (14, -4.0))
    assert continuations == [Continuation(0, 11), Continuation(0, 12), Continuation(0, 13)]
    assert known(beams) == [[*PROMPT, 11], [*PROMPT, 12], [*PROMPT, 13]]
    assert [beam.num_computed_tokens for beam in beams.live] == [3, 3, 3]


def test_a_search_with_fewer_candidates_than_beams_has_fewer_live_ones() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -2.0))
    assert beams.live == beams.beams[:2]
    assert beams.beams[2].token_ids == PROMPT


def test_the_group_waits_until_all_live_beams_have_reported_in_any_order() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -2.0), (13, -3.0))
    first, second, third = beams.live
    assert not beams.report(third, [(23, -1.0)])
    assert not beams.report(first, [(21, -1.0)])
    assert beams.report(second, [(22, -1.0)])
    assert beams.advance() == [Continuation(0, 21), Continuation(1, 22), Continuation(2, 23)]


def test_each_beam_goes_on_from_its_source_as_that_was_before() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -1.5), (13, -9.0))
    for beam, candidates in zip(beams.live, ([(21, -5.0)], [(22, -1.0), (23, -2.0)], [(24, -9.0)]), strict=True):
        beam.num_computed_tokens = 4
        beams.report(beam, candidates)
    assert beams.advance() == [Continuation(1, 22), Continuation(1, 23), Continuation(0, 21)]
    assert known(beams) == [[*PROMPT, 12, 22], [*PROMPT, 12, 23], [*PROMPT, 11, 21]]
    assert [beam.num_computed_tokens for beam in beams.live] == [4, 4, 4]
    beams.live[0].token_ids.append(99)
    assert known(beams)[1] == [*PROMPT, 12, 23]


def test_the_block_keys_of_a_beam_are_those_of_its_own_tokens() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -1.5), (13, -2.0))
    for beam in beams.live:
        beam.block_keys(4)
    for beam, candidates in zip(beams.live, ([(21, -9.0)], [(22, -1.0), (23, -2.0)], [(24, -9.0)]), strict=True):
        beams.report(beam, candidates)
    beams.advance()
    for beam in beams.live:
        assert beam.block_keys(4) == block_keys(beam.token_ids, 4)
    # Beams of one source do not share a list that each makes longer.
    assert len({id(beam.keys) for beam in beams.live}) == 3


def test_reports_that_were_dropped_are_awaited_again() -> None:
    beams = group(width=2)
    spread(beams, (11, -1.0), (12, -2.0))
    beams.report(beams.live[0], [(21, -1.0)])
    beams.forget()
    assert not beams.report(beams.live[1], [(22, -1.0)])
    assert beams.report(beams.live[0], [(31, -1.0)])
    beams.advance()
    assert known(beams)[0] == [*PROMPT, 11, 31]


def test_a_search_that_is_over_goes_on_with_nothing_and_has_its_results() -> None:
    beams = group(width=2, max_tokens=1)
    assert spread(beams, (11, -1.0), (EOS, -2.0), (12, -3.0)) == []
    assert [result.token_ids for result in beams.search.results()] == [(11,), (EOS,)]
    assert beams.live == [beams.beams[0]]


def test_beams_that_died_can_live_again() -> None:
    beams = group(width=2)
    spread(beams, (11, -1.0))
    assert len(beams.live) == 1
    assert beams.report(beams.live[0], [(21, -1.0), (22, -2.0)])
    beams.advance()
    assert known(beams) == [[*PROMPT, 11, 21], [*PROMPT, 11, 22]]
