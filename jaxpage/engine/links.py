"""Engines that a caller waits for, in its own process or in another one: messages in, messages out.

Both say the same: first `Ready`, at last `Dead`, and what `EngineCore` gives in between.
"""

import logging
import os
from collections import deque
from typing import TYPE_CHECKING, Protocol

import zmq

from jaxpage import wire
from jaxpage.config import EngineConfig
from jaxpage.engine.process import EngineProcess, envelope

if TYPE_CHECKING:
    from jaxpage.models.served_model import ServedModel

logger = logging.getLogger(__name__)

_POLL_MS = 250


class EngineLink(Protocol):
    """The way to an engine and back."""

    @property
    def pid(self) -> int:
        """Of the process that it runs in."""

    @property
    def has_news(self) -> bool:
        """Whether `receive` returns at once."""

    def send(self, message: wire.ToEngine) -> None:
        """Hand it a message."""

    def wait(self) -> None:
        """Return when `receive` does not wait for another process; Ctrl-C does no harm meanwhile."""

    def receive(self) -> wire.FromEngine:
        """Wait for what it says next."""

    def close(self) -> None:
        """End it."""


class LocalEngine:
    """The engine in the caller's process. It takes a step whenever there is nothing else to say."""

    def __init__(self, config: EngineConfig, model: "ServedModel | None" = None) -> None:
        """Load and warm up; `model` is served in place of what the options name.

        Raises `ModelLoadError` or `ConfigError`.
        """
        from jaxpage.engine.core import EngineCore

        self._core = EngineCore(config, model)
        self._said: deque[wire.FromEngine] = deque([self._core.ready])
        self.pid = os.getpid()

    @property
    def has_news(self) -> bool:
        """Whether something was said that is not received yet."""
        return bool(self._said)

    def send(self, message: wire.ToEngine) -> None:
        """Take in a message."""
        match message:
            case wire.AddRequest():
                if outputs := self._core.try_add(message):
                    self._said.append(self._core.report(outputs))
            case wire.AbortRequests():
                for sequence_id in message.sequence_ids:
                    self._core.abort(sequence_id)
                self._said.append(self._core.report([]))
            case wire.Call():
                self._said.append(self._core.answer(message))

    def wait(self) -> None:
        """There is nothing to wait for: the next thing is said by a step."""

    def receive(self) -> wire.FromEngine:
        """What it has said, or what a step gives; a step that fails is the engine's death."""
        if self._said:
            return self._said.popleft()
        try:
            return self._core.report(self._core.step())
        except Exception as error:
            logger.exception("the engine ends")
            return wire.Dead(type(error).__name__, f"the engine failed: {error!r}")

    def close(self) -> None:
        """Give back what it holds."""
        self._core.close()
        del self._core


class RemoteEngine:
    """The engine in a process of its own."""

    def __init__(self, config: EngineConfig) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._process = EngineProcess(config, self._context)
        self.pid = self._process.pid

    @property
    def has_news(self) -> bool:
        """Whether a message has arrived."""
        return bool(self._process.outputs.poll(0))

    def send(self, message: wire.ToEngine) -> None:
        """Queue a message; the socket has no high-water mark."""
        self._process.requests.send_multipart(envelope(message))

    def wait(self) -> None:
        """Until a message has arrived, or the process has ended."""
        while not self._process.outputs.poll(_POLL_MS) and self._process.death() is None:
            pass

    def receive(self) -> wire.FromEngine:
        """The next message, or `Dead` if the process has ended without one."""
        self.wait()
        if not self._process.outputs.poll(0) and (death := self._process.death()) is not None:
            return wire.Dead(type(death).__name__, str(death))
        return wire.decode_from_engine(self._process.outputs.recv())

    def close(self) -> None:
        """End the process, and the sockets to it."""
        self._process.stop()
        self._context.destroy(linger=0)
