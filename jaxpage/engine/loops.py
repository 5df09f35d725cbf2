"""The three loops around one scheduler and one device: sync, overlap and resident. No JAX.

They differ in when the host learns what a step gave, and in nothing else: the same steps give the same tokens. A step's
sampled tokens stay on the device, where the next step reads them; the host needs them to see who has finished, and to
tell the clients. Until then a request has tokens in flight (`Request.num_in_flight`), and is scheduled as if they were
known.
"""

import gc
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import numpy as np

from jaxpage.clock import monotonic
from jaxpage.requests.request import RequestStatus
from jaxpage.scheduler.scheduler import Scheduler
from jaxpage.scheduler.step_plan import PromptPiece, SchedulerOutput
from jaxpage.wire import SequenceOutput, TokenLogprobs

Outputs = list[SequenceOutput]
Results = tuple[
    Sequence[list[int]],
    Sequence[list[TokenLogprobs] | None],
    Sequence[PromptPiece | None] | None,
    Sequence[int] | None,
]
"""What a step gave each scheduled request, as `Scheduler.update` takes it."""
PHASES = ("schedule", "dispatch", "fetch", "update", "mask")
_LOOK_SECONDS = 0.0005
"""How often it is looked whether a step has ended whose masks are late."""


class Device(Protocol):
    """What runs the steps, in the order in which they are dispatched."""

    def dispatch(self, output: SchedulerOutput) -> Any:
        """Send a step off and return at once, with what `fetch` takes."""

    def draw_again(self, step: Any, masks: dict[int, np.ndarray | None]) -> Any:
        """Draw the tokens of some requests of the newest step again, each by its mask; without one, undo the draw.

        Returns at once, with what `fetch` takes instead of `step`.
        """

    def has_ended(self, step: Any) -> bool:
        """Whether nothing of it is left to be computed."""

    def fetch(self, step: Any) -> Results:
        """Wait for a step's results."""


def freeze_gc() -> None:
    """What is there before serving stays: the garbage collector need not go through it again and again.

    Nor need it before, while modules and programs are made: whoever starts an engine may have disabled it until here.
    """
    gc.freeze()
    gc.enable()


class Loop(ABC):
    """What the loops share: the four things that are done for each step, and how long they take."""

    def __init__(self, scheduler: Scheduler, device: Device) -> None:
        self.scheduler = scheduler
        self.device = device
        self.num_steps = 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """Host seconds spent in each phase so far; "fetch" and "mask" are waiting."""
        self.step_tokens: list[int] = []
        """Tokens of each step dispatched; whoever reports them empties it. So with the next one."""
        self.started: list[tuple[str, float]] = []
        """Requests that got a row, and when, as `clock.monotonic` counts seconds."""
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()

    @abstractmethod
    def step(self) -> Outputs:
        """Do what can be done without waiting for more than one step. Returns what is known to have been generated."""

    @property
    def has_steps_in_flight(self) -> bool:
        return bool(self._in_flight)

    def drain(self) -> Outputs:
        """Take in all that is in flight, and send nothing off."""
        outputs: Outputs = []
        while self._in_flight:
            outputs += self._update(*self._fetch())
        return outputs

    def _schedule(self) -> SchedulerOutput:
        return self._timed("schedule", self.scheduler.schedule)

    def _dispatch(self, output: SchedulerOutput) -> None:
        self.num_steps += 1
        self.step_tokens.append(output.num_tokens)
        if output.admitted:
            now = monotonic()
            self.started += [(admitted.request.request_id, now) for admitted in output.admitted]
        self._in_flight.append((output, self._timed("dispatch", self.device.dispatch, output)))

    def _constrain(self) -> None:
        """Draw again where a grammar has a say in the newest step; all earlier steps are known.

        The masks are computed while the step runs. One that is late does not hold up the other requests: its own is
        drawn in a later step.
        """
        output, step = self._in_flight[-1]
        masks = {
            index: request.constraint.mask
            for index, request in enumerate(output.requests)
            if request.constraint is not None
            and request.num_in_flight  # its prompt does not go on
            and request.status is not RequestStatus.FINISHED
        }
        if not masks:
            return
        self._timed("mask", self._wait_for_masks, list(masks.values()), len(masks) < len(output.requests), step)
        ready = {
            index: mask.result() if mask.done() and not mask.exception() else None for index, mask in masks.items()
        }
        for index, mask in ready.items():
            if mask is None:
                self.scheduler.hold_back(output.requests[index])
        self._in_flight[-1] = output, self._timed("dispatch", self.device.draw_again, step, ready)

    def _wait_for_masks(self, masks: list[Future[np.ndarray]], others_wait: bool, step: Any) -> None:
        """Until all are there; or until the step has ended, if somebody could go on then."""
        pending = set(masks)
        while pending:
            done, pending = wait(pending, _LOOK_SECONDS, FIRST_COMPLETED)
            others_wait = others_wait or bool(done)
            if others_wait and self.device.has_ended(step):
                return

    def _fetch(self) -> tuple[SchedulerOutput, Any]:
        """Wait for the oldest step in flight."""
        output, step = self._in_flight.popleft()
        return output, self._timed("fetch", self.device.fetch, step)

    def _update(self, output: SchedulerOutput, results: Any) -> Outputs:
        return self._timed("update", self.scheduler.update, output, *results)

    def _timed[T](self, phase: str, work: Callable[..., T], *args: Any) -> T:
        started = time.perf_counter()
        result = work(*args)
        self.seconds[phase] += time.perf_counter() - started
        return result


class SyncLoop(Loop):
    """One after the other (V0): the device waits for the host, and the host for the device.

    host    schedule N, dispatch N |              | update N, schedule N+1, dispatch N+1 |
    device                         | run N        |                                      | run N+1
    """

    def step(self) -> Outputs:
        output = self._schedule()
        if not output.requests:
            return []
        self._dispatch(output)
        self._constrain()
        return self._update(*self._fetch())


class OverlapLoop(Loop):
    """The host prepares a step while the one before runs (V1): the device waits for results to be fetched, no more.

    host    schedule N+1, wait N | dispatch N+1 | update N, schedule N+2, wait N+1 | dispatch N+2
    device  run N                |              | run N+1                          |
    """

    def step(self) -> Outputs:
        output = self._schedule()
        fetched = self._fetch() if self._in_flight else None
        if output.requests:
            self._dispatch(output)
        outputs = self._update(*fetched) if fetched is not None else []
        if output.requests:
            self._constrain()
        return outputs


class ResidentLoop(Loop):
    """Two steps are in flight (V2): the device finds the next one waiting when it is done.

    host    schedule N+1, dispatch N+1 | wait N | update N, schedule N+2, dispatch N+2 | wait N+1
    device  run N                               | run N+1                                        | run N+2
    """

    def step(self) -> Outputs:
        output = self._schedule()
        if output.requests:
            self._dispatch(output)
        full = len(self._in_flight) > 1 or not output.requests
        outputs = self._update(*self._fetch()) if self._in_flight and full else []
        if output.requests:
            self._constrain()
        return outputs


LOOPS: dict[str, type[Loop]] = {"sync": SyncLoop, "overlap": OverlapLoop, "resident": ResidentLoop}
