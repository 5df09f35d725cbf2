"""Many requests at once take turns with whatever else the event loop has to do."""

import asyncio
import itertools
from typing import Any

from jaxpage.server.turnstile import Turnstile


def test_requests_of_a_burst_are_let_in_one_per_turn_and_in_their_order() -> None:
    """A question without a body goes before all of them, and between two of them others have a turn."""
    seen: list[tuple[str, int]] = []
    turns = itertools.count()
    turn = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["path"], turn))

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn = next(turns)
            await asyncio.sleep(0)

    async def burst() -> None:
        turnstile: Any = Turnstile(app)
        counting = asyncio.create_task(count_turns())
        asked = [{"type": "http", "method": "POST", "path": f"/{index}"} for index in range(5)]
        asked.append({"type": "http", "method": "GET", "path": "/health"})
        await asyncio.gather(*(turnstile(scope, None, None) for scope in asked))
        counting.cancel()

    asyncio.run(burst())
    assert [path for path, _ in seen] == ["/health", "/0", "/1", "/2", "/3", "/4"]
    assert len({when for _, when in seen}) == 6
