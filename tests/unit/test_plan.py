"""Plans: what the host packs is what the compiled program unpacks, and padding points nowhere."""

import random

import jax
import numpy as np
import pytest

from jaxpage.request import Request
from jaxpage.runner.buckets import Bucket
from jaxpage.runner.plan import (
    admission_size,
    empty_step,
    pack_admission,
    pack_step,
    unpack_admission,
    unpack_step,
)
from jaxpage.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from jaxpage.scheduler import AdmittedRequest, SchedulerOutput

NOWHERE = np.iinfo(np.int32).max
CAPACITY = 12
BLOCK_SIZE = 4
BUCKETS = [Bucket(8, 8, 1), Bucket(16, 8, 16), Bucket(40, 10, 40)]


def random_step(rng: random.Random, bucket: Bucket, most: bool = False) -> SchedulerOutput:
    """A step that fits `bucket`; with `most`, one that begins as many blocks as any can."""
    rows = rng.sample(range(100), bucket.num_rows if most else rng.randint(1, bucket.num_rows))
    query_lens = [1] * len(rows)
    for _ in range(0 if bucket.max_query_len == 1 else rng.randint(0, bucket.num_tokens - len(rows))):
        query_lens[rng.randrange(len(rows))] += 1
    if most and bucket.max_query_len > 1:
        query_lens[0] += (bucket.num_tokens - sum(query_lens)) // BLOCK_SIZE * BLOCK_SIZE
    blocks = []
    for row, query_len in zip(rows, query_lens, strict=True):
        computed = BLOCK_SIZE * rng.randint(0, 9) + (0 if most else rng.randrange(BLOCK_SIZE))
        held, needed = -(-computed // BLOCK_SIZE), -(-(computed + query_len) // BLOCK_SIZE)
        blocks += [(row, index, rng.randint(1, 2**31 - 2)) for index in range(held, needed)]
    return SchedulerOutput([], [], rows, query_lens, blocks)


def admitted(rng: random.Random, **options: object) -> AdmittedRequest:
    params = SamplingParams(**options)  # type: ignore[arg-type]
    token_ids = [rng.randint(0, 2**31 - 2) for _ in range(rng.randint(1, CAPACITY))]
    num_prompt_tokens = rng.randint(1, len(token_ids))
    stops = frozenset({*params.stop_token_ids, *rng.sample(range(1000, 2000), rng.randint(0, 3))})
    seed = params.seed if params.seed is not None else rng.randrange(2**63)
    request = Request("r", token_ids[:num_prompt_tokens], params, seed, 16, stops, 0.0)
    return AdmittedRequest(rng.randint(0, 500), request, token_ids, rng.randint(0, len(token_ids) - 1))


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_step_is_unpacked_as_it_was_packed(bucket: Bucket) -> None:
    rng = random.Random(0)
    for turn in range(20):
        output = random_step(rng, bucket, most=turn < 5)
        packed = pack_step(output, bucket, BLOCK_SIZE)
        assert packed.dtype == np.int32
        plan = unpack_step(jax.numpy.asarray(packed), bucket)
        rows, query_lens, blocks = (np.asarray(field) for field in plan)
        assert rows.shape == query_lens.shape == (bucket.num_rows,)
        n, m = len(output.rows), len(output.new_blocks)
        assert rows[:n].tolist() == output.rows
        assert query_lens[:n].tolist() == output.query_lens
        assert list(map(tuple, blocks[:, :m].T.tolist())) == output.new_blocks


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_padding_of_a_step_computes_nothing_and_points_out_of_range(bucket: Bucket) -> None:
    output = SchedulerOutput([], [], [3, 1], [1, 1], [(3, 0, 5)])
    plan = unpack_step(jax.numpy.asarray(pack_step(output, bucket, BLOCK_SIZE)), bucket)
    assert set(np.asarray(plan.rows)[2:].tolist()) == {NOWHERE}
    assert set(np.asarray(plan.query_lens)[2:].tolist()) == {0}
    assert set(np.asarray(plan.new_blocks)[:, 1:].ravel().tolist()) == {NOWHERE}


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_an_empty_step_names_no_row_and_no_block(bucket: Bucket) -> None:
    plan = unpack_step(jax.numpy.asarray(empty_step(bucket, BLOCK_SIZE)), bucket)
    assert not np.asarray(plan.query_lens).any()
    assert (np.asarray(plan.rows) == NOWHERE).all()
    assert (np.asarray(plan.new_blocks) == NOWHERE).all()


def test_every_step_of_a_bucket_has_the_same_shape() -> None:
    rng = random.Random(1)
    for bucket in BUCKETS:
        shape = empty_step(bucket, BLOCK_SIZE).shape
        assert {pack_step(random_step(rng, bucket), bucket, BLOCK_SIZE).shape for _ in range(5)} == {shape}


def test_packs_are_fresh_buffers() -> None:
    rng = random.Random(2)
    output, request = random_step(rng, BUCKETS[1]), admitted(rng)
    for first, second in (
        (pack_step(output, BUCKETS[1], BLOCK_SIZE), pack_step(output, BUCKETS[1], BLOCK_SIZE)),
        (empty_step(BUCKETS[1], BLOCK_SIZE), empty_step(BUCKETS[1], BLOCK_SIZE)),
        (pack_admission(request, CAPACITY), pack_admission(request, CAPACITY)),
    ):
        assert not np.shares_memory(first, second)
        before = second.copy()
        first[:] = -7
        assert (second == before).all()


def test_a_pack_does_not_change_with_what_it_was_made_of() -> None:
    rng = random.Random(3)
    request = admitted(rng)
    packed = pack_admission(request, CAPACITY)
    before = packed.copy()
    request.token_ids[0] += 1
    request.request.token_ids.append(5)
    assert (packed == before).all()


def test_an_admission_is_unpacked_as_it_was_packed() -> None:
    rng = random.Random(4)
    for _ in range(10):
        given = admitted(
            rng,
            temperature=rng.uniform(0.01, 2),
            top_p=rng.uniform(0.01, 1),
            min_p=rng.random(),
            top_k=rng.randint(1, 100_000),
            min_tokens=rng.randint(0, 9),
            max_tokens=None,
        )
        packed = pack_admission(given, CAPACITY)
        assert packed.dtype == np.int32
        assert packed.shape == (admission_size(CAPACITY),)
        row = unpack_admission(jax.numpy.asarray(packed))
        params = given.request.params
        assert int(row.row) == given.row
        assert int(row.num_tokens) == len(given.token_ids)
        assert int(row.num_prompt_tokens) == given.request.num_prompt_tokens
        assert int(row.num_computed_tokens) == given.num_computed_tokens
        assert int(row.top_k) == params.top_k
        assert int(row.min_tokens) == params.min_tokens
        assert np.asarray(row.token_ids)[: len(given.token_ids)].tolist() == given.token_ids
        assert row.token_ids.shape == (CAPACITY,)
        for name in ("temperature", "top_p", "min_p"):
            unpacked = np.asarray(getattr(row, name))
            assert unpacked.dtype == np.float32
            assert unpacked == np.float32(getattr(params, name))


@pytest.mark.parametrize("seed", [0, 1, -1, -2, 2**31, -(2**31), 2**32 - 1, 2**32, -(2**32), 2**63 - 1, -(2**63)])
def test_all_64_bits_of_a_seed_arrive(seed: int) -> None:
    row = unpack_admission(jax.numpy.asarray(pack_admission(admitted(random.Random(5), seed=seed), CAPACITY)))
    unpacked = np.asarray(row.seed)
    assert unpacked.dtype == np.uint32
    assert unpacked.tolist() == [(seed % 2**64) >> 32, seed % 2**32]


@pytest.mark.parametrize("value", [0.0, 0.01, 0.1, 1 / 3, 1.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_floats_arrive_bit_for_bit(value: float) -> None:
    given = admitted(random.Random(6), temperature=value, min_p=value)
    row = unpack_admission(jax.numpy.asarray(pack_admission(given, CAPACITY)))
    bits = np.float32(value).view(np.int32)
    assert np.asarray(row.temperature).view(np.int32) == bits
    assert np.asarray(row.min_p).view(np.int32) == bits


@pytest.mark.parametrize(("temperature", "packed"), [(0, 0.0), (1e-5, 0.01), (0.5, 0.5)])
def test_tiny_temperatures_are_raised_on_their_way(temperature: float, packed: float) -> None:
    given = admitted(random.Random(7), temperature=temperature)
    row = unpack_admission(jax.numpy.asarray(pack_admission(given, CAPACITY)))
    assert float(row.temperature) == np.float32(packed)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_turn_top_k_off_arrive_as_zero(top_k: int) -> None:
    given = admitted(random.Random(8), top_k=top_k)
    assert int(unpack_admission(jax.numpy.asarray(pack_admission(given, CAPACITY))).top_k) == 0


@pytest.mark.parametrize("count", [0, 1, MAX_STOP_TOKEN_IDS])
def test_stop_tokens_arrive_and_unused_places_are_out_of_range(count: int) -> None:
    stops = frozenset(range(0, 3 * count, 3))
    request = Request("r", [1], SamplingParams(), 0, 16, stops, 0.0)
    row = unpack_admission(jax.numpy.asarray(pack_admission(AdmittedRequest(0, request, [1], 0), CAPACITY)))
    unpacked = np.asarray(row.stop_token_ids).tolist()
    assert len(unpacked) == MAX_STOP_TOKEN_IDS
    assert set(unpacked) - {NOWHERE} == stops
    assert unpacked.count(NOWHERE) == MAX_STOP_TOKEN_IDS - count


def test_a_resumed_request_is_packed_with_its_output_and_its_own_prompt_length() -> None:
    request = Request("r", [1, 2], SamplingParams(), 0, 16, frozenset(), 0.0)
    request.append(8)
    request.append(9)
    resumed = AdmittedRequest(3, request, list(request.token_ids), 0)
    row = unpack_admission(jax.numpy.asarray(pack_admission(resumed, CAPACITY)))
    assert (int(row.num_tokens), int(row.num_prompt_tokens), int(row.num_computed_tokens)) == (4, 2, 0)
    assert np.asarray(row.token_ids)[:4].tolist() == [1, 2, 8, 9]
