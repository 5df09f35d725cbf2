"""What a profile of a few steps says, read from the file that JAX's profiler writes."""

from dataclasses import dataclass
from pathlib import Path

from jax.profiler import ProfileData

DEVICE, HOST = "/device:GPU:0", "/host:CPU"
GRAPH_UPDATE, GRAPH_RUN = "command_buffer::update", "command_buffer::execute"
"""As XLA names what it does with a CUDA graph."""


@dataclass(frozen=True)
class Trace:
    """Of the first GPU and its host."""

    num_device_events: int
    busy_seconds: float
    """While at least one kernel or copy ran."""
    span_seconds: float
    """From the first to the last."""
    num_graph_updates: int
    num_graph_runs: int


def read_trace(folder: Path) -> Trace:
    """Raises `FileNotFoundError` if nothing was written."""
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(f"the profiler wrote nothing to {folder}")
    spans: list[tuple[float, float]] = []
    names: list[str] = []
    for plane in ProfileData.from_file(str(files[-1])).planes:
        for line in plane.lines:
            if plane.name == DEVICE and line.name.startswith("Stream"):
                spans += [(event.start_ns, event.start_ns + event.duration_ns) for event in line.events]
            elif plane.name == HOST:
                names += [event.name for event in line.events if "command_buffer::" in event.name]
    return Trace(
        num_device_events=len(spans),
        busy_seconds=1e-9 * covered(spans),
        span_seconds=1e-9 * (max(end for _, end in spans) - min(start for start, _ in spans)) if spans else 0.0,
        num_graph_updates=sum(GRAPH_UPDATE in name for name in names),
        num_graph_runs=sum(GRAPH_RUN in name for name in names),
    )


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of what some span covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
