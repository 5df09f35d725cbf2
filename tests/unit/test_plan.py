"""Plans: what the host packs is what the compiled program unpacks, and padding points nowhere."""

import random

import jax
import numpy as np
import pytest

from jaxpage.ops.sampling.token_rules import ANY_TOKEN
from jaxpage.ops.state_spec import KVGroup, KVLayout, KVSpec, PagedPlace
from jaxpage.requests.request import Request
from jaxpage.runner.programs.admit import AdmittedRow, admission_size, pack_admission, unpack_admission
from jaxpage.runner.programs.edit import pack_edits
from jaxpage.runner.programs.fork import pack_forks, unpack_forks
from jaxpage.runner.programs.rules import pack_rules
from jaxpage.runner.state import rules_layout
from jaxpage.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from jaxpage.scheduler.step_plan import AdmittedRequest, RowFork, SchedulerOutput

NOWHERE = np.iinfo(np.int32).max
CAPACITY = 13


def layout_of(*block_sizes: int) -> KVLayout:
    """A layer for each group; larger blocks keep as much less per token."""
    largest = max(block_sizes)
    groups = tuple(KVGroup(KVSpec(largest // size, 8), size) for size in block_sizes)
    return KVLayout(groups, tuple((PagedPlace(index, 0),) for index in range(len(groups))), min(block_sizes))


LAYOUTS = [layout_of(4), layout_of(4, 4, 8)]
WITHOUT_KV = KVLayout((), ((),), 4)
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=["one_group", "three_groups"])


def step_of(
    *, row_forks: list[RowFork] | None = None, block_copies: list[tuple[int, int]] | None = None
) -> SchedulerOutput:
    return SchedulerOutput(row_forks or [], block_copies or [], [], [], [], [], [])


def admitted(rng: random.Random, layout: KVLayout = LAYOUTS[0], **options: object) -> AdmittedRequest:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    token_ids = [rng.randint(0, 2**31 - 2) for _ in range(rng.randint(1, CAPACITY))]
    num_prompt_tokens = rng.randint(1, len(token_ids))
    stops = frozenset({*params.stop_token_ids, *rng.sample(range(1000, 2000), rng.randint(0, 3))})
    seed = params.seed if params.seed is not None else rng.randrange(2**63)
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    request = Request("r", token_ids[:num_prompt_tokens], params, seed, 16, stops, num_logprobs=num_logprobs)
    num_covered = rng.randint(1, len(token_ids))
    tables = [
        [rng.randint(0, 2**31 - 2) for _ in range(-(-num_covered // group.block_size))] for group in layout.groups
    ]
    return AdmittedRequest(rng.randint(0, 500), request, token_ids, rng.randint(0, len(token_ids) - 1), tables)


def unpacked(given: AdmittedRequest, layout: KVLayout = LAYOUTS[0]) -> AdmittedRow:
    packed = pack_admission(given, CAPACITY, layout)
    return unpack_admission(jax.numpy.asarray(packed), CAPACITY, len(layout.groups))


# Edits.


def test_padding_of_edits_has_an_address_behind_everything() -> None:
    packed = pack_edits(np.array([[3, 5], [7, 9]], np.int32), 4)
    assert packed.dtype == np.int32
    assert packed.tolist()[0] == [3, 5, NOWHERE, NOWHERE]
    assert packed.tolist()[1][:2] == [7, 9]


# Forks.


@each_layout
def test_forks_are_unpacked_as_they_were_packed_and_padding_points_out_of_range(layout: KVLayout) -> None:
    rng = random.Random(9)
    num_rows, num_groups = 6, len(layout.groups)
    for num_forks, num_copies in ((0, 0), (1, 0), (0, 1), (3, 2), (num_rows, num_rows * num_groups)):
        forks = [
            RowFork(rng.randrange(num_rows), target, rng.randint(0, 2**31 - 2))
            for target in rng.sample(range(num_rows), num_forks)
        ]
        copies = [(rng.randint(1, 99), rng.randint(100, 199)) for _ in range(num_copies)]
        packed = pack_forks(step_of(row_forks=forks, block_copies=copies), num_rows, num_groups)
        assert packed.dtype == np.int32
        plan = unpack_forks(jax.numpy.asarray(packed), num_rows)
        row_forks, unpacked_copies = np.asarray(plan.row_forks), np.asarray(plan.copies)
        assert [RowFork(*column) for column in row_forks[:, :num_forks].T.tolist()] == forks
        assert int(plan.num_copies) == num_copies
        assert list(map(tuple, unpacked_copies[:, :num_copies].T.tolist())) == copies
        assert (row_forks[:, num_forks:] == NOWHERE).all()
        assert (unpacked_copies[:, num_copies:] == NOWHERE).all()


# Admissions.


def test_packs_are_fresh_buffers() -> None:
    rng = random.Random(2)
    layout = LAYOUTS[1]
    request, edits = admitted(rng, layout), np.ones((2, 8), np.int32)
    for first, second in (
        (pack_edits(edits, 8), edits),
        (pack_forks(step_of(), 8, 3), pack_forks(step_of(), 8, 3)),
        (pack_admission(request, CAPACITY, layout), pack_admission(request, CAPACITY, layout)),
    ):
        assert not np.shares_memory(first, second)
        before = second.copy()
        first[:] = -7
        assert (second == before).all()


def test_a_pack_does_not_change_with_what_it_was_made_of() -> None:
    rng = random.Random(3)
    request = admitted(rng)
    packed = pack_admission(request, CAPACITY, LAYOUTS[0])
    before = packed.copy()
    request.token_ids[0] += 1
    request.block_tables[0][0] += 1
    request.request.token_ids.append(5)
    assert (packed == before).all()


@pytest.mark.parametrize("layout", [*LAYOUTS, WITHOUT_KV], ids=["one_group", "three_groups", "none"])
def test_an_admission_is_unpacked_as_it_was_packed(layout: KVLayout) -> None:
    rng = random.Random(4)
    for _ in range(10):
        given = admitted(
            rng,
            layout,
            temperature=rng.uniform(0.01, 2),
            top_p=rng.uniform(0.01, 1),
            min_p=rng.random(),
            top_k=rng.randint(1, 100_000),
            min_tokens=rng.randint(0, 9),
            max_tokens=None,
            logprobs=rng.randint(0, 20),
            repetition_penalty=rng.uniform(0.1, 2),
            presence_penalty=rng.uniform(-2, 2),
            frequency_penalty=rng.uniform(-2, 2),
            logit_bias=rng.choice([{}, {5: 1}]),
        )
        packed = pack_admission(given, CAPACITY, layout)
        assert packed.dtype == np.int32
        assert packed.shape == (admission_size(CAPACITY, layout),)
        row = unpacked(given, layout)
        params = given.request.params
        assert int(row.row) == given.row
        assert int(row.num_tokens) == len(given.token_ids)
        assert int(row.num_prompt_tokens) == given.request.num_prompt_tokens
        assert int(row.num_computed_tokens) == given.num_computed_tokens
        assert int(row.top_k) == params.top_k
        assert int(row.min_tokens) == params.min_tokens
        assert int(row.num_logprobs) == params.logprobs
        assert np.asarray(row.token_ids)[: len(given.token_ids)].tolist() == given.token_ids
        assert row.token_ids.shape == (CAPACITY,)
        assert row.has_rules.dtype == bool
        assert bool(row.has_rules) == bool(params.logit_bias)
        penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            value = np.asarray(getattr(row, name))
            assert value.dtype == np.float32
            assert value == np.float32(getattr(params, name))
        tables = np.asarray(row.block_tables)
        assert len(tables) == len(layout.groups)
        for table, block_ids in zip(tables.tolist(), given.block_tables, strict=True):
            assert table[: len(block_ids)] == block_ids
            assert not any(table[len(block_ids) :])


def test_a_full_admission_has_room_for_all_its_tokens_and_blocks() -> None:
    layout = LAYOUTS[1]
    request = Request("r", [1] * CAPACITY, SamplingParams(), 0, 16, frozenset())
    tables = [[7] * -(-CAPACITY // group.block_size) for group in layout.groups]
    row = unpacked(AdmittedRequest(0, request, [5] * CAPACITY, 0, tables), layout)
    assert np.asarray(row.token_ids).tolist() == [5] * CAPACITY
    assert np.asarray(row.block_tables).tolist() == [[7, 7, 7, 7], [7, 7, 7, 7], [7, 7, 0, 0]]


@pytest.mark.parametrize(("asked", "packed"), [(None, -1), (0, 0), (20, 20)])
def test_no_log_probabilities_differ_from_none_of_the_alternatives(asked: int | None, packed: int) -> None:
    assert int(unpacked(admitted(random.Random(10), logprobs=asked)).num_logprobs) == packed


@pytest.mark.parametrize("seed", [0, 1, -1, -2, 2**31, -(2**31), 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63)])
def test_all_64_bits_of_a_seed_arrive(seed: int) -> None:
    row = unpacked(admitted(random.Random(5), seed=seed))
    halves = np.asarray(row.seed)
    assert halves.dtype == np.uint32
    assert halves.tolist() == [(seed % 2**64) >> 32, seed % 2**32]


@pytest.mark.parametrize("value", [0.0, 0.01, 0.1, 1 / 3, 1.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_floats_arrive_bit_for_bit(value: float) -> None:
    given = admitted(random.Random(6), temperature=value, min_p=value)
    row = unpacked(given)
    bits = np.float32(value).view(np.int32)
    assert np.asarray(row.temperature).view(np.int32) == bits
    assert np.asarray(row.min_p).view(np.int32) == bits


@pytest.mark.parametrize(("temperature", "packed"), [(0, 0.0), (1e-5, 0.01), (0.5, 0.5)])
def test_tiny_temperatures_are_raised_on_their_way(temperature: float, packed: float) -> None:
    given = admitted(random.Random(7), temperature=temperature)
    row = unpacked(given)
    assert float(row.temperature) == np.float32(packed)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_turn_top_k_off_arrive_as_zero(top_k: int) -> None:
    given = admitted(random.Random(8), top_k=top_k)
    assert int(unpacked(given).top_k) == 0


@pytest.mark.parametrize("count", [0, 1, MAX_STOP_TOKEN_IDS])
def test_stop_tokens_arrive_and_unused_places_are_out_of_range(count: int) -> None:
    stops = frozenset(range(0, 3 * count, 3))
    request = Request("r", [1], SamplingParams(), 0, 16, stops)
    row = unpacked(AdmittedRequest(0, request, [1], 0, [[1]]))
    arrived = np.asarray(row.stop_token_ids).tolist()
    assert len(arrived) == MAX_STOP_TOKEN_IDS
    assert set(arrived) - {NOWHERE} == stops
    assert arrived.count(NOWHERE) == MAX_STOP_TOKEN_IDS - count


def test_a_resumed_request_is_packed_with_its_output_and_its_own_prompt_length() -> None:
    request = Request("r", [1, 2], SamplingParams(), 0, 16, frozenset())
    request.append(8)
    request.append(9)
    resumed = AdmittedRequest(3, request, list(request.token_ids), 0, [[1]])
    row = unpacked(resumed)
    assert (int(row.num_tokens), int(row.num_prompt_tokens), int(row.num_computed_tokens)) == (4, 2, 0)
    assert np.asarray(row.token_ids)[:4].tolist() == [1, 2, 8, 9]


# Rules.

VOCAB_SIZES = [1, 31, 32, 33, 70]


def rules_of(vocab_size: int, bad_words: list[list[int]] | None = None, **options: object) -> dict[str, np.ndarray]:
    """What arrives on the device, by field; `allowed` as the ids of the bits that are set."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    request = Request("r", [1], params, 0, 16, frozenset(), bad_words=bad_words or [])
    layout = rules_layout(vocab_size)
    packed = pack_rules(7, request, layout)
    assert (packed.dtype, packed.shape, packed[0]) == (np.int32, (1 + layout.size,), 7)
    # Beside another row's, which must not be mixed with it.
    rules = layout.unpack(jax.numpy.stack([packed[1:] * 0, packed[1:]]))
    fields = {name: np.asarray(getattr(rules, name))[1] for name in ("allowed", "bias_ids", "bias", "bad_words")}
    assert fields["allowed"].shape == (vocab_size,)
    return fields | {"allowed": np.flatnonzero(fields["allowed"])}


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_without_rules_of_its_kind_a_request_may_draw_every_token(vocab_size: int) -> None:
    rules = rules_of(vocab_size)
    assert rules["allowed"].tolist() == list(range(vocab_size))
    assert (rules["bias_ids"] == NOWHERE).all()
    assert (rules["bad_words"][:, -1] == NOWHERE).all()


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_allowed_tokens_arrive_less_the_bad_words_of_one_token(vocab_size: int) -> None:
    allowed = sorted({0, vocab_size // 2, vocab_size - 1})
    assert rules_of(vocab_size, allowed_token_ids=allowed)["allowed"].tolist() == allowed
    assert rules_of(vocab_size, [[0]], allowed_token_ids=allowed)["allowed"].tolist() == allowed[1:]
    assert rules_of(vocab_size, [[0]])["allowed"].tolist() == list(range(1, vocab_size))


@pytest.mark.parametrize("count", [0, 1, MAX_LOGIT_BIAS])
def test_biases_arrive_with_their_tokens(count: int) -> None:
    biases = {3 * i: i / 7 - 2 for i in range(count)}
    rules = rules_of(3 * MAX_LOGIT_BIAS, logit_bias=biases)
    assert rules["bias_ids"].tolist() == [*biases, *[NOWHERE] * (MAX_LOGIT_BIAS - count)]
    assert rules["bias"][:count].tolist() == np.array(list(biases.values()), np.float32).tolist()


@pytest.mark.parametrize("count", [0, 1, MAX_BAD_WORDS])
def test_bad_words_of_several_tokens_arrive_with_their_ends_aligned(count: int) -> None:
    words = [[i + 1] * (2 + i % (MAX_BAD_WORD_TOKENS - 1)) for i in range(count)]
    arrived = rules_of(500, [[3], *words, [4]])["bad_words"]
    assert arrived.shape == (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
    for word, found in zip(words, arrived.tolist(), strict=False):
        assert found == [ANY_TOKEN] * (MAX_BAD_WORD_TOKENS - len(word)) + word
    assert (arrived[count:, -1] == NOWHERE).all()
