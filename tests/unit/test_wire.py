"""Messages between the processes: they arrive as they were sent, and nothing else arrives."""

import msgspec
import pytest

from jaxpage import wire
from jaxpage.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

FULL_PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=-1,
    min_p=0.05,
    seed=-(2**63),
    max_tokens=None,
    min_tokens=3,
    stop=("🦙", "\n\n", "\u0001"),
    stop_token_ids=(0, 7),
    include_stop_str_in_output=True,
    ignore_eos=True,
    skip_special_tokens=False,
    n=128,
    logprobs=0,
    prompt_logprobs=-1,
    repetition_penalty=1.25,
    presence_penalty=-2,
    frequency_penalty=0.1,
    logit_bias={0: -100, 49151: 0.5},
    allowed_token_ids=(0, 49151),
    bad_words=("🦙", " two words"),
    logits_processors=("own",),
    skip_reading_prefix_cache=True,
    structured_outputs=StructuredOutputsParams(json={"enum": ["🦙"]}, preamble='preamble: "Hm."'),
    shown_special_tokens=("[TOOL_CALLS]", "🦙"),
)
FULL_BEAM = BeamSearchParams(
    beam_width=16,
    max_tokens=7,
    length_penalty=-0.5,
    early_stopping="never",
    stop_token_ids=(5,),
    ignore_eos=True,
    skip_special_tokens=False,
    shown_special_tokens=("[TOOL_CALLS]",),
)
TO_ENGINE: list[wire.ToEngine] = [
    wire.AddRequest("r-1", [1, 2, 3], SamplingParams(), 5, 16),
    wire.AddRequest("é\u0000🦙", [0, 2**31 - 1], FULL_PARAMS, 2**63 - 1, 1),
    wire.AddRequest("r-2", list(range(5000)), SamplingParams(temperature=0, max_tokens=1), -(2**63), 2**31),
    wire.AddRequest("r-3", [1], SamplingParams(), 0, 7, -(2**63) + 1, "salt: 🦙", FULL_BEAM),
    wire.AddRequest("r-4", [1], SamplingParams(), 0, 7, beam=BeamSearchParams(beam_width=1, early_stopping=True)),
    wire.AddRequest("r-5", [1], SamplingParams(bad_words=("a",)), 0, 7, bad_words=[[1], [2, 3]]),
    wire.AddRequest("r-6", [1], SamplingParams(), 0, 1, pooling="mean"),
    wire.AbortRequests([]),
    wire.AbortRequests(["r-1", "r-2#7"]),
    wire.Call(2**40, "kv_cache_snapshot"),
]
FROM_ENGINE: list[wire.FromEngine] = [
    wire.Ready(8192, 49152, [2, 0], 4096, 16, 8, ["own"], [100, 50], 576),
    wire.Ready(1, 1, [], 2, 1, 1, [], [], 1),
    wire.Outputs([], {}),
    wire.Outputs(
        [
            wire.TokenOutput("r-1", [5]),
            wire.TokenOutput("r-6", [], "stop", pooled=b"\x00\xff\x80\x3f"),
            wire.TokenOutput("r-2", [5, 6, 7], "stop", 7),
            wire.TokenOutput("r-3", [8], "length"),
            wire.TokenOutput("r-4", [2], "stop", None),
        ],
        {"num_requests_running": 4, "kv_cache_usage_perc": 0.25},
    ),
    wire.Outputs(
        [
            wire.TokenOutput(
                "r-1", [5], num_cached_tokens=16, logprobs=[wire.TokenLogprobs(-0.25, 2, [(7, -0.1), (5, -0.25)])]
            ),
            wire.TokenOutput("r-1#1", [6], logprobs=[wire.TokenLogprobs(-9.5, 100, [])]),
            wire.TokenOutput("r-4", [6], logprobs=[wire.TokenLogprobs(-9.5, 100, [], b"\x00\xff" * 100)]),
            wire.TokenOutput("r-5", [6], prompt_logprobs=[wire.TokenLogprobs(-9.5, 1, [(3, -9.5)])]),
            wire.BeamOutput("r-2", [wire.BeamSequence([5, 2], -1.5, -0.75, "stop")], 32),
            wire.BeamOutput("r-3", []),
        ],
        {},
    ),
    wire.Returned(0, True),
    wire.Returned(2**40, {"num_blocks": 80, "groups": [{"kind": "full", "span": None}], "requests": []}),
    wire.Dead("RuntimeError", "out of memory: 🦙"),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_a_message_to_the_engine_arrives_as_it_was_sent(message: wire.ToEngine) -> None:
    arrived = wire.decode_to_engine(wire.encode(message))
    assert type(arrived) is type(message)
    assert arrived == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_a_message_from_the_engine_arrives_as_it_was_sent(message: wire.FromEngine) -> None:
    arrived = wire.decode_from_engine(wire.encode(message))
    assert type(arrived) is type(message)
    assert arrived == message


def test_sequences_of_parameters_arrive_as_tuples() -> None:
    sent = wire.AddRequest("r", [1], FULL_PARAMS, 0, 1)
    arrived = wire.decode_to_engine(wire.encode(sent))
    assert isinstance(arrived, wire.AddRequest)
    assert isinstance(arrived.params.stop, tuple)
    assert isinstance(arrived.params.stop_token_ids, tuple)
    assert hash(arrived.params) == hash(FULL_PARAMS)


def test_neither_side_takes_the_other_sides_messages() -> None:
    for to_engine in TO_ENGINE:
        with pytest.raises(msgspec.ValidationError):
            wire.decode_from_engine(wire.encode(to_engine))
    for from_engine in FROM_ENGINE:
        with pytest.raises(msgspec.ValidationError):
            wire.decode_to_engine(wire.encode(from_engine))


GARBAGE = [b"", b"\xff", b"\x00", b"\xc1", b"hello", b"\x93\xa3add", b"\x80\x04\x95."]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_bytes_that_are_no_message_are_refused(garbage: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(garbage)
    with pytest.raises(msgspec.DecodeError):
        wire.decode_from_engine(garbage)


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["nonsense"],
        ["add"],
        ["add", "r", [1], {}, 0],
        ["add", "r", ["a"], {}, 0, 1],
        ["add", "r", [1], [], 0, 1],
        ["add", 5, [1], {}, 0, 1],
        ["add", "r", [1], {}, 0, 1, "high"],
        ["add", "r", [1], {}, 0, 1, 0, 5],
        ["add", "r", [1], {}, 0, 1, 0, None, {}],
        ["abort", "r"],
        ["call", "reset_prefix_cache"],
        ["returned", "1", True],
        ["ready", 1, 1, [2], 2],
        ["outputs", [["r"]], {}],
        ["outputs", [["r", [1], 3]], {}],
        ["dead", "kind"],
    ],
)
def test_a_message_with_missing_or_wrong_fields_is_refused(fields: list[object]) -> None:
    packed = wire.encode(fields)
    with pytest.raises(msgspec.ValidationError):
        wire.decode_to_engine(packed)
    with pytest.raises(msgspec.ValidationError):
        wire.decode_from_engine(packed)


def test_parameters_are_checked_again_on_arrival() -> None:
    packed = wire.encode(["add", "r", [1], {"temperature": -1.0}, 0, 1])
    with pytest.raises(msgspec.ValidationError, match=r"temperature is -1\.0"):
        wire.decode_to_engine(packed)


def test_beam_search_parameters_are_checked_again_on_arrival() -> None:
    packed = wire.encode(["add", "r", [1], {}, 0, 1, 0, None, {"beam_width": 17}])
    with pytest.raises(msgspec.ValidationError, match="beam_width is 17"):
        wire.decode_to_engine(packed)


def test_the_first_sequence_has_the_requests_own_name_and_all_names_differ() -> None:
    names = [wire.sequence_id("r", index) for index in range(128)]
    assert names[0] == "r"
    assert len(set(names)) == 128


def test_every_cut_of_a_message_is_refused() -> None:
    packed = wire.encode(wire.AddRequest("r-1", [1, 2, 300], FULL_PARAMS, 5, 16))
    for length in range(len(packed)):
        with pytest.raises(msgspec.DecodeError):
            wire.decode_to_engine(packed[:length])
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(packed + b"\x00")
