"""A process that runs parts one after the other, and appends to a file what it does: one JSON object a line.

    {"part": "peaks", "event": "start"}
    {"part": "peaks", "event": "row", "row": {...}}
    {"part": "peaks", "event": "end", "seconds": 3.1, "error": null}

After an error on a GPU it ends, as CUDA may be of no more use in this process: the parent starts another.
"""

import importlib
import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_checks.parts import Part
from gpu_checks.sizes import Sizes

Row = dict[str, Any]
TRACEBACK_LINES = 12


@dataclass
class Context:
    """What parts of one process are given, and share."""

    sizes: Sizes
    out: Path
    """The folder of the results."""
    work: Path
    """The folder of what other parts need and nobody keeps."""
    is_dry: bool
    """Whether this is a CPU, on which plain XLA stands in for kernels."""
    ends: float = 0.0
    """When the part at hand must end, by `time.monotonic`."""
    shared: dict[str, Any] = field(default_factory=dict)
    """Such as an engine."""
    stack: ExitStack = field(default_factory=ExitStack)
    """Closes what is shared."""

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.ends


Body = Callable[[Context], Iterator[Row]]


def run_parts(
    parts: list[Part], context: Context, events: Path, seconds: float, before: Callable[[str], None] | None
) -> int:
    """Run parts for so many seconds in all; `before` is called with the name of each. Returns the exit status."""
    finish = time.monotonic() + seconds
    with events.open("a", encoding="utf-8") as file, context.stack:

        def tell(part: Part, event: str, **what: Any) -> None:
            file.write(json.dumps({"part": part.name, "event": event, **what}, default=str) + "\n")
            file.flush()

        for part in parts:
            started = time.monotonic()
            if started > finish:
                break
            tell(part, "start")
            context.ends = min(finish, started + 0.9 * part.seconds)
            try:
                if before is not None:
                    before(part.name)
                for row in _body(part)(context):
                    tell(part, "row", row=row)
            except Exception as error:
                summary = f"{type(error).__name__}: {error}".splitlines()[0]
                tail = traceback.format_exc().strip().splitlines()[-TRACEBACK_LINES:]
                tell(part, "end", seconds=time.monotonic() - started, error="\n".join([summary, *tail]))
                return 3
            tell(part, "end", seconds=time.monotonic() - started, error=None)
    return 0


def _body(part: Part) -> Body:
    module, _, name = part.function.partition(":")
    body: Body = getattr(importlib.import_module(f"gpu_checks.{module}"), name)
    return body
