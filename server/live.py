"""How the engine stands right now, for a page that asks twice a second: counts, and what every KV block is doing.

In: the engine's statistics, and snapshots of its KV cache. Out: a small JSON object, whatever state the engine is in.
It tells no text, no token, no digest of either, and request ids only cut short.

A snapshot costs the engine time between two steps, and this process time in which no token is sent: 0.4 ms and 4 ms
for 32,768 blocks of which 64 requests hold half, on a 2-core machine. So all who look share one, which is taken when
somebody asks, at most every `SNAPSHOT_SECONDS`, and less often where it costs more. An engine in a long step answers
late; whoever asks meanwhile gets the last snapshot, and its age.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from jaxpage.errors import JaxpageError
from jaxpage.server.service import Service, service_of

SNAPSHOT_SECONDS = 0.25
"""Least time between two snapshots of the KV cache, however many are looking."""
MOST_OF_TIME = 1 / 40
"""Largest share of this process's time that is spent on reading snapshots."""
WAIT_SECONDS = 0.25
"""How long an answer waits for a new snapshot before it gives the last one."""
MAX_BLOCKS_TOLD = 2**15
"""Blocks whose state is told one by one, the first ones; counts are over all of them."""
SHORT_ID_LENGTH = 8


class LiveRequest(msgspec.Struct, kw_only=True):
    """A running request, all its choices together."""

    id: str
    """The first characters of its id behind the route's prefix: enough to tell requests apart, not to name one."""
    num_sequences: int
    num_tokens: int
    num_cached_tokens: int
    num_blocks: int


class Blocks(msgspec.Struct, kw_only=True):
    """The KV cache at one moment. A block is used while a request holds it, shared while several sequences do."""

    num_blocks: int
    num_used: int
    num_shared: int
    num_cached: int
    """Blocks that a prefix can be found in, used or not."""
    requests: list[LiveRequest]
    runs: list[list[int]]
    """Blocks in order of id, from block 1: how many alike, index in `requests` of the first that holds them or -1,
    how many sequences hold them, and 1 if a prefix can be found in them or 0."""


class Live(msgspec.Struct, kw_only=True):
    """The body of GET /live."""

    state: str
    """loading, ready, stopping or dead."""
    model: str
    seconds: float
    """Since the server began, for rates."""
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prefix_cache_queries: int
    prefix_cache_hits: int
    prompt_tokens: int
    generation_tokens: int
    first_tokens: int
    first_token_seconds: float
    blocks: Blocks | None
    """None until the engine has said."""
    blocks_age: float | None
    """Seconds since it did."""


