"""A device that only takes its time, to measure what the host does around it."""

import queue
import threading
import time

import numpy as np

from jaxpage.kv_cache.spec import plan_layout
from jaxpage.ops.state_spec import KVSpec
from jaxpage.requests.request import Request
from jaxpage.runner.step_table import StepTable
from jaxpage.scheduler.step_plan import SchedulerOutput

Step = tuple[list[list[int]], threading.Event]
"""What each request draws, and what is set when the step has ended."""


class SimulatedDevice:
    """Runs each step for a fixed time in its own thread, one after the other; its tokens are always the same.

    The host's part is as for a real one, but for calling XLA: a step is packed as it would be sent.
    """

    def __init__(self, step_seconds: float, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        from jaxpage.runner.programs import admit, edit  # import JAX, which the other benches do without

        self.started: list[float] = []
        """When each step began and ended, in seconds of `time.perf_counter`."""
        self.ended: list[float] = []
        self.num_bytes: list[int] = []
        """Sent to the device for each step."""
        self.only_decodes: list[bool] = []
        """Whether every request was there and computed one token."""
        self._admit, self._edit = admit, edit
        self._layout = plan_layout([[KVSpec(num_kv_heads=1, head_dim=64)]], block_size)
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._step_seconds = step_seconds
        self._table = StepTable(max_num_seqs, 1, -(-max_model_len // block_size))
        self._queue: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def dispatch(self, output: SchedulerOutput) -> Step:
        """Queue a step; every request draws a token where it reaches its last known one."""
        admissions = [
            self._admit.pack_admission(admitted, self._max_model_len, self._layout) for admitted in output.admitted
        ]
        edits, _ = self._table.advance(output)
        packed = self._edit.pack_edits(edits, max(self._edit.NUM_EDITS, edits.shape[1]))
        self.num_bytes.append(packed.nbytes + sum(admission.nbytes for admission in admissions))
        self.only_decodes.append(output.query_lens == [1] * self._max_num_seqs)
        tokens = [drawn(request) for request in output.requests]
        done = threading.Event()
        self._queue.put(done)
        return tokens, done

    def draw_again(self, step: Step, masks: dict[int, np.ndarray | None]) -> Step:
        """The same token again, or none without a mask."""
        tokens, done = step
        undone = {index for index, mask in masks.items() if mask is None}
        return [[] if index in undone else token_ids for index, token_ids in enumerate(tokens)], done

    def has_ended(self, step: Step) -> bool:
        """Whether the device is done with the step."""
        return step[1].is_set()

    def fetch(self, step: Step) -> tuple[list[list[int]], list[None], None, None]:
        """Wait until the device is done with the step."""
        tokens, done = step
        done.wait()
        return tokens, [None] * len(tokens), None, None

    def close(self) -> None:
        """End the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (done := self._queue.get()) is not None:
            self.started.append(time.perf_counter())
            time.sleep(self._step_seconds)
            self.ended.append(time.perf_counter())
            done.set()


def drawn(request: Request) -> list[int]:
    """A token where the step, which has just been scheduled, reaches the request's last known one."""
    return [7] if request.num_computed_tokens >= request.num_tokens else []
