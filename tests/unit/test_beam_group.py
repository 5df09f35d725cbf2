"""A beam group: it advances when all live beams have reported, and each beam then knows its source's tokens."""

from jaxpage.kv_cache.hashing import block_keys
from jaxpage.requests.beam_group import BeamGroup
from jaxpage.requests.beam_search import BeamSearch
from jaxpage.requests.request import Request
from jaxpage.requests.request_group import Continuation
from jaxpage.sampling_params import BeamSearchParams, SamplingParams
from jaxpage.wire import BeamOutput, BeamSequence, TokenLogprobs

EOS = 0
PROMPT = [5, 6, 7]


def group(width: int = 3, max_tokens: int = 10) -> BeamGroup:
    beams = [
        Request(f"a#{index}", list(PROMPT), SamplingParams(), 0, max_tokens, frozenset({EOS}), index=index)
        for index in range(width)
    ]
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
    return BeamGroup(BeamSearch(params, frozenset({EOS})), beams)


def report(beams: BeamGroup, beam: Request, *logprobs: tuple[int, float]) -> list[Continuation] | BeamOutput | None:
    return beams.take(beam, TokenLogprobs(0.0, 1, list(logprobs)))


def spread(beams: BeamGroup, *logprobs: tuple[int, float]) -> list[Continuation] | BeamOutput | None:
    """Take the first step of a search."""
    beams.members[0].num_computed_tokens = len(PROMPT)
    return report(beams, beams.members[0], *logprobs)


def known(beams: BeamGroup) -> list[list[int]]:
    return [beam.token_ids for beam in beams.live]


def test_a_search_begins_with_its_prompt_alone_and_every_beam_knows_its_group() -> None:
    beams = group()
    assert beams.live == [beams.members[0]]
    assert all(beam.group is beams for beam in beams.members)


def test_the_first_step_spreads_the_prompt_over_the_beams_best_first() -> None:
    beams = group()
    continuations = spread(beams, (11, -1.0), (12, -2.0), (13, -3.0), (14, -4.0))
    assert continuations == [Continuation(0, 11), Continuation(0, 12), Continuation(0, 13)]
    assert known(beams) == [[*PROMPT, 11], [*PROMPT, 12], [*PROMPT, 13]]
    assert [beam.num_computed_tokens for beam in beams.live] == [3, 3, 3]


def test_a_search_with_fewer_candidates_than_beams_has_fewer_live_ones() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -2.0))
    assert beams.live == beams.members[:2]
    assert beams.members[2].token_ids == PROMPT


def test_the_group_waits_until_all_live_beams_have_reported_in_any_order() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -2.0), (13, -3.0))
    first, second, third = beams.live
    assert report(beams, third, (23, -1.0)) is None
    assert report(beams, first, (21, -1.0)) is None
    assert report(beams, second, (22, -1.0)) == [Continuation(0, 21), Continuation(1, 22), Continuation(2, 23)]


def test_each_beam_goes_on_from_its_source_as_that_was_before() -> None:
    beams = group()
    spread(beams, (11, -1.0), (12, -1.5), (13, -9.0))
    for beam, candidates in zip(beams.live, ([(21, -5.0)], [(22, -1.0), (23, -2.0)], [(24, -9.0)]), strict=True):
        beam.num_computed_tokens = 4
        continuations = report(beams, beam, *candidates)
    assert continuations == [Continuation(1, 22), Continuation(1, 23), Continuation(0, 21)]
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
        report(beams, beam, *candidates)
    for beam in beams.live:
        assert beam.block_keys(4) == block_keys(beam.token_ids, 4)
    # Beams of one source do not share a list that each makes longer.
    assert len({id(beam.keys) for beam in beams.live}) == 3


def test_reports_that_were_dropped_are_awaited_again() -> None:
    beams = group(width=2)
    spread(beams, (11, -1.0), (12, -2.0))
    report(beams, beams.live[0], (21, -1.0))
    beams.forget()
    assert report(beams, beams.live[1], (22, -1.0)) is None
    assert report(beams, beams.live[0], (31, -1.0)) is not None
    assert known(beams)[0] == [*PROMPT, 11, 31]


def test_a_search_that_is_over_gives_what_it_has_found() -> None:
    beams = group(width=2, max_tokens=1)
    output = spread(beams, (11, -1.0), (EOS, -2.0), (12, -3.0))
    assert output == BeamOutput(
        "a#0", [BeamSequence([11], -1.0, -1.0, "length"), BeamSequence([EOS], -2.0, -2.0, "stop")]
    )
    assert beams.live == [beams.members[0]]


def test_beams_that_died_can_live_again() -> None:
    beams = group(width=2)
    spread(beams, (11, -1.0))
    assert len(beams.live) == 1
    report(beams, beams.live[0], (21, -1.0), (22, -2.0))
    assert known(beams) == [[*PROMPT, 11, 21], [*PROMPT, 11, 22]]
