"""Several processes run one engine: the leader tells its followers which programs to run and with what. See `follower`.

In: what `DeviceBatch.run` takes. Out: the same, in every other process, in order. ZMQ over TCP, encrypted by CURVE;
port and key travel through `jax.distributed`, so that only its processes can connect.
"""

import logging
import os
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import msgspec
import numpy as np
import zmq
import zmq.utils.monitor
from jax.experimental import multihost_utils

from jaxpage.config import EngineConfig

logger = logging.getLogger(__name__)

_READY = b"ready"
_KEY_BYTES = 40
"""Of a CURVE key, printable."""


class Launch(msgspec.Struct, frozen=True, array_like=True):
    """What `DeviceBatch.run` takes, or one of "sleep" and "wake_up"."""

    program: str
    packed: bytes = b""
    """int32, of `shape`."""
    shape: tuple[int, ...] | None = None
    """None without an input."""
    variant: Any = None

    @classmethod
    def of(cls, program: str, packed: np.ndarray | None, variant: Any) -> "Launch":
        """How a program is run, as a message."""
        variant = msgspec.to_builtins(variant)
        return (
            cls(program, b"", None, variant)
            if packed is None
            else cls(program, packed.tobytes(), packed.shape, variant)
        )

    @property
    def array(self) -> np.ndarray | None:
        return None if self.shape is None else np.frombuffer(self.packed, np.int32).reshape(self.shape)


class Followers:
    """The leader's end."""

    def __init__(self, config: EngineConfig) -> None:
        """Bind a free port and tell the other processes; they must do the same as `Leader`s."""
        self._waited_for = {str(process).encode() for process in range(1, config.num_processes)}
        self._names = sorted(self._waited_for)
        public, secret = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a follower that is gone is an error, not silence
        port = self._socket.bind_to_random_port("tcp://*")
        _from_leader(port.to_bytes(4) + public)

    def wait_ready(self) -> None:
        """Return when all of them have every program."""
        logger.info("waiting for %d followers", len(self._waited_for))
        while self._waited_for:
            name, word = self._socket.recv_multipart()
            if word == _READY:
                self._waited_for.discard(name)

    def send(self, launch: Launch) -> None:
        """To all of them. Raises `zmq.ZMQError` where one is gone."""
        message = msgspec.msgpack.encode(launch)
        for name in self._names:
            self._socket.send_multipart([name, message])


class Leader:
    """A follower's end. When the leader goes, the process ends: it may be waiting in a program for what never comes."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.coordinator_address is not None
        received = _from_leader(bytes(4 + _KEY_BYTES))
        port, key = int.from_bytes(received[:4]), received[4:]
        public, secret = zmq.curve_keypair()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, key)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.IDENTITY, str(config.process_id).encode())
        self._socket.setsockopt(zmq.RCVHWM, 0)
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        threading.Thread(target=_end_with_leader, args=(monitor,), name="leader watch", daemon=True).start()
        self._socket.connect(f"tcp://{config.coordinator_address.rpartition(':')[0]}:{port}")

    def launches(self) -> Iterator[Launch]:
        """Say that this process is ready, and give whatever the leader runs, for ever."""
        self._socket.send(_READY)
        while True:
            yield msgspec.msgpack.decode(self._socket.recv(), type=Launch)


def join_leader_or_followers(config: EngineConfig) -> Followers | Leader | None:
    """The channel between the processes; None where there is one. All processes must call it at the same point."""
    if config.num_processes == 1:
        return None
    return Leader(config) if config.process_id else Followers(config)


def _from_leader(message: bytes) -> bytes:
    """What process 0 says; the others' `message` tells how long it is."""
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8), jax.process_index() == 0)
    return np.asarray(received).astype(np.uint8).tobytes()


def _end_with_leader(monitor: "zmq.Socket[bytes]") -> NoReturn:
    zmq.utils.monitor.recv_monitor_message(monitor)
    logger.info("the leader is gone: this follower ends")
    os._exit(0)