class LiveView:
    """One application's `/live`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._blocks: Blocks | None = None
        self._taken = 0.0
        self._next = float("-inf")
        """When a new snapshot may be taken."""
        self._taking: asyncio.Task[None] | None = None

    async def answer(self, request: Request) -> Response:
        """GET /live."""
        service = service_of(request)
        if service.engine.is_ready:
            await self._refresh(service)
        return Response(
            msgspec.json.encode(self._look(service)),
            headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
            media_type="application/json",
        )

    async def _refresh(self, service: Service) -> None:
        """See to it that the snapshot is new, or soon will be."""
        now = time.monotonic()
        if self._taking is None and now >= self._next:
            self._next = now + SNAPSHOT_SECONDS
            self._taking = asyncio.create_task(self._take(service))
        if self._taking is not None:
            await asyncio.wait((self._taking,), timeout=WAIT_SECONDS)

    async def _take(self, service: Service) -> None:
        try:
            snapshot = await service.engine.kv_cache_snapshot()
            self._taken = time.monotonic()
            self._blocks = blocks_of(snapshot)
            now = time.monotonic()
            self._next = max(self._next, now + (now - self._taken) / MOST_OF_TIME)
        except JaxpageError:  # it dies: the state says so
            self._blocks = None
        finally:
            self._taking = None

    def _look(self, service: Service) -> Live:
        engine, stats, totals = service.engine, service.engine.stats, service.engine.metrics.totals
        now = time.monotonic()
        blocks = self._blocks if engine.is_ready else None
        return Live(
            state=state_of(service),
            model=service.model_name,
            seconds=round(now - self._started, 3),
            num_running=int(stats.get("num_requests_running", 0)),
            num_waiting=int(stats.get("num_requests_waiting", 0)),
            kv_cache_usage=round(stats.get("kv_cache_usage_perc", 0.0), 4),
            prefix_cache_queries=int(stats.get("prefix_cache_queries", 0)),
            prefix_cache_hits=int(stats.get("prefix_cache_hits", 0)),
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            first_tokens=totals.first_tokens,
            first_token_seconds=round(totals.first_token_seconds, 4),
            blocks=blocks,
            blocks_age=None if blocks is None else round(now - self._taken, 3),
        )


def state_of(service: Service) -> str:
    """One word for what a request would meet now."""
    if service.engine.is_dead:
        return "dead"
    if service.draining:
        return "stopping"
    return "ready" if service.engine.is_ready else "loading"


def short_id(request_id: str) -> str:
    """What a request is called on the page: `chatcmpl-1a2b3c4d5e...` gives `1a2b3c4d`."""
    prefix, dash, rest = request_id.partition("-")
    return (rest if dash else prefix)[:SHORT_ID_LENGTH]


def blocks_of(snapshot: Mapping[str, Any]) -> Blocks:
    """What a snapshot of the KV cache (`AsyncEngine.kv_cache_snapshot`) says of its blocks."""
    size = snapshot["num_blocks"] + 1  # with the null block, whose id is 0
    requests: list[LiveRequest] = []
    held: list[list[np.ndarray[Any, np.dtype[np.int32]]]] = []
    indices: dict[str, int] = {}
    owners = np.full(size, -1, np.int32)  # [blocks] index in requests
    references = np.zeros(size, np.int32)  # [blocks] sequences that hold it
    for sequence in snapshot["requests"]:
        name = short_id(sequence["request_id"])
        index = indices.setdefault(name, len(indices))
        if index == len(requests):
            requests.append(LiveRequest(id=name, num_sequences=0, num_tokens=0, num_cached_tokens=0, num_blocks=0))
            held.append([])
        request = requests[index]
        request.num_sequences += 1
        request.num_tokens += sequence["num_tokens"]
        request.num_cached_tokens += sequence["num_cached_tokens"]
        for table in sequence["block_tables"]:
            block_ids = np.array(table, np.int32)
            block_ids = block_ids[block_ids != snapshot["null_block_id"]]
            held[index].append(block_ids)
            references[block_ids] += 1  # a table holds a block once
            owners[block_ids[owners[block_ids] < 0]] = index
    for request, tables in zip(requests, held, strict=True):
        if request.num_sequences == 1:  # its tables have no block in common
            request.num_blocks = sum(map(len, tables))
        else:
            request.num_blocks = int(np.count_nonzero(np.bincount(np.concatenate(tables))))
    cached = np.zeros(size, np.int32)  # [blocks] 0 or 1
    cached[snapshot["cached_block_ids"]] = 1
    states = np.stack([owners, references, cached])[:, 1 : MAX_BLOCKS_TOLD + 1]
    return Blocks(
        num_blocks=snapshot["num_blocks"],
        num_used=snapshot["num_used"],
        num_shared=int((references > 1).sum()),
        num_cached=snapshot["num_cached"],
        requests=requests,
        runs=runs_of(states),
    )


def runs_of(states: np.ndarray[Any, np.dtype[np.int32]]) -> list[list[int]]:
    """Equal neighbours in states: [fields, blocks] as one run each: how many, then their fields."""
    changes = np.flatnonzero((states[:, 1:] != states[:, :-1]).any(axis=0)) + 1
    starts = np.concatenate(([0], changes)).astype(np.int64)
    lengths = np.diff(starts, append=states.shape[1])
    runs: list[list[int]] = np.vstack([lengths, states[:, starts]]).T.tolist()
    return runs
