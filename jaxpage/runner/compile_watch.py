"""Counts what XLA compiles, thread by thread: a loop that serves compiles nothing."""

import threading

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class _Count(threading.local):
    compiles = 0


_count = _Count()


def num_compiles() -> int:
    """Programs that the calling thread has had compiled so far."""
    return _count.compiles


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    _count.compiles += event == _COMPILED


jax.monitoring.register_event_duration_secs_listener(_on_event)
