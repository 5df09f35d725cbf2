"""The snapshot of the KV cache: plain data that agrees with the pool and the tables, and does not change with them."""

import json

from jaxpage.kv_cache.hashing import block_keys
from jaxpage.kv_cache.manager import KVCacheManager
from jaxpage.kv_cache.snapshot import take_snapshot
from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec
from jaxpage.requests.request import Request
from jaxpage.sampling_params import SamplingParams


def running(manager: KVCacheManager, request_id: str, num_tokens: int) -> Request:
    """A request all of whose tokens are computed and published."""
    request = Request(request_id, list(range(num_tokens)), SamplingParams(), 0, 16, frozenset())
    keys = block_keys(request.token_ids, manager.block_size)
    hit = manager.match(keys, num_tokens)
    manager.admit(request_id, hit)
    assert manager.grow(request_id, hit.num_tokens, num_tokens) is not None
    manager.publish(request_id, keys, num_tokens)
    request.num_computed_tokens = num_tokens
    request.num_cached_tokens = hit.num_tokens
    return request


def test_an_unused_cache_shows_its_size_and_its_groups() -> None:
    specs = [KVSpec(2, 8, window=20)] * 4 + [KVSpec(2, 8)] * 2 + [KVSpec(2, 4, chunk=32)] * 2
    assert take_snapshot(KVCacheManager(9, plan_layout([[spec] for spec in specs], 16), max_step_tokens=64), []) == {
        "null_block_id": 0,
        "num_blocks": 8,
        "num_used": 0,
        "num_free": 8,
        "num_cached": 0,
        "cached_block_ids": [],
        "num_queried_tokens": 0,
        "num_hit_tokens": 0,
        "groups": [
            {"kind": "full", "span": None, "block_size": 16, "num_layers": 2},
            {"kind": "window", "span": 20, "block_size": 16, "num_layers": 2},
            {"kind": "window", "span": 20, "block_size": 16, "num_layers": 2},
            {"kind": "chunk", "span": 32, "block_size": 32, "num_layers": 2},
        ],
        "requests": [],
    }


def test_running_requests_show_their_tables_and_what_they_found() -> None:
    manager = KVCacheManager(9, plan_layout([[KVSpec(1, 8)]], 4), max_step_tokens=64)
    first, second = running(manager, "a", 10), running(manager, "b", 6)
    snapshot = take_snapshot(manager, [first, second])
    assert snapshot["requests"] == [
        {
            "request_id": "a",
            "num_tokens": 10,
            "num_computed_tokens": 10,
            "num_cached_tokens": 0,
            "block_tables": [[1, 2, 3]],
        },
        {
            "request_id": "b",
            "num_tokens": 6,
            "num_computed_tokens": 6,
            "num_cached_tokens": 4,
            "block_tables": [[1, 4]],
        },
    ]
    assert [snapshot[name] for name in ("num_used", "num_free", "num_cached")] == [4, 4, 2]
    assert snapshot["cached_block_ids"] == [1, 2]


def test_blocks_that_are_free_and_can_be_found_are_cached_and_not_used() -> None:
    manager = KVCacheManager(9, plan_layout([[KVSpec(1, 8)]], 4), max_step_tokens=64)
    running(manager, "a", 10)
    manager.free("a")
    snapshot = take_snapshot(manager, [])
    assert [snapshot[name] for name in ("num_used", "num_free", "num_cached")] == [0, 8, 2]


def test_a_window_shows_the_null_block_where_it_has_given_up() -> None:
    manager = KVCacheManager(9, plan_layout([[KVSpec(1, 8, window=4)]], 4), max_step_tokens=4)
    request = running(manager, "a", 12)
    assert manager.grow("a", 12, 13) is not None
    (table,) = take_snapshot(manager, [request])["requests"][0]["block_tables"]
    assert [block_id == 0 for block_id in table] == [True, True, False, False]


def test_a_snapshot_is_json_and_stays_as_it_was() -> None:
    manager = KVCacheManager(9, plan_layout([[KVSpec(1, 8)]], 4), max_step_tokens=64)
    request = running(manager, "a", 6)
    snapshot = take_snapshot(manager, [request])
    written = json.dumps(snapshot)
    manager.grow("a", 6, 12)
    manager.free("a")
    assert json.dumps(snapshot) == written


def test_a_request_that_has_not_been_admitted_yet_shows_no_cached_tokens() -> None:
    manager = KVCacheManager(9, plan_layout([[KVSpec(1, 8)]], 4), max_step_tokens=64)
    waiting = Request("a", [1, 2], SamplingParams(), 0, 16, frozenset())
    (shown,) = take_snapshot(manager, [waiting])["requests"]
    assert (shown["num_cached_tokens"], shown["block_tables"]) == (0, [[]])
